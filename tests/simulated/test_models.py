"""Two nodes that meet compare what they compute of the models they have in common."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import MockClock

from kvnet.engine.toy import ToyCosts, ToyEngine
from kvnet.engine.toy_model import toy_fingerprint
from kvnet.errors import PeerRefusedError
from kvnet.exchange.measured import Finding
from kvnet.exchange.models import ASKED_PER_PEER, SAMPLES_PER_PEER, ModelExchange, OwnModel
from kvnet.exchange.reuse import Rejected, judge
from kvnet.format.fingerprint import Comparison, Producer, Verdict
from kvnet.format.sample import Sample, decode_sample
from kvnet.network.memory import World
from kvnet.protocol.matching import ModelHere, Packing, Relation
from kvnet.protocol.messages.models import GetModels, GetSample
from tests.simulated.nodes import OTHER, Node, StartNode, identity, start_node

MAC = Producer("toy", "toy 1, blas 1", "a Mac", "any", 512)
NEWER = Producer("toy", "toy 1, blas 2", "a Mac", "any", 512)
TOKENS = list(range(3, 200)) * 3


@pytest.fixture
def start(world: World, nursery: trio.Nursery, tmp_path: Path) -> StartNode:
    return partial(start_node, world, nursery, tmp_path)


async def model(name: str = "toy-model", *, producer: Producer = MAC, error: float = 0.0, bits: int = 0) -> OwnModel:
    """A model whose sample was made by a machine whose arithmetic is off by some share."""
    engine = ToyEngine(Path(name), ToyCosts(), 1 << 20, 1 << 40)
    engine.error = error
    fingerprint = toy_fingerprint(name)
    sample = by(producer, decode_sample(await engine.sample(), fingerprint))
    return OwnModel.of(ModelHere(name, fingerprint, producer, Packing(bits=bits, group=64 if bits else 0), sample))


def by(producer: Producer, sample: Sample) -> Sample:
    """The same sample, made by somebody else."""
    return Sample(sample.version, sample.fingerprint, producer, sample.vocabulary, sample.rows)


def exchange(node: Node, models: Sequence[OwnModel]) -> ModelExchange:
    return ModelExchange(node.exchange, lambda: models, lane=node.lane, measured=node.identity.numerics)


async def meet(a: Node, b: Node) -> None:
    await a.meet(b)
    await trio.sleep(1.0)


async def two(
    start: StartNode, ours: Sequence[OwnModel], theirs: Sequence[OwnModel]
) -> tuple[Node, Node, ModelExchange]:
    a, b = await start("a", who=identity("a", trusts=["b"])), await start("b", who=identity("b", trusts=["a"]))
    models = exchange(a, ours)
    exchange(b, theirs)
    await meet(a, b)
    return a, b, models


async def judged(a: Node, b: Node, producer: Producer) -> Comparison | Rejected:
    """What the first node thinks of what the second has made with the model they have in common."""
    added = await b.add(TOKENS)
    manifest = added.record.manifest
    fields = {field: getattr(manifest, field) for field in manifest.__struct_fields__}
    info = replace(a.engine.info, producer=MAC)
    told = type(manifest)(**(fields | {"producer": producer}))
    return judge(told, added.record.hash, info, a.identity, exact_only=False)


async def test_nodes_whose_samples_agree_are_exact_by_their_producers_alone(
    autojump_clock: MockClock, start: StartNode
) -> None:
    a, b, models = await two(start, [await model()], [await model()])
    (found,) = models.of(b.network.peer_id)
    assert found.match is not None
    assert (found.match.relation, found.match.verdict, found.ours) == (Relation.SAME, Verdict.EXACT, "toy-model")
    assert isinstance(await judged(a, b, MAC), Comparison)


async def test_agreement_never_raises_what_the_producers_say(autojump_clock: MockClock, start: StartNode) -> None:
    a, b, models = await two(start, [await model()], [await model(producer=NEWER)])
    (found,) = models.of(b.network.peer_id)
    assert found.match is not None
    assert found.match.measured is not None
    assert found.match.measured.difference == 0.0
    assert (found.match.verdict, found.match.reasons) == (Verdict.TOLERANT, ("blas 1 here, 2 there",))
    comparison = await judged(a, b, NEWER)
    assert isinstance(comparison, Comparison)
    assert comparison.verdict is Verdict.TOLERANT


async def test_nodes_that_differ_in_a_bit_are_tolerant_though_their_producers_are_equal(
    autojump_clock: MockClock, start: StartNode
) -> None:
    a, b, models = await two(start, [await model()], [await model(error=1.2e-7)])
    (found,) = models.of(b.network.peer_id)
    assert found.match is not None
    assert found.match.verdict is Verdict.TOLERANT
    assert "less than 0.01 %" in found.match.reasons[0]
    comparison = await judged(a, b, MAC)
    assert isinstance(comparison, Comparison)
    assert comparison.verdict is Verdict.TOLERANT


async def test_state_of_a_machine_that_computes_something_else_is_not_reused(
    autojump_clock: MockClock, start: StartNode
) -> None:
    a, b, models = await two(start, [await model()], [await model(producer=NEWER, error=0.5)])
    (found,) = models.of(b.network.peer_id)
    assert found.match is not None
    assert found.match.verdict is Verdict.INCOMPATIBLE
    verdict = await judged(a, b, NEWER)
    assert isinstance(verdict, Rejected)
    assert verdict.code == "measured"
    assert "a Mac" in verdict.text
    assert "% apart" in verdict.text
    # The kind of machine counts, and no other.
    assert isinstance(await judged(a, b, MAC), Comparison)


async def test_a_prompt_is_computed_rather_than_continued_from_a_machine_that_computes_something_else(
    autojump_clock: MockClock, start: StartNode
) -> None:
    a, b = await start("a", who=identity("a", trusts=["b"])), await start("b")
    models = exchange(a, [await model(producer=a.engine.info.producer)])
    exchange(b, [await model(producer=b.engine.info.producer, error=0.5)])
    await b.add(TOKENS)
    assert (await a.generate([*TOKENS, 7], reuse=False)).reused_tokens == 0
    await meet(a, b)
    (found,) = models.of(b.network.peer_id)
    assert found.match is not None
    assert found.match.verdict is Verdict.INCOMPATIBLE
    answer = await a.generate([*TOKENS, 7])
    assert answer.reused_tokens == 0
    assert "measured" in {rejected.code for rejected in answer.rejected}
    # Once the other machine was mended, and has made a new sample, its state is used.
    a.identity.numerics.note(mended(a))
    assert (await a.generate([*TOKENS, 8])).reused_tokens > 500


def mended(node: Node) -> Finding:
    """The finding of a machine that was mended."""
    (found,) = node.identity.numerics.all()
    return msgspec.structs.replace(found, tolerated=True, difference=0.0)


async def test_what_this_node_made_itself_is_used_whatever_another_claims_to_be(
    autojump_clock: MockClock, start: StartNode
) -> None:
    a, b, _ = await two(start, [await model()], [await model(error=0.5)])
    own = await judged(a, a, MAC)
    assert isinstance(own, Comparison)
    assert own.verdict is Verdict.EXACT
    assert isinstance(await judged(a, b, MAC), Rejected)


async def test_a_pair_of_samples_is_compared_once(autojump_clock: MockClock, start: StartNode) -> None:
    a, b, models = await two(start, [await model()], [await model(error=1.2e-7)])
    first = a.identity.numerics.all()
    (session,) = a.exchange.sessions()
    (again,) = await models.refresh(session)
    assert again.match is not None
    assert again.match.verdict is Verdict.TOLERANT
    assert a.identity.numerics.all() == first
    assert len(b.identity.numerics.all()) == 1


async def test_a_sample_that_comes_later_is_compared_then(autojump_clock: MockClock, start: StartNode) -> None:
    sampled = await model()
    ours = [OwnModel.of(replace(sampled.here, sample=None))]
    _, b, models = await two(start, ours, [await model(error=0.5)])
    (found,) = models.of(b.network.peer_id)
    assert found.match is not None
    assert (found.match.verdict, found.match.measured) == (Verdict.EXACT, None)
    ours[0] = sampled
    models.changed()
    await trio.sleep(1.0)
    (found,) = models.of(b.network.peer_id)
    assert found.match is not None
    assert found.match.verdict is Verdict.INCOMPATIBLE


async def test_a_peer_that_has_a_new_model_is_asked_at_once(autojump_clock: MockClock, start: StartNode) -> None:
    a, b = await start("a"), await start("b")
    new: list[OwnModel] = []
    ours, theirs = exchange(a, [await model()]), exchange(b, new)
    await meet(a, b)
    await trio.sleep(10.0)
    assert ours.of(b.network.peer_id) == []
    new.append(await model())
    theirs.changed()
    await trio.sleep(1.0)
    assert [each.ours for each in ours.of(b.network.peer_id)] == ["toy-model"]
    # And then they have said all there is to say.
    told = told_times(ours, b) + told_times(theirs, a)
    await trio.sleep(60.0)
    assert told_times(ours, b) + told_times(theirs, a) == told


async def test_models_that_come_one_shortly_after_another_are_all_known(
    autojump_clock: MockClock, start: StartNode
) -> None:
    a, b = await start("a"), await start("b")
    new: list[OwnModel] = []
    ours, theirs = exchange(a, [await model()]), exchange(b, new)
    await meet(a, b)
    for name in ("first", "second", "third"):
        new.append(await model(name))
        theirs.changed()
        await trio.sleep(0.1)
    assert [each.theirs.name for each in ours.of(b.network.peer_id)] == ["first", "second", "third"]


def told_times(models: ModelExchange, peer: Node) -> int:
    """How often a peer was told of the models."""
    return models._known[peer.network.peer_id].told.used


async def test_another_form_of_a_model_is_named_and_another_model_is_not_matched(
    autojump_clock: MockClock, start: StartNode
) -> None:
    ours = [await model("Toy-1B-4bit", bits=4)]
    theirs = [await model("Toy-1B-8bit", bits=8), await model("Something-Else")]
    _, b, models = await two(start, ours, theirs)
    near, other = models.of(b.network.peer_id)
    assert near.match is not None
    assert near.match.reasons == ("other quantisation: 4-bit in groups of 64 here, 8-bit in groups of 64 there",)
    assert (other.ours, other.match) == ("", None)


async def test_models_are_forgotten_with_the_session(autojump_clock: MockClock, start: StartNode) -> None:
    a, b, models = await two(start, [await model()], [await model()])
    await a.network.disconnect(b.network.peer_id)
    await trio.sleep(0.01)
    assert models.of(b.network.peer_id) == []


async def test_who_shares_no_namespace_learns_nothing_of_the_models(
    autojump_clock: MockClock, start: StartNode
) -> None:
    a = await start("a")
    exchange(a, [await model()])
    stranger = await start("stranger", who=identity("stranger", namespaces=(OTHER,)))
    models = exchange(stranger, [await model()])
    session = await stranger.exchange.connect(a.network.address)
    assert session is not None
    assert not ModelExchange.can_ask(session)
    await trio.sleep(1.0)
    assert models.of(a.network.peer_id) == []


async def test_a_peer_gets_no_more_samples_than_it_can_need(autojump_clock: MockClock, start: StartNode) -> None:
    a, _, _ = await two(start, [await model()], [await model()])
    (session,) = a.exchange.sessions()
    slot = next(iter(session.slots.values()))
    fingerprint = toy_fingerprint("toy-model").hash
    with pytest.raises(PeerRefusedError, match="busy"):
        for _ in range(SAMPLES_PER_PEER + 1):
            await session.ask(GetSample(request_id=0, slot=slot, fingerprint=fingerprint))
    with pytest.raises(PeerRefusedError, match="unknown"):
        await session.ask(GetSample(request_id=0, slot=slot, fingerprint=bytes(32)))
    await session.ask(GetModels(request_id=0, slot=slot, mine=bytes(32)))


async def test_a_sample_by_another_producer_than_told_counts_for_nothing(
    autojump_clock: MockClock, start: StartNode
) -> None:
    honest = await model(error=0.5)
    lie = OwnModel(replace(honest.here, producer=NEWER), honest.sample, honest.digest)
    other = await model("second", error=0.5)
    a, b, models = await two(start, [await model(), await model("second")], [lie, other])
    # It hides no other model.
    (found,) = a.identity.numerics.all()
    assert found.fingerprint == toy_fingerprint("second").hash
    named, measured = models.of(b.network.peer_id)
    assert named.match is not None
    assert (named.match.verdict, named.match.measured) == (Verdict.TOLERANT, None)
    assert measured.match is not None
    assert measured.match.verdict is Verdict.INCOMPATIBLE


async def test_a_sample_that_is_not_given_hides_no_other_model(autojump_clock: MockClock, start: StartNode) -> None:
    kept = await model()
    withheld = OwnModel(kept.here, b"", kept.digest)
    swapped = OwnModel((await model("third")).here, kept.sample, kept.digest)
    theirs = [withheld, swapped, await model("second", error=0.5)]
    a, _, _ = await two(start, [await model(), await model("third"), await model("second")], theirs)
    assert [each.fingerprint for each in a.identity.numerics.all()] == [toy_fingerprint("second").hash]


async def test_a_peer_is_told_of_the_models_no_more_often_than_it_can_need(
    autojump_clock: MockClock, start: StartNode
) -> None:
    a, b, _ = await two(start, [await model()], [await model()])
    session = b.exchange.session_with(a.network.peer_id)
    assert session is not None
    answered = 0
    with pytest.raises(PeerRefusedError, match="busy"):
        for _ in range(200):
            await session.ask(GetModels(request_id=0, slot=session.member_slots[0], mine=bytes(32)))
            answered += 1
    assert ASKED_PER_PEER / 2 < answered <= ASKED_PER_PEER
    await trio.sleep(700)
    await session.ask(GetModels(request_id=0, slot=session.member_slots[0], mine=bytes(32)))
