"""What an eavesdropper inside the encryption would find: no name of anything that is not under a namespace's secret."""

from collections import defaultdict
from pathlib import Path

import trio
from trio.testing import MockClock

from kvnet.exchange.node import NodeOptions
from kvnet.format.prefix import block_keys
from kvnet.network.interface import StreamKind
from kvnet.network.memory import World
from kvnet.protocol.announce import AnnounceLimits
from kvnet.protocol.framing import FrameReader
from kvnet.protocol.ids import PeerId
from kvnet.protocol.messages.artifacts import LookupReply, ManifestReply
from kvnet.protocol.messages.control import decode_message
from kvnet.protocol.messages.statements import Statements, Tell
from kvnet.trust.envelope import open_manifest
from kvnet.trust.statement_bodies import Revocation
from kvnet.trust.statements import open_statement
from tests.simulated.nodes import MINE, OTHER, Node, identity, start_node
from tests.simulated.telling import PROMPT, TOKENS, member


class Eavesdropper:
    """Keeps everything that leaves any node of a world."""

    def __init__(self, world: World) -> None:
        self.streams: dict[tuple[str, PeerId, PeerId], bytearray] = defaultdict(bytearray)
        world.links.watch = self._see

    def _see(self, stream: str, source: PeerId, target: PeerId, data: bytes) -> None:
        self.streams[stream, source, target] += data

    def messages(self) -> list[tuple[PeerId, bytes, object]]:
        """Every control message: to whom, its frame's body, and what it says."""
        found: list[tuple[PeerId, bytes, object]] = []
        for (stream, _, target), data in self.streams.items():
            if stream.startswith(StreamKind.CONTROL.value):
                found += [(target, body, decode_message(body)) for body in FrameReader().feed(bytes(data))]
        return found

    def elsewhere(self) -> bytes:
        """All that is no control message: the DHT and the streams of chunks."""
        return b"".join(data for (stream, _, _), data in self.streams.items() if StreamKind.CONTROL.value not in stream)


def names_of(*nodes: Node) -> set[bytes]:
    """Artifact hashes and prefix keys as they are, under no secret, of everything these nodes hold."""
    names: set[bytes] = set()
    for node in nodes:
        fingerprint = node.engine.info.fingerprint
        assert fingerprint is not None
        root = MINE.prefix_root(fingerprint.hash)
        for record in node.store.artifacts():
            names |= {bytes(record.hash), *map(bytes, block_keys(root, node.store.tokens_of(record.hash)))}
        names |= set(map(bytes, block_keys(root, PROMPT)))
    return names


async def test_nothing_sent_names_anything_outside_manifests_and_statements_for_proven_members(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    heard = Eavesdropper(world)
    hub = world.network("hub")
    await nursery.start(hub.run)
    options = NodeOptions(announce=AnnounceLimits(interval_s=1.2, verify_s=5.0))
    members = [
        await member(world, nursery, tmp_path, name, bootstrap=(hub.address,), options=options) for name in "abc"
    ]
    a, b, c = members
    outsider = await start_node(
        world, nursery, tmp_path, "x", who=identity("x", trusts=["a"], namespaces=(OTHER,)), tables=True
    )
    await a.add(TOKENS)
    await b.add([*TOKENS[:700], *[9] * 900], context=b"a context")
    await a.meet(b)
    await c.meet(b)
    await outsider.meet(a, b, c)
    await trio.sleep(60)
    assert (await c.generate(PROMPT)).reused_tokens == len(TOKENS)
    assert (await outsider.generate(PROMPT)).reused_tokens == 0
    assert b.told is not None
    target = bytes(next(iter(a.store.artifacts())).hash)
    await b.told.statements.say(
        lambda sequence, issued: Revocation(
            sequence=sequence, issued=issued, expires=0, kind="artifact", target=target, reason="a test"
        )
    )
    await trio.sleep(5)
    names = names_of(*members)
    assert len(names) > 10
    seen = heard.messages()
    kinds = {type(message) for _, _, message in seen}
    assert {LookupReply, ManifestReply, Statements, Tell} <= kinds
    proven = {node.network.peer_id for node in members}
    n_revocations = 0
    for to, body, message in seen:
        bare = body
        match message:
            case ManifestReply(envelope=envelope):
                assert to in proven
                assert open_manifest(envelope).manifest.namespace == MINE.id
                bare = body.replace(envelope, b"")
            case Tell(statements=envelopes) | Statements(statements=envelopes) | LookupReply(records=envelopes):
                assert to in proven
                for each in envelopes:
                    # Records of who holds what name nothing either: they are searched like the rest.
                    if isinstance(open_statement(each).body, Revocation):
                        n_revocations += target in each
                        bare = bare.replace(each, b"")
        assert not [name for name in names if name in bare], type(message)
    assert n_revocations > 0
    others = heard.elsewhere()
    assert len(others) > 1000
    assert not [name for name in names if name in others]
    # What is announced are the same names under the lookup secret.
    announced = {bytes(MINE.keyed_artifact(record.hash)) for record in a.store.artifacts()}
    dht = b"".join(data for (stream, _, _), data in heard.streams.items() if stream == "dht")
    assert all(name in dht for name in announced)


async def test_an_outsider_that_knows_the_prompt_is_told_what_it_is_told_of_an_unknown_one(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    heard = Eavesdropper(world)
    a = await member(world, nursery, tmp_path, "a")
    outsider = await start_node(
        world, nursery, tmp_path, "x", who=identity("x", trusts=["a"], namespaces=(OTHER,)), tables=True
    )
    await a.add(TOKENS)
    await outsider.meet(a)
    await trio.sleep(5)
    before = len(heard.messages())
    for prompt in (PROMPT, [9] * len(PROMPT)):
        search = await outsider.exchange.finder.search(outsider.engine.info, prompt, 0)
        assert (search.fetched, search.rejected) == (None, [])
    assert len(heard.messages()) == before
    assert outsider.tables.members() == {}
