"""Serving: authorised by a proved namespace, silent to everybody else, and within limits."""

from typing import Any

import msgspec
import pytest

from kvnet.protocol.held import HeldTable
from kvnet.protocol.messages.artifacts import (
    ChunkListReply,
    GetChunkList,
    GetHave,
    GetManifest,
    Have,
    Lookup,
    LookupReply,
    ManifestReply,
)
from kvnet.protocol.messages.base import encode_message
from kvnet.protocol.messages.bulk import OpenBulk
from kvnet.protocol.messages.chunks import GetChunks
from kvnet.protocol.messages.liveness import Ping, Pong
from kvnet.protocol.messages.refusals import RefusalReason, Refused
from kvnet.protocol.pace import Purpose
from kvnet.protocol.serve import RefuseChunks, SendChunks, SendReply, ServeLimits, ServeMachine
from kvnet.trust.namespace import Namespace
from kvnet.trust.policy import TrustPolicy
from tests.unit.protocol.swarm import peer
from tests.unit.trust.samples import FRIEND, MINE, OTHER, OWN, Artifact, make_artifact, span

POLICY = TrustPolicy("trusted", frozenset({OWN.public}), frozenset({FRIEND.public}))
SLOTS = {3: MINE}
ARTIFACT = make_artifact(range(1000))
NAME = bytes(MINE.keyed_artifact(ARTIFACT.hash))
NOBODYS = b"?" * 32
ME = peer("somebody")


def table(*artifacts: Artifact, namespaces: tuple[Namespace, ...] = (OTHER, MINE)) -> HeldTable:
    held = HeldTable(namespaces)
    for artifact in artifacts or (ARTIFACT,):
        held.add(artifact, artifact.keys)
    return held


def decide(request: Any, *, slots: Any = None, held: HeldTable | None = None, policy: TrustPolicy = POLICY) -> Any:
    slots = SLOTS if slots is None else slots
    held = table() if held is None else held
    decision = ServeMachine().decide(ME, slots, request, held, policy, 0.0)
    assert isinstance(decision, SendReply)
    return decision.reply


def keys_of(artifact: Artifact, depths: list[int]) -> tuple[bytes, ...]:
    return tuple(bytes(MINE.lookup_key(artifact.keys[depth - 1])) for depth in depths)


def chunk_request(indices: tuple[int, ...] = (0, 1), slot: int = 3, artifact: bytes = NAME) -> GetChunks:
    return GetChunks(session=b"s" * 16, slot=slot, artifact=artifact, indices=indices)


# --- what members get -----------------------------------------------------------------------------------------


def test_member_gets_manifest_and_chunk_list_unchanged() -> None:
    assert decide(GetManifest(request_id=1, slot=3, artifact=NAME)) == ManifestReply(
        request_id=1, envelope=ARTIFACT.envelope
    )
    assert decide(GetChunkList(request_id=2, slot=3, artifact=NAME, page=0)) == ChunkListReply(
        request_id=2, page=ARTIFACT.pages[0]
    )


def test_page_beyond_the_chunk_list_is_not_held() -> None:
    reply = decide(GetChunkList(request_id=2, slot=3, artifact=NAME, page=1))
    assert reply == Refused(request_id=2, reason="not_held")


def test_lookup_names_each_artifact_once_at_its_deepest_key() -> None:
    longer = make_artifact(range(2000))
    other = make_artifact([*range(300), 7, 7, 7])
    held = table(ARTIFACT, longer, other)
    reply = decide(Lookup(request_id=1, slot=3, keys=keys_of(ARTIFACT, [4, 3, 2, 1])), held=held)
    assert [(match.key_index, match.artifact) for match in reply.matches] == [
        (index, bytes(MINE.keyed_artifact(artifact.hash)))
        for index, artifact in ((0, ARTIFACT), (1, longer), (3, other))
    ]
    [first, *_] = reply.matches
    assert (first.n_tokens, first.codec, first.size_bytes) == (1000, "raw", ARTIFACT.manifest.total_size_bytes)


def test_lookup_names_at_most_eight_the_newest_of_one_depth_first() -> None:
    artifacts = [make_artifact(range(300), created=number) for number in range(1, 12)]
    reply = decide(Lookup(request_id=1, slot=3, keys=keys_of(artifacts[0], [1])), held=table(*artifacts))
    newest = [bytes(MINE.keyed_artifact(artifact.hash)) for artifact in reversed(artifacts)]
    assert [match.artifact for match in reply.matches] == newest[:8]


def test_lookup_of_nothing_held_is_empty() -> None:
    assert decide(Lookup(request_id=1, slot=3, keys=(NOBODYS,))) == LookupReply(request_id=1, matches=())


def records(slots: Any, keys: tuple[bytes, ...]) -> tuple[list[Any], LookupReply]:
    """What others are asked for, and the reply."""
    asked: list[Any] = []

    def others(namespace: Namespace, wanted: Any) -> tuple[bytes, ...]:
        asked.append((namespace, tuple(wanted)))
        return (b"a record",)

    lookup = Lookup(request_id=1, slot=3, keys=keys)
    reply = ServeMachine().decide(ME, slots, lookup, table(), POLICY, 0.0, others=others).reply
    assert isinstance(reply, LookupReply)
    return asked, reply


def test_others_are_named_only_for_what_they_hold_beyond_this_node() -> None:
    keys = (NOBODYS, *keys_of(ARTIFACT, [4, 3]))
    asked, reply = records(SLOTS, keys)
    assert asked == [(MINE, (NOBODYS,))]
    assert reply.records == (b"a record",)
    assert records(SLOTS, (NOBODYS,))[0] == [(MINE, (NOBODYS,))]
    assert records(SLOTS, keys[1:])[0] == [(MINE, ())]


@pytest.mark.parametrize("name", ["no-slot-proved", "another-slot", "namespace-this-node-is-not-in"])
def test_who_has_not_proved_the_namespace_is_told_of_nobody(name: str) -> None:
    asked, reply = records(STRANGERS[name], (NOBODYS,))
    assert asked == []
    assert reply == LookupReply(request_id=1, matches=())


def test_member_gets_the_chunks_that_exist_in_the_order_asked_for() -> None:
    machine = ServeMachine()
    plan = machine.decide_chunks(ME, SLOTS, chunk_request((2, 99, 0)), table(), POLICY, 0.0)
    assert plan == SendChunks(ARTIFACT, (2, 0), (99,))


def test_ping_is_answered() -> None:
    assert decide(Ping(request_id=9)) == Pong(request_id=9)


# --- what everybody else gets ---------------------------------------------------------------------------------

STRANGERS: dict[str, Any] = {
    "no-slot-proved": {},
    "another-slot": {4: MINE},
    "another-namespace": {3: OTHER},
    "namespace-this-node-is-not-in": {3: Namespace("left", MINE.prefix_secret, b"e" * 32)},
}


@pytest.mark.parametrize("slots", STRANGERS.values(), ids=STRANGERS)
def test_peer_without_the_namespace_cannot_tell_what_is_held_from_what_nobody_has(slots: Any) -> None:
    asked: list[tuple[Any, Any]] = [
        (
            Lookup(request_id=1, slot=3, keys=keys_of(ARTIFACT, [4, 3, 2, 1])),
            Lookup(request_id=1, slot=3, keys=(NOBODYS,)),
        ),
        (GetManifest(request_id=1, slot=3, artifact=NAME), GetManifest(request_id=1, slot=3, artifact=NOBODYS)),
        (
            GetChunkList(request_id=1, slot=3, artifact=NAME, page=0),
            GetChunkList(request_id=1, slot=3, artifact=NOBODYS, page=0),
        ),
    ]
    for held, nobodys in asked:
        as_stranger = encode_message(decide(held, slots=slots))
        assert as_stranger == encode_message(decide(nobodys, slots=slots)) == encode_message(decide(nobodys))


@pytest.mark.parametrize("slots", [*STRANGERS.values(), None], ids=[*STRANGERS, "no-such-session"])
def test_peer_without_the_namespace_gets_no_chunk(slots: Any) -> None:
    machine = ServeMachine()
    refusal = machine.decide_chunks(ME, slots, chunk_request(), table(), POLICY, 0.0)
    assert refusal == machine.decide_chunks(ME, SLOTS, chunk_request(artifact=NOBODYS), table(), POLICY, 0.0)
    assert refusal == RefuseChunks((0, 1), RefusalReason.UNKNOWN)


def test_member_of_two_namespaces_cannot_use_one_to_get_at_the_other() -> None:
    both = {3: OTHER, 5: MINE}
    assert decide(GetManifest(request_id=1, slot=3, artifact=NAME), slots=both).reason == "unknown"
    assert isinstance(decide(GetManifest(request_id=1, slot=5, artifact=NAME), slots=both), ManifestReply)


def test_chunk_is_never_served_by_its_hash_alone() -> None:
    chunk_hash = bytes(ARTIFACT.entries[0].hash)
    machine = ServeMachine()
    refusal = machine.decide_chunks(ME, SLOTS, chunk_request(artifact=chunk_hash), table(), POLICY, 0.0)
    assert refusal == RefuseChunks((0, 1), RefusalReason.UNKNOWN)


def test_peer_of_a_namespace_that_was_left_gets_nothing_out_of_the_one_in_its_place() -> None:
    replaced = Namespace("mine", b"z" * 32, b"y" * 32)
    fresh = make_artifact(range(1000), namespace=replaced)
    held = table(fresh, namespaces=(replaced,))
    name = bytes(replaced.keyed_artifact(fresh.hash))
    assert decide(GetManifest(request_id=1, slot=3, artifact=name), held=held).reason == "unknown"
    assert decide(GetManifest(request_id=1, slot=3, artifact=NAME), held=held).reason == "unknown"


# --- the table ------------------------------------------------------------------------------------------------


def test_artifact_of_a_namespace_this_node_is_not_in_is_offered_to_nobody() -> None:
    held = HeldTable([OTHER])
    assert not held.add(ARTIFACT, ARTIFACT.keys)
    assert len(held) == 0


def test_artifact_is_offered_under_every_lookup_secret_of_its_namespace() -> None:
    older = Namespace("kept", MINE.prefix_secret, b"o" * 32)
    held = table(namespaces=(MINE, older))
    assert len(held) == 2
    request = GetManifest(request_id=1, slot=3, artifact=bytes(older.keyed_artifact(ARTIFACT.hash)))
    assert isinstance(decide(request, slots={3: older}, held=held), ManifestReply)


def test_removed_artifact_is_offered_no_longer() -> None:
    longer = make_artifact(range(2000))
    held = table(ARTIFACT, longer)
    held.remove(ARTIFACT.hash)
    held.remove(ARTIFACT.hash)
    assert len(held) == 1
    assert decide(GetManifest(request_id=1, slot=3, artifact=NAME), held=held).reason == "unknown"
    reply = decide(Lookup(request_id=1, slot=3, keys=keys_of(ARTIFACT, [4, 3, 2, 1])), held=held)
    assert [match.n_tokens for match in reply.matches] == [2000]
    held.remove(longer.hash)
    assert decide(Lookup(request_id=1, slot=3, keys=keys_of(longer, [2, 1])), held=held).matches == ()


def test_artifact_added_twice_is_offered_once() -> None:
    assert len(table(ARTIFACT, ARTIFACT)) == 1


@pytest.mark.parametrize("artifact", [make_artifact(key=FRIEND), make_artifact(derived_from=(span(FRIEND),))])
def test_what_is_revoked_is_not_served(artifact: Artifact) -> None:
    revoked = TrustPolicy("trusted", POLICY.own, POLICY.trusted, revoked=frozenset({FRIEND.public}))
    name = bytes(MINE.keyed_artifact(artifact.hash))
    request = GetManifest(request_id=1, slot=3, artifact=name)
    lookup = Lookup(request_id=1, slot=3, keys=keys_of(artifact, [1]))
    assert isinstance(decide(request, held=table(artifact)), ManifestReply)
    assert decide(request, held=table(artifact), policy=revoked).reason == "unknown"
    assert decide(lookup, held=table(artifact), policy=revoked).matches == ()
    refusal = ServeMachine().decide_chunks(ME, SLOTS, chunk_request(artifact=name), table(artifact), revoked, 0.0)
    assert isinstance(refusal, RefuseChunks)


# --- limits ---------------------------------------------------------------------------------------------------


def test_node_that_serves_nothing_refuses_everything_but_pings() -> None:
    machine = ServeMachine(serving=False)
    request = GetManifest(request_id=1, slot=3, artifact=NAME)
    assert machine.decide(ME, SLOTS, request, table(), POLICY, 0.0).reply == Refused(request_id=1, reason="not_serving")
    assert machine.decide(ME, SLOTS, Ping(request_id=1), table(), POLICY, 0.0).reply == Pong(request_id=1)
    refusal = machine.decide_chunks(ME, SLOTS, chunk_request(), table(), POLICY, 0.0)
    assert refusal == RefuseChunks((0, 1), RefusalReason.NOT_SERVING)
    machine.serving = True
    assert isinstance(machine.decide_chunks(ME, SLOTS, chunk_request(), table(), POLICY, 0.0), SendChunks)


def test_peer_that_asks_too_fast_is_told_that_we_are_busy_and_others_are_not() -> None:
    machine = ServeMachine(ServeLimits(requests_per_s=2.0, request_burst=3.0))
    request = GetManifest(request_id=1, slot=3, artifact=NAME)

    def ask(who: str, now: float) -> bool:
        return isinstance(machine.decide(peer(who), SLOTS, request, table(), POLICY, now).reply, ManifestReply)

    assert [ask("eager", 0.0) for _ in range(5)] == [True, True, True, False, False]
    assert ask("patient", 0.0)
    assert [ask("eager", 0.5) for _ in range(2)] == [True, False]
    assert not ask("eager", 0.4)
    assert [ask("eager", 100.0) for _ in range(4)] == [True, True, True, False]


def test_chunk_requests_of_one_peer_at_once_are_limited() -> None:
    machine = ServeMachine(ServeLimits(chunk_requests_in_flight=2))
    held = table()

    def ask(who: str) -> Any:
        return machine.decide_chunks(peer(who), SLOTS, chunk_request(), held, POLICY, 0.0)

    assert isinstance(ask("eager"), SendChunks)
    assert isinstance(ask("eager"), SendChunks)
    assert ask("eager") == RefuseChunks((0, 1), RefusalReason.BUSY)
    assert isinstance(ask("patient"), SendChunks)
    machine.finished_chunks(peer("eager"))
    assert isinstance(ask("eager"), SendChunks)
    machine.session_ended(0.0)
    machine.finished_chunks(peer("eager"))
    assert isinstance(ask("eager"), SendChunks)


def test_a_machine_is_uploading_while_a_chunk_request_is_answered() -> None:
    machine = ServeMachine()
    states = [machine.uploading]
    machine.decide_chunks(peer("one"), SLOTS, chunk_request(), table(), POLICY, 0.0)
    states.append(machine.uploading)
    machine.finished_chunks(peer("one"))
    assert [*states, machine.uploading] == [False, True, False]


def test_a_new_session_does_not_raise_the_limit_by_what_an_old_one_left_unfinished() -> None:
    machine = ServeMachine(ServeLimits(chunk_requests_in_flight=2))
    held = table()

    def ask() -> Any:
        return machine.decide_chunks(peer("eager"), SLOTS, chunk_request(), held, POLICY, 0.0)

    assert [isinstance(ask(), SendChunks) for _ in range(2)] == [True, True]
    machine.session_ended(0.0)
    assert ask() == RefuseChunks((0, 1), RefusalReason.BUSY)
    for _ in range(2):
        machine.finished_chunks(peer("eager"))
    assert [isinstance(ask(), SendChunks) for _ in range(3)] == [True, True, False]


def test_a_new_session_is_no_new_budget_and_who_owes_nothing_is_forgotten() -> None:
    machine = ServeMachine(ServeLimits(requests_per_s=1.0, request_burst=2.0))
    request = GetManifest(request_id=1, slot=3, artifact=NAME)
    held = table()

    def ask(now: float) -> Any:
        return machine.decide(peer("eager"), SLOTS, request, held, POLICY, now).reply

    assert [isinstance(ask(0.0), Refused) for _ in range(3)] == [False, False, True]
    machine.session_ended(0.5)
    assert machine.n_remembered == 1
    assert isinstance(ask(0.5), Refused)
    machine.session_ended(10.0)
    assert machine.n_remembered == 0
    assert not isinstance(ask(10.0), Refused)


def test_refused_chunk_requests_do_not_count_as_in_flight() -> None:
    machine = ServeMachine(ServeLimits(chunk_requests_in_flight=1))
    for _ in range(3):
        machine.decide_chunks(ME, SLOTS, chunk_request(artifact=NOBODYS), table(), POLICY, 0.0)
    assert isinstance(machine.decide_chunks(ME, SLOTS, chunk_request(), table(), POLICY, 0.0), SendChunks)


def test_bytes_to_one_peer_are_paced_after_a_burst() -> None:
    machine = ServeMachine(ServeLimits(bytes_per_s=100.0, burst_bytes=250.0))
    assert [machine.delay_s(ME, 100, 0.0) for _ in range(4)] == [0.0, 0.0, 0.5, 1.5]
    assert machine.delay_s(peer("other"), 250, 0.0) == 0.0
    assert machine.delay_s(ME, 100, 1.5) == 1.0
    assert machine.delay_s(ME, 100, 1000.0) == 0.0


def test_bytes_are_not_paced_unless_asked_for() -> None:
    assert ServeMachine().delay_s(ME, 1 << 40, 0.0) == 0.0


def test_member_may_have_a_bulk_connection_and_nobody_else() -> None:
    request = OpenBulk(request_id=5, certificate=b"c", cipher="tls13")
    machine = ServeMachine()
    assert machine.refuse_bulk(ME, {3: MINE}, request, 0.0) is None
    assert machine.refuse_bulk(ME, {}, request, 0.0) == Refused(request_id=5, reason=RefusalReason.UNKNOWN)
    machine.serving = False
    assert machine.refuse_bulk(ME, {3: MINE}, request, 0.0) == Refused(request_id=5, reason=RefusalReason.NOT_SERVING)


def test_only_a_limit_on_bytes_asks_to_be_paced() -> None:
    assert not ServeMachine().limits_rate
    assert ServeMachine(ServeLimits(bytes_per_s=1.0)).limits_rate


# --- what is shared among peers ---------------------------------------------------------------------------------


def slots_taken(machine: ServeMachine, who: str, n_requests: int, purpose: str = "interactive") -> int:
    request = msgspec.structs.replace(chunk_request(), purpose=purpose)
    answers = [machine.decide_chunks(peer(who), SLOTS, request, table(), POLICY, 0.0) for _ in range(n_requests)]
    assert all(isinstance(each, SendChunks) or each.reason is RefusalReason.BUSY for each in answers)
    return sum(isinstance(each, SendChunks) for each in answers)


def test_upload_slots_are_shared_and_nobody_gets_all() -> None:
    machine = ServeMachine(ServeLimits(chunk_requests_in_flight=8, upload_slots=8))
    assert slots_taken(machine, "first", 4) == 4
    assert slots_taken(machine, "second", 9) == 4
    assert slots_taken(machine, "third", 1) == 0
    machine.finished_chunks(peer("first"))
    assert slots_taken(machine, "third", 2) == 1
    assert slots_taken(machine, "first", 1) == 0


def test_peer_gets_no_more_than_its_share_though_slots_are_free() -> None:
    machine = ServeMachine(ServeLimits(chunk_requests_in_flight=8, upload_slots=8))
    assert slots_taken(machine, "first", 1) == 1
    assert slots_taken(machine, "second", 9) == 4
    assert slots_taken(machine, "third", 9) == 2
    assert slots_taken(machine, "fourth", 9) == 1


def test_copies_leave_slots_to_those_who_wait() -> None:
    machine = ServeMachine(ServeLimits(chunk_requests_in_flight=8, upload_slots=8))
    assert slots_taken(machine, "first", 9, "scrub") == 4
    assert slots_taken(machine, "second", 9, "replication") == 2
    assert slots_taken(machine, "third", 9, "interactive") == 2


def test_bytes_of_all_peers_together_are_paced() -> None:
    machine = ServeMachine(ServeLimits(total_bytes_per_s=1000.0))
    assert machine.limits_rate
    assert machine.delay_s(ME, 1000, 0.0) == pytest.approx(0.75)
    assert machine.delay_s(peer("other"), 1000, 0.0) == pytest.approx(1.75)
    assert machine.delay_s(peer("copy"), 1000, 0.0, Purpose.SCRUB) > 30
    both = ServeMachine(ServeLimits(total_bytes_per_s=1000.0, bytes_per_s=10.0, burst_bytes=1.0))
    assert both.delay_s(ME, 1001, 0.0) == pytest.approx(100.0)


def test_holder_of_a_part_says_which() -> None:
    request = GetHave(request_id=4, slot=3, artifact=NAME)
    n_chunks = len(ARTIFACT.entries)
    assert decide(request) == Have(request_id=4, runs=(0, n_chunks))
    decision = ServeMachine().decide(ME, SLOTS, request, table(), POLICY, 0.0, holding=lambda _: [1, 2])
    assert decision.reply == Have(request_id=4, runs=(1, 2))
    assert decide(GetHave(request_id=4, slot=3, artifact=NOBODYS)) == Refused(request_id=4, reason="unknown")
