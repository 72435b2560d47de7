"""Look a prompt up among members: in their tables, by asking the best of them, and in the DHT when that is nothing.

Two rounds. Whoever is asked may name others that hold more, in records that they have signed: those are asked in the
second. When the tables say nothing, the first round is the DHT, all keys at once, and beside it a member or two that
may have heard of others; the second asks whom those named. Members that tell no tables are asked before all that.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import trio

from kvnet.errors import KvnetError
from kvnet.exchange.session import PeerSession
from kvnet.exchange.tables import Tables
from kvnet.exchange.told_dialing import ToldDialer
from kvnet.network.interface import Network, ProviderHint
from kvnet.protocol.ids import PeerId
from kvnet.protocol.lookup import (
    MAX_ASKED,
    Candidate,
    LookupMachine,
    LookupQuery,
    PeerClaim,
    Repute,
    covered_tokens,
    dht_depths,
    whom_to_ask,
)
from kvnet.protocol.messages.artifacts import LookupReply
from kvnet.protocol.scoring import PeerScores

MAX_HEARSAY = 2
"""Members asked for what they have heard of others, when there are members that nobody here is connected to."""

MAX_DIALS = 20
"""Providers that are dialled at once for one prompt: a DHT server names no more, and all but one may be dead."""

DIAL_S = 2.0
"""Longest dial of a provider."""

GRACE_S = 0.25
"""Seconds that dials may still take once somebody has answered with a prefix."""

DHT_SHARE = 0.6
"""Part of the time left that the DHT may take; the rest is for dialling and asking whom it names."""

NAMED_SHARE = 0.9
"""Part of that after which a walk of the DHT ends and says whom it was named so far: what is cancelled says nothing. A
provider is named in the first rounds; the last server that is asked may be a stopped one."""

OpenSession = Callable[[PeerId], Awaitable[PeerSession | None]]
"""Opens the session with a connected peer, or returns the open one; ``None`` when that fails."""

WorthAsking = Callable[[Sequence[PeerId]], bool]
"""Whether asking these peers can make the first token come sooner."""


@dataclass(slots=True)
class LookedUp:
    """What a lookup came to.

    Attributes:
        candidates: what was found, the best first.
        rounds: times that answers from the network were waited for.
        asked: peers that were asked, or dialled to be asked.
        dht_queries: keys looked for in the DHT.
    """

    candidates: list[Candidate] = field(default_factory=list)
    rounds: int = 0
    asked: list[PeerId] = field(default_factory=list)
    dht_queries: int = 0


@dataclass(frozen=True, slots=True)
class _Target:
    """Somebody to ask: connected, or to be dialled first."""

    peer: PeerId
    session: PeerSession | None
    addresses: tuple[str, ...] = ()
    claim: PeerClaim | None = None


class Lookups:
    """Looks prompts up.

    Args:
        network: for the DHT and for dialling.
        sessions: the open sessions.
        open_session: opens one with a peer that was dialled.
        scores: who is asked first, and who lied.

    Attributes:
        tables: what members have told; without it every connected member is asked.
    """

    def __init__(
        self,
        network: Network,
        sessions: Callable[[], Sequence[PeerSession]],
        open_session: OpenSession,
        scores: PeerScores,
    ) -> None:
        self._network = network
        self._sessions = sessions
        self._open_session = open_session
        self._scores = scores
        self._dialer = ToldDialer(network)
        self.tables: Tables | None = None

    async def find(
        self,
        query: LookupQuery,
        held_tokens: int,
        deadline: float,
        *,
        dht: bool = True,
        worth_asking: WorthAsking = lambda _peers: True,
    ) -> LookedUp:
        """What peers have of a prompt beyond ``held_tokens``; never raises for the network.

        Args:
            query: one namespace's.
            held_tokens: what is here already.
            deadline: when the last answer must have come.
            dht: whether it is worth waiting for the DHT.
            worth_asking: told whom the first round would ask; when it is not, nobody connected is asked.
        """
        found = LookedUp()
        machine = LookupMachine(query, deadline)
        members = {session.peer: session for session in self._sessions() if query.namespace in session.slots}
        targets = self._first_targets(machine, members, held_tokens)
        if targets and not worth_asking([target.peer for target in targets]):
            targets = []
        if targets:
            await self._ask(machine, targets, held_tokens, found)
            await self._follow_records(machine, held_tokens, found)
        found.candidates = machine.candidates(longer_than_tokens=held_tokens)
        if not found.candidates and trio.current_time() < deadline:
            await self._ask_around(machine, members, held_tokens, found, dht=dht)
            found.candidates = machine.candidates(longer_than_tokens=held_tokens)
        return found

    # --- whom ---------------------------------------------------------------------------------------------------------

    def _first_targets(
        self, machine: LookupMachine, members: dict[PeerId, PeerSession], held_tokens: int
    ) -> list[_Target]:
        """The best by the tables, and whoever does not say in a table all that it holds."""
        if self.tables is None:
            return [_Target(peer, session) for peer, session in members.items()]
        namespace = machine.query.namespace
        claims = self.tables.claims(machine.query, held_tokens)
        chosen = self._choose(machine, claims, members)
        named = {target.peer for target in chosen}
        untold = [
            _Target(peer, session)
            for peer, session in members.items()
            if peer not in named and not self.tables.tells_all(session, namespace)
        ]
        return [*chosen, *untold]

    def _choose(
        self, machine: LookupMachine, claims: Iterable[PeerClaim], members: dict[PeerId, PeerSession]
    ) -> list[_Target]:
        """Whom to ask of those whose tables say something; what the others' say is supposed to be so."""
        now = trio.current_time()
        scores = self._scores

        def repute(peer: PeerId) -> Repute:
            # One whose rate is not known yet may be the fastest.
            worth = scores.standing(peer, now) * scores.expected_bytes_s(peer, now)
            return Repute(peer in members, scores.liar(peer, now), worth, scores.rtt_s(peer))

        allowed = [claim for claim in claims if not scores.banned(claim.peer, now)]
        chosen = whom_to_ask(allowed, repute)
        asked = {claim.peer for claim in chosen}
        for claim in allowed:
            if claim.peer in members and claim.peer not in asked and not scores.liar(claim.peer, now):
                machine.suppose(claim)
        return [
            _Target(claim.peer, members.get(claim.peer), claim.addresses, claim)
            for claim in chosen[: MAX_ASKED + MAX_DIALS]
        ]

    # --- asking -------------------------------------------------------------------------------------------------------

    async def _ask(self, machine: LookupMachine, targets: Sequence[_Target], held_tokens: int, found: LookedUp) -> None:
        """One round: all at once, until nothing better can come, or it is too late."""
        found.rounds += 1
        found.asked += [target.peer for target in targets]
        dialling = {target.peer for target in targets if target.session is None}
        for target in targets:
            if target.claim is None:
                machine.expect(target.peer)
            else:
                machine.expect(target.peer, target.claim.most_tokens)
        with trio.CancelScope(deadline=machine.deadline) as scope:
            async with trio.open_nursery() as nursery:

                async def ask(target: _Target) -> None:
                    await self._ask_one(machine, target)
                    dialling.discard(target.peer)
                    now = trio.current_time()
                    if machine.finished(now):
                        scope.cancel()
                    elif dialling.issuperset(machine.waiting()) and machine.candidates(longer_than_tokens=held_tokens):
                        # Who is being dialled may be dead; what there is is not kept waiting for it.
                        scope.deadline = min(scope.deadline, now + GRACE_S)

                for target in targets:
                    nursery.start_soon(ask, target)

    async def _ask_one(self, machine: LookupMachine, target: _Target) -> None:
        query, session = machine.query, target.session
        try:
            if session is None:
                session = await self._dial(target, machine.deadline)
            slot = session.slots.get(query.namespace) if session is not None else None
            if session is None or slot is None:
                machine.failed(target.peer)
                return
            reply = await session.ask(query.message(slot))
        except KvnetError:
            machine.failed(target.peer)
            return
        if isinstance(reply, LookupReply):
            machine.answered(target.peer, reply)
            claim = target.claim
            if claim is not None and self.tables is not None and covered_tokens(query, reply) < claim.least_tokens:
                self.tables.doubt(query.namespace, target.peer, claim.key)

    async def _dial(self, target: _Target, deadline: float) -> PeerSession | None:
        timeout_s = min(DIAL_S, max(0.05, deadline - trio.current_time()))
        dialer = self._dialer if self.tables is None else self.tables.dialer
        signer = target.claim.signer if target.claim is not None else b""
        return await self._open_session(
            await dialer.connect(target.peer, target.addresses, signer, timeout_s=timeout_s)
        )

    async def _follow_records(self, machine: LookupMachine, held_tokens: int, found: LookedUp) -> None:
        """Ask those whom the answers named, or the next best when the best had less than its table said."""
        if trio.current_time() < machine.deadline:
            targets = self._from_records(machine, held_tokens, found)
            if targets:
                await self._ask(machine, targets, held_tokens, found)

    def _from_records(self, machine: LookupMachine, held_tokens: int, found: LookedUp) -> list[_Target]:
        """Whoever has not been asked and is sure to have more than was found so far."""
        if self.tables is None:
            return []
        query = machine.query
        self.tables.shown([record for _, record in machine.records()], query.namespace)
        best = max([held_tokens, *(each.reusable_tokens for each in machine.candidates())])
        members = {session.peer: session for session in self._sessions() if query.namespace in session.slots}
        claims = self.tables.claims(query, best, but=found.asked)
        return self._choose(machine, [claim for claim in claims if claim.least_tokens > best], members)

    async def _ask_around(
        self,
        machine: LookupMachine,
        members: dict[PeerId, PeerSession],
        held_tokens: int,
        found: LookedUp,
        *,
        dht: bool,
    ) -> None:
        """Nobody is known to have anything: who is, says the DHT, or somebody who has heard of others."""
        wanted = dht_depths(machine.query) if dht and self._network.routing_peers() else []
        unasked = [_Target(peer, session) for peer, session in members.items() if peer not in found.asked]
        hearsay = unasked[:MAX_HEARSAY] if self._somebody_is_away(machine.query, members) else []
        if not wanted and not hearsay:
            return
        found.rounds += 1
        found.dht_queries += len(wanted)
        found.asked += [target.peer for target in hearsay]
        now = trio.current_time()
        limit_s = max(0.05, DHT_SHARE * (machine.deadline - now))
        hints: dict[int, list[ProviderHint]] = {}

        async def find(depth: int, key: bytes) -> None:
            try:
                hints[depth] = list(await self._network.find_providers(key, timeout_s=NAMED_SHARE * limit_s))
            except KvnetError:
                hints[depth] = []

        with trio.move_on_at(now + limit_s):
            async with trio.open_nursery() as nursery:
                for target in hearsay:
                    machine.expect(target.peer)
                    nursery.start_soon(self._ask_one, machine, target)
                for depth, key in wanted:
                    nursery.start_soon(find, depth, bytes(key))
        named = [hint for hint in _in_turns([hints.get(depth, []) for depth, _ in wanted]) if hint.peer not in members]
        await self._ask_named(machine, named, held_tokens, found)

    def _somebody_is_away(self, query: LookupQuery, members: dict[PeerId, PeerSession]) -> bool:
        if self.tables is None:
            return False
        return any(member.peer not in members for member in self.tables.members_of(query.namespace))

    async def _ask_named(
        self, machine: LookupMachine, named: list[ProviderHint], held_tokens: int, found: LookedUp
    ) -> None:
        """Dial and ask those whom others' records name, and those whom the DHT names; who lied of late last."""
        now = trio.current_time()
        targets = self._from_records(machine, held_tokens, found)
        told = {target.peer for target in targets}
        named.sort(key=lambda hint: self._scores.liar(hint.peer, now))
        sessions = {session.peer: session for session in self._sessions()}
        targets += [
            _Target(hint.peer, sessions.get(hint.peer), hint.addresses)
            for hint in named[:MAX_DIALS]
            if hint.peer not in told and hint.peer not in found.asked
        ]
        if targets and now < machine.deadline:
            await self._ask(machine, targets, held_tokens, found)


def _in_turns(hints: Sequence[Sequence[ProviderHint]]) -> list[ProviderHint]:
    """One of each depth in turn, the deepest first, each peer once: who fills one key's places hides no other key's."""
    named: dict[PeerId, ProviderHint] = {}
    for turn in zip_longest(*hints):
        for hint in turn:
            if hint is not None:
                named.setdefault(hint.peer, hint)
    return list(named.values())
