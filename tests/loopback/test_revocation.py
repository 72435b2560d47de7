"""A revocation among real nodes on real sockets: all who are awake honour it, and whoever slept does on waking."""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest
import trio

from benchmarks.lookup_swarm import until
from kvnet.exchange.lane import InlineLane
from kvnet.exchange.node import ExchangeNode, NodeOptions
from kvnet.exchange.statement_keep import RamKeep
from kvnet.exchange.statements import Statements
from kvnet.network.libp2p.host import LibP2PNetwork
from kvnet.store.memory import MemoryStore
from kvnet.trust.policy import TrustPolicy
from kvnet.trust.statement_bodies import Revocation
from tests.simulated.nodes import MINE
from tests.simulated.revoking import HearingIdentity, key_of

NAMES = tuple("abcdefghijklmnopqrst")
WITHIN_S = 60.0

pytestmark = pytest.mark.loopback


@dataclass
class Real:
    """A node on a real socket."""

    who: HearingIdentity
    node: ExchangeNode
    statements: Statements

    @property
    def honours(self) -> bool:
        """Whether it uses nothing of the key of "a" any more."""
        return self.who.policy().is_revoked(key_of("a").public, MINE.id)


@asynccontextmanager
async def running(name: str, bootstrap: Sequence[str], keep: RamKeep) -> AsyncIterator[Real]:
    """A node on a free port of 127.0.0.1, with the peer key of its name, that trusts all the others."""
    trusted = frozenset(key_of(other).public for other in NAMES if other != name)
    who = HearingIdentity(name, TrustPolicy("trusted", frozenset({key_of(name).public}), trusted))
    network = LibP2PNetwork(name.encode() * 32, listen=["127.0.0.1:0"], bootstrap=bootstrap)
    lane = InlineLane()
    node = ExchangeNode(network, MemoryStore(), lane, who, random=secrets.token_bytes, options=NodeOptions())
    who.statements = Statements(who, keep, lane, now=time.time, random=secrets.token_bytes)
    who.statements.attach(node)
    await who.statements.load()
    async with trio.open_nursery() as nursery:
        await nursery.start(who.statements.run)
        await nursery.start(node.run)
        yield Real(who, node, who.statements)
        nursery.cancel_scope.cancel()


def deaf(nodes: Sequence[Real]) -> str:
    """Which of some nodes have not heard."""
    missing = [
        f"{each.who.key.public.hex()[:8]} ({len(each.node.sessions())} sessions)" for each in nodes if not each.honours
    ]
    return f"{len(missing)} of {len(nodes)} do not honour it: {', '.join(missing)}"


async def check(names: Sequence[str], asleep: Sequence[str]) -> None:
    keeps = {name: RamKeep() for name in names}
    async with AsyncExitStack() as stack:
        awake: list[Real] = []
        for name in names:
            if name not in asleep:
                addresses = [address for each in awake[-2:] for address in each.node.addresses()]
                awake.append(await stack.enter_async_context(running(name, addresses, keeps[name])))
        await until(lambda: all(each.node.sessions() for each in awake), WITHIN_S)
        await awake[0].statements.say(
            lambda sequence, issued: Revocation(
                sequence=sequence,
                issued=issued,
                expires=0,
                kind="publisher",
                target=key_of("a").public,
                reason="the machine was lost",
            )
        )
        await until(lambda: all(each.honours for each in awake), WITHIN_S, lambda: deaf(awake))
        # They know one that is awake, and not the one that said it.
        woken = [
            await stack.enter_async_context(running(name, awake[-1].node.addresses(), keeps[name])) for name in asleep
        ]
        await until(lambda: all(each.honours for each in woken), WITHIN_S, lambda: deaf(woken))
    async with running(names[-1], [], keeps[names[-1]]) as again:
        assert again.honours, "after a restart too"


async def test_six_real_nodes_honour_a_revocation_and_one_that_slept_does_when_it_wakes() -> None:
    await check(NAMES[:6], asleep="c")


@pytest.mark.nightly
async def test_twenty_real_nodes_honour_a_revocation_within_a_minute_and_three_that_slept_when_they_wake() -> None:
    await check(NAMES, asleep="glp")
