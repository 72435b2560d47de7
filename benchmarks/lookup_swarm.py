"""Nodes that tell each other what they hold, on real sockets in one process, and prompts to look up among them."""

import os
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio
from blake3 import blake3

from kvnet.exchange.identity import FixedIdentity
from kvnet.exchange.lane import InlineLane
from kvnet.exchange.meeting import Meetings
from kvnet.exchange.node import ExchangeNode, NodeOptions
from kvnet.exchange.statement_keep import RamKeep
from kvnet.exchange.statements import Statements
from kvnet.exchange.tables import Tables
from kvnet.format.chunks import ChunkEntry, ChunkKind, ChunkPlan, encode_pages, layer_groups, pages_root
from kvnet.format.codecs import Codec
from kvnet.format.fingerprint import Fingerprint, LayerLayout, Producer
from kvnet.format.hashes import PrefixKey, blake3_hash
from kvnet.format.manifest import Manifest, encode_manifest
from kvnet.format.prefix import BLOCK_TOKENS, block_keys, tokens_to_bytes
from kvnet.format.tensor import DType, LayerKind
from kvnet.network.libp2p.host import LibP2PNetwork
from kvnet.protocol.announce import AnnounceLimits
from kvnet.protocol.lookup import LookupQuery, build_query
from kvnet.store.interface import Store
from kvnet.store.memory import MemoryStore
from kvnet.trust.envelope import StatementType, seal
from kvnet.trust.keys import PublisherKey
from kvnet.trust.namespace import Namespace
from kvnet.trust.policy import TrustPolicy

KEY = PublisherKey(b"lookup".ljust(32, b"\0"))
NAMESPACE = Namespace("mine", b"p" * 32, b"l" * 32)
FINGERPRINT = Fingerprint(
    b"w" * 32, b"c" * 32, (), "toy", LayerLayout((LayerKind("kv", 1, k_dim=1, v_dim=1, dtype=DType.FLOAT16),), bytes(1))
)
ROOT = NAMESPACE.prefix_root(FINGERPRINT.hash)

QUIET = AnnounceLimits(interval_s=3600.0, verify_s=0.0)
"""One record an hour: what is measured is not how the DHT is filled."""


@dataclass
class Member:
    """One node of the swarm.

    Attributes:
        node: among its peers.
        tables: what it tells and is told.
        store: what it holds.
        artifacts: token ids of what it holds.
    """

    node: ExchangeNode
    tables: Tables
    store: Store
    artifacts: list[list[int]] = field(default_factory=list)

    def add(self, tokens: Sequence[int]) -> None:
        """Hold an artifact of these tokens, and offer it."""
        keys = block_keys(ROOT, tokens)
        plan = ChunkPlan(len(tokens), FINGERPRINT.layers, layer_groups(FINGERPRINT.layers), 0)
        writer = self.store.begin_pack(len(plan))
        entries = tuple(
            ChunkEntry(len(data), writer.put(index, data, blake3_hash(data)))
            for index, data in enumerate(_chunks(plan, tokens))
        )
        record = writer.publish(_signed(plan, entries, tokens, keys), keys=keys, pinned=False)
        self.node.published(record, keys)
        self.artifacts.append(list(tokens))


def _chunks(plan: ChunkPlan, tokens: Sequence[int]) -> list[bytes]:
    ids = tokens_to_bytes(tokens)
    return [
        ids[spec.first_token * 4 :][: spec.raw_size_bytes]
        if spec.kind is ChunkKind.TOKENS
        else blake3(ids[: 4 * (spec.first_token + spec.n_tokens)]).digest(length=spec.raw_size_bytes)
        for spec in plan
    ]


def _signed(plan: ChunkPlan, entries: Sequence[ChunkEntry], tokens: Sequence[int], keys: Sequence[PrefixKey]) -> bytes:
    manifest = Manifest(
        version=1,
        fingerprint=FINGERPRINT,
        namespace=NAMESPACE.id,
        n_tokens=len(tokens),
        block_tokens=BLOCK_TOKENS,
        groups=plan.groups,
        codec=Codec.RAW,
        n_chunks=len(entries),
        total_size_bytes=sum(entry.length_bytes for entry in entries),
        root=pages_root(encode_pages(entries)),
        last_prefix_key=keys[-1],
        producer=Producer("synthetic", "1", "cpu", "any", BLOCK_TOKENS),
        continuation=(),
        derived_from=(),
        context_size_bytes=0,
        created=1_800_000_000,
        publisher=KEY.public,
    )
    return seal(StatementType.MANIFEST, encode_manifest(manifest), KEY)


@asynccontextmanager
async def running(*, seed: bytes | None = None, bootstrap: Sequence[str] = ()) -> AsyncIterator[Member]:
    """A node on a free port of 127.0.0.1.

    Args:
        seed: of its peer key; a fresh one by default.
        bootstrap: addresses it stays connected to.
    """
    network = LibP2PNetwork(seed or os.urandom(32), listen=["127.0.0.1:0"], bootstrap=bootstrap)
    who = FixedIdentity(KEY, TrustPolicy("own", own=frozenset({KEY.public}), trusted=frozenset()), (NAMESPACE,))
    store, lane = MemoryStore(), InlineLane()
    options = NodeOptions(announce=QUIET)
    node = ExchangeNode(network, store, lane, who, random=secrets.token_bytes, options=options)
    statements = Statements(who, RamKeep(), lane, now=time.time, random=secrets.token_bytes)
    statements.attach(node)
    tables = Tables(network, who, statements, node.fetcher.scores, now=time.time, random=secrets.token_bytes)
    tables.attach(node)
    async with trio.open_nursery() as nursery:
        for run in (node.run, statements.run, tables.run):
            await nursery.start(run)
        await nursery.start(Meetings(network, tables.members, node.open_session).run)
        yield Member(node, tables, store)
        nursery.cancel_scope.cancel()


class Texts:
    """Token ids as conversations have them: many begin alike, and each goes on in its own way.

    Args:
        seed: makes the same ones again.
        n_trunks: what they begin with: system prompts and documents.
    """

    def __init__(self, seed: int, n_trunks: int = 40) -> None:
        self._random = random.Random(seed)
        self._trunks = [self._fresh(self._random.randint(2, 24) * BLOCK_TOKENS) for _ in range(n_trunks)]

    def _fresh(self, n_tokens: int) -> list[int]:
        return [self._random.randrange(32_000) for _ in range(n_tokens)]

    def artifact(self) -> list[int]:
        """A conversation so far: a whole trunk or part of one, and some turns."""
        trunk = self._random.choice(self._trunks)
        cut = len(trunk) if self._random.random() < 0.7 else self._random.randint(1, len(trunk))
        return [*trunk[:cut], *self._fresh(self._random.randint(20, 8 * BLOCK_TOKENS))]

    def prompt(self, artifacts: Sequence[list[int]]) -> list[int]:
        """Mostly the next turn of a conversation that somebody holds; else one that leaves it somewhere."""
        held = self._random.choice(artifacts)
        cut = len(held) if self._random.random() < 0.7 else self._random.randint(1, len(held))
        return [*held[:cut], *self._fresh(self._random.randint(1, 2 * BLOCK_TOKENS))]

    def unknown(self) -> list[int]:
        """A prompt that nobody has anything of."""
        return self._fresh(40 * BLOCK_TOKENS + 3)


def query_of(tokens: Sequence[int]) -> LookupQuery:
    """What is asked for a prompt."""
    return build_query(NAMESPACE, block_keys(ROOT, tokens), len(tokens))


def longest(query: LookupQuery, artifacts: Sequence[set[PrefixKey]]) -> int:
    """Tokens of a prompt that the best of some artifacts covers, by comparing every key with every other.

    Args:
        query: of the prompt.
        artifacts: the prefix keys of each.
    """
    for index, key in enumerate(query.prefix_keys):
        if any(key in keys for keys in artifacts):
            return query.tokens_at(index)
    return 0


BUSY_TIMES = 10
"""How many times longer it may take where others keep the machine busy."""


async def until(done: Callable[[], bool], timeout_s: float, state: Callable[[], object] = lambda: "") -> None:
    """Wait until something is so.

    A machine that others keep busy gives this process a small share of its time, so that seconds alone say nothing: the
    wait ends when they are over and this process has computed for half as long.

    Args:
        done: whether it is so.
        timeout_s: seconds that it may take.
        state: what to say of how far it is.

    Raises:
        TimeoutError: it is not.
    """
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    while not done():
        passed_s, computed_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
        if passed_s > timeout_s and (computed_s > timeout_s / 2 or passed_s > BUSY_TIMES * timeout_s):
            raise TimeoutError(f"not so after {passed_s:.0f} s, {computed_s:.0f} s of them computing: {state()}")
        await trio.sleep(0.05)
