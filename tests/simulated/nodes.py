"""Whole nodes for simulated tests: toy engine, real store, simulated network, one clock."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio
from blake3 import blake3

from kvnet.engine.interface import Engine, ModelInfo
from kvnet.engine.prompts import PromptKind
from kvnet.engine.toy import ToyCosts
from kvnet.exchange.answers import Asked, Body, Finished, Reuse, Started
from kvnet.exchange.claims import Search
from kvnet.exchange.completion import Completer, ask_peers
from kvnet.exchange.fetcher import Fetched
from kvnet.exchange.generation import Answer, Generator
from kvnet.exchange.identity import FixedIdentity
from kvnet.exchange.keeping import Keeper, KeeperHooks
from kvnet.exchange.lane import InlineLane
from kvnet.exchange.meeting import Meetings, MeetLimits
from kvnet.exchange.node import ExchangeNode, NodeOptions
from kvnet.exchange.prefix_reuse import PrefixReuse, Wanted
from kvnet.exchange.publisher import Added, AddRequest, Publisher
from kvnet.exchange.statement_keep import RamKeep
from kvnet.exchange.statements import Statements
from kvnet.exchange.tables import Tables
from kvnet.exchange.write_budget import WriteBudget, Writing
from kvnet.format.codecs import Codec
from kvnet.format.hashes import ArtifactHash, ChunkHash
from kvnet.format.prefix import block_keys
from kvnet.network.memory import MemoryNetwork, World
from kvnet.protocol.announce import AnnounceLimits
from kvnet.protocol.provider_pages import PageLimits
from kvnet.protocol.speeds import Machine
from kvnet.store.disk import DiskStore
from kvnet.store.interface import Store
from kvnet.store.osfile import OsFiles
from kvnet.trust.keys import PublisherKey
from kvnet.trust.namespace import Namespace
from kvnet.trust.policy import TrustPolicy
from tests.simulated.talking import ANSWER_TOKENS, TalkingEngine, body
from tests.unit.store.samples import publish, sample

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # the stubs that libp2p brings along replace trio's own types

MINE = Namespace("mine", bytes([1]) * 32, bytes([2]) * 32)
OTHER = Namespace("mine", bytes([3]) * 32, bytes([4]) * 32)

NOW_S = 1_800_000_000
"""What keepers take the time to be, in seconds since 1970."""


def seed(name: str) -> bytes:
    """A publisher seed for a test node."""
    return name.encode().ljust(32, b"\0")


def identity(name: str, *, trusts: Sequence[str] = (), namespaces: tuple[Namespace, ...] = (MINE,)) -> FixedIdentity:
    """The identity of a node that trusts the named others."""
    key = PublisherKey(seed(name))
    trusted = frozenset(PublisherKey(seed(other)).public for other in trusts)
    return FixedIdentity(key, TrustPolicy("trusted", own=frozenset({key.public}), trusted=trusted), namespaces)


class FixedSpeeds:
    """Prefill speeds that a test sets; remembers what it was told."""

    def __init__(self) -> None:
        self.tokens_s = 0.0
        self.known: Machine | None = None
        self.noted: list[tuple[int, float]] = []

    def prefill_tokens_s(self, model: Path) -> float:
        """The speed that was set, whatever the model."""
        del model
        return self.tokens_s

    def note(self, model: Path, n_tokens: int, seconds: float) -> None:
        """Remember."""
        del model
        self.noted.append((n_tokens, seconds))

    def machine(self, info: ModelInfo) -> Machine | None:
        """What was set, whatever the model."""
        del info
        return self.known


@dataclass(frozen=True)
class Told:
    """An answer, and what was reused for it."""

    text: str
    reuse: Reuse
    finished: Finished


def wall_s() -> float:
    """Seconds since 1970, as every simulated node has them."""
    return NOW_S + trio.current_time()


@dataclass
class Telling:
    """What a node tells members and is told by them."""

    statements: Statements
    tables: Tables
    meetings: Meetings

    @classmethod
    def of(
        cls,
        exchange: ExchangeNode,
        lane: InlineLane,
        random: Callable[[int], bytes],
        pages: PageLimits | None,
        meet: MeetLimits | None,
    ) -> "Telling":
        """For a node that does not run yet."""
        statements = Statements(exchange.identity, RamKeep(), lane, now=wall_s, random=random)
        statements.attach(exchange)
        scores = exchange.fetcher.scores
        tables = Tables(exchange.network, exchange.identity, statements, scores, now=wall_s, random=random, pages=pages)
        tables.attach(exchange)
        return cls(
            statements, tables, Meetings(exchange.network, tables.members, exchange.open_session, meet, tables.dialer)
        )

    async def start(self, nursery: trio.Nursery) -> None:
        """Once the node runs."""
        await self.statements.load()
        for run in (self.statements.run, self.tables.run, self.meetings.run):
            await nursery.start(run)


@dataclass
class Node:
    """One node and everything in it."""

    name: str
    network: MemoryNetwork
    store: Store
    lane: InlineLane
    identity: FixedIdentity
    exchange: ExchangeNode
    engine: TalkingEngine
    keeper: Keeper
    speeds: FixedSpeeds
    completer: Completer
    used: list[Finished]
    told: "Telling | None" = None

    @property
    def tables(self) -> Tables:
        """What this node tells members, and what they tell it."""
        assert self.told is not None
        return self.told.tables

    async def add(self, tokens: Sequence[int], *, context: bytes = b"", codec: Codec = Codec.RAW) -> Added:
        """Add a token prefix and offer it."""
        publisher = Publisher(self.store, self.lane, self.identity)
        added = await publisher.add(
            self.engine, AddRequest(tokens, context, codec, pinned=True, created_s=1_800_000_000)
        )
        fingerprint = self.engine.info.fingerprint
        assert fingerprint is not None
        namespace = self.identity.namespaces()[0]
        self.exchange.published(added.record, block_keys(namespace.prefix_root(fingerprint.hash), tokens))
        return added

    async def fetch(self, artifact: ArtifactHash) -> Fetched:
        """Fetch a whole artifact from whoever is connected."""
        located = await self.exchange.fetcher.locate(artifact)
        entries = await self.exchange.fetcher.chunk_list(located)
        fetched = await self.exchange.fetcher.fetch(located, entries)
        self.exchange.fetched(fetched)
        return fetched

    async def generate(
        self, tokens: Sequence[int], *, reuse: bool = True, max_tokens: int = 12, prefill_tokens_s: float = 0.0
    ) -> Answer:
        """Generate, asking peers too."""

        async def search(engine: Engine, wanted: Wanted, held: int) -> Search:
            return await self.exchange.finder.search(
                engine.info, wanted.tokens, held, prefill_tokens_s=prefill_tokens_s
            )

        generator = Generator(PrefixReuse(self.store, self.lane, self.identity, search), self.identity)
        answer: Answer | None = None
        async for event in generator.generate(self.engine, tokens, max_tokens=max_tokens, reuse=reuse):
            if isinstance(event, Answer):
                answer = event
        assert answer is not None
        return answer

    async def ask(self, *messages: tuple[str, str], **options: Any) -> "Told":
        """Answer one chat request, and wait until what is worth it has been kept."""
        told = await self.ask_now(*messages, **options)
        await self.keeper.wait_idle()
        return told

    async def ask_now(self, *messages: tuple[str, str], **options: Any) -> "Told":
        """Answer one chat request."""
        asked = Asked(PromptKind.CHAT, body(*messages), {}, ANSWER_TOKENS, **options)
        text, started, finished = b"", None, None
        async with aclosing(self.completer.complete(self.engine, asked)) as events:
            async for event in events:
                match event:
                    case Started():
                        started = event
                    case Body(data):
                        text += data
                    case Finished():
                        finished = event
        assert started is not None
        assert finished is not None
        return Told(text.decode(), started.reuse, finished)

    def forge_keys(self, tokens: Sequence[int], *, keys_of: Sequence[int]) -> ArtifactHash:
        """Hold and offer an artifact of ``tokens`` under the prefix keys of other tokens, signed by this node."""
        fingerprint = self.engine.info.fingerprint
        assert fingerprint is not None
        namespace = self.identity.namespaces()[0]
        keys = block_keys(namespace.prefix_root(fingerprint.hash), keys_of)
        forged = sample(tokens, key=self.identity.key, namespace=namespace, fingerprint=fingerprint, keys=keys)
        record = publish(self.store, forged)
        self.exchange.published(record, keys)
        return record.hash

    async def meet(self, *others: "Node") -> None:
        """Connect to other nodes and have open sessions with them."""
        for other in others:
            assert await self.exchange.connect(other.network.address) is not None


StartNode = Callable[..., Awaitable[Node]]


class LyingStore:
    """A store that gives away other bytes than it holds; everything else is the real one's.

    Args:
        store: the real one.
        lie: what becomes of a chunk's bytes.
    """

    def __init__(self, store: Store, lie: Callable[[bytes], bytes]) -> None:
        self._store = store
        self._lie = lie
        self.lies = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def read_chunk(self, digest: ChunkHash) -> bytes:
        """Bytes that are not the chunk's."""
        self.lies += 1
        return self._lie(self._store.read_chunk(digest))


async def start_node(
    world: World,
    nursery: trio.Nursery,
    directory: Path,
    name: str,
    *,
    who: FixedIdentity | None = None,
    lie: Callable[[bytes], bytes] | None = None,
    options: NodeOptions | None = None,
    bootstrap: tuple[str, ...] = (),
    rebootstrap_interval_s: float = 30.0,
    files: OsFiles | None = None,
    costs: ToyCosts | None = None,
    alone: bool = False,
    write_budget: WriteBudget | None = None,
    tables: bool = False,
    pages: PageLimits | None = None,
    meet: MeetLimits | None = None,
) -> Node:
    """A running node; it ends with the nursery. With ``tables`` it tells members what it holds, and listens to them."""
    network = world.network(name, bootstrap=bootstrap, rebootstrap_interval_s=rebootstrap_interval_s)
    store: Store = DiskStore.open(directory / name, quota_bytes=1 << 34, min_free_bytes=0, files=files)
    offered: Store = LyingStore(store, lie) if lie is not None else store  # type: ignore[assignment]
    who = who or identity(name)
    options = options or NodeOptions(announce=AnnounceLimits(interval_s=1.2, verify_s=0.0))
    counter = iter(range(1 << 30))

    def random(n_bytes: int) -> bytes:
        return blake3(name.encode() + next(counter).to_bytes(8, "big")).digest(length=n_bytes)

    lane = InlineLane()
    exchange = ExchangeNode(network, offered, lane, who, random=random, options=replace(options))
    engine = await nursery.start(_hold_engine, directory, costs)
    told = Telling.of(exchange, lane, random, pages, meet) if tables else None
    await nursery.start(exchange.run)
    if told is not None:
        await told.start(nursery)
    hooks = KeeperHooks(published=exchange.published, removed=exchange.removed)
    if write_budget is not None:
        exchange.finder.wrote = lambda n_bytes: write_budget.spend(n_bytes, Writing.FETCHED, NOW_S)
    publisher = Publisher(store, lane, who)
    keeper = Keeper(store, lane, who, publisher, budget=write_budget, hooks=hooks, now=lambda: NOW_S)
    keeper.lossy = options.lossy
    await nursery.start(keeper.run)
    speeds, used = FixedSpeeds(), list[Finished]()
    fetch_prefix = None if alone else ask_peers(exchange.finder, speeds)
    reuse = PrefixReuse(store, lane, who, fetch_prefix, lossy=options.lossy)
    completer = Completer(reuse, speeds=speeds, keeper=keeper, used=used.append)
    return Node(name, network, store, lane, who, exchange, engine, keeper, speeds, completer, used, told)


async def _hold_engine(
    directory: Path,
    costs: ToyCosts | None,
    *,
    task_status: "TaskStatus[TalkingEngine]" = trio.TASK_STATUS_IGNORED,
) -> None:
    engine = TalkingEngine(directory / "toy-model", costs)
    task_status.started(engine)
    try:
        await trio.sleep_forever()
    finally:
        with trio.CancelScope(shield=True):
            await engine.aclose()
