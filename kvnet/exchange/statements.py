"""Statements of this node and of others: say them, take them, keep them, and what they come to.

What a peer tells is queued, then checked in this order: size, shape, signature, times, namespace, rank. What is new is
written to disk, shown to whoever subscribed, and told on to every other member. Provider records are not kept and not
told on here: whoever subscribed keeps them in RAM, and says what of them is told to others (`also_tell`, `spread`).
Invitations are secrets between two people: they are neither taken nor told.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import trio

from kvnet.errors import StoreError
from kvnet.exchange.identity import Identity
from kvnet.exchange.lane import Lane
from kvnet.exchange.session import PeerSession
from kvnet.exchange.statement_checking import Opener
from kvnet.exchange.statement_inbox import Inbox, Waiting
from kvnet.exchange.statement_keep import StatementKeep
from kvnet.exchange.statement_signing import MakeBody, Saying, StatementSigner
from kvnet.exchange.statement_standing import Standings
from kvnet.exchange.statement_talk import Talks, name_of
from kvnet.exchange.statement_writing import StatementWriter, reopened
from kvnet.format.hashes import NamespaceId, blake3_hash
from kvnet.protocol import gossip
from kvnet.protocol.messages.handshake import Capability
from kvnet.protocol.messages.statements import GetStatements, Tell
from kvnet.trust.envelope import StatementType
from kvnet.trust.keys import PublisherKey
from kvnet.trust.namespace import Namespace
from kvnet.trust.policy import TrustPolicy
from kvnet.trust.statement_bodies import AnyStatement, ProviderRecord
from kvnet.trust.statement_book import StatementBook
from kvnet.trust.statement_places import NOT_KEPT, Verdict, namespace_of, scopes_of_body
from kvnet.trust.statement_ranks import Ranks
from kvnet.trust.statements import CLOCK_SKEW_S, SignedStatement, timely
from kvnet.trust.withheld import Extent

if TYPE_CHECKING:
    from trio_typing import TaskStatus

    from kvnet.exchange.node import ExchangeNode

_FIRST_TOLD: Final = (
    StatementType.MEMBERSHIP,
    StatementType.REKEY,
    StatementType.KEY_ROTATION,
    StatementType.REVOCATION,
)
"""What a first page begins with, so that signers are known when the rest comes; that follows by age."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A statement that counts.

    Attributes:
        statement: what, and by whom; its signature and times are good, and it outranks what was here before.
        namespace: in which it was told; None when it names none and this node has said it, or read it from disk.
        session: by which peer; None for one of this node's own, or one read from disk.
    """

    statement: SignedStatement
    namespace: Namespace | None
    session: PeerSession | None


Callback = Callable[[Heard], None]
"""Told of a statement, right after it was written to disk; fast, and never raises."""

Source = Callable[[Namespace], Iterable[bytes]]
"""Envelopes to tell members of a namespace besides those kept here, such as provider records that are still good."""


class Statements:
    """All statements that one node knows.

    Args:
        identity: signing key, policy and namespaces; read afresh at every use.
        keep: where they outlive the node.
        lane: where that blocks.
        now: seconds since 1970.
        random: source of random bytes, for who is asked when.
        limits: what one peer may cost.
    """

    def __init__(
        self,
        identity: Identity,
        keep: StatementKeep,
        lane: Lane,
        *,
        now: Callable[[], float],
        random: Callable[[int], bytes],
        limits: gossip.GossipLimits | None = None,
    ) -> None:
        self._identity = identity
        self._now = now
        self._random = random
        limits = limits or gossip.GossipLimits()
        self._book = StatementBook()
        self._ranks = Ranks()
        self.counters: Counter[str] = Counter()
        self._signer = StatementSigner(self._book, self._ranks, now)
        self._writer = StatementWriter(self._book, keep, lane, self.counters)
        self._opener = Opener(now, self.counters)
        self._standings = Standings(self._book)
        self._callbacks: dict[StatementType, list[Callback]] = {}
        self._sources: list[Source] = []
        self._talks = Talks(self, limits, random)
        self._inbox = Inbox(limits)
        self.n_counted = 0

    # --- what others use ----------------------------------------------------------------------------------------------

    def attach(self, node: "ExchangeNode") -> None:
        """Speak with the peers of this node, from its next session on."""
        node.offer_capability(Capability.STATEMENTS)
        node.answer_with(Tell, self._talks.answer_tell)
        node.answer_with(GetStatements, self._talks.answer_ask)
        node.greet_with(self._talks.greet)

    def subscribe(self, kind: StatementType, callback: Callback) -> None:
        """Be told of every statement of a type that counts from now on, own ones and those read from disk included.

        Provider records come whoever signed them; judge them. They are told on only if the subscriber spreads them.
        """
        self._callbacks.setdefault(kind, []).append(callback)

    def also_tell(self, source: Source) -> None:
        """Say what else members are told who ask."""
        self._sources.append(source)

    async def say(
        self,
        make_body: MakeBody,
        *,
        namespaces: Sequence[Namespace] | None = None,
        key: PublisherKey | None = None,
    ) -> SignedStatement:
        """Sign a statement, keep it, and tell the members.

        Args:
            make_body: of the statement.
            namespaces: where to tell a statement that names no namespace itself; by default in all of this node's.
            key: one of this node's; the signing key by default.

        Raises:
            StoreError: there are too many of its kind already.
        """
        return (await self.say_all([Saying(make_body, namespaces, key)]))[0]

    async def say_all(self, sayings: Iterable[Saying]) -> list[SignedStatement]:
        """As `say` for several statements, which are all on disk or none, whenever the process ends.

        Raises:
            StoreError: there are too many of a kind already; those before it are said.
        """
        said: list[SignedStatement] = []
        try:
            for each in sayings:
                said.append(self._sign_and_take(each))  # noqa: PERF401 - those before one that fails are said
        finally:
            await self._writer.write()
            for statement in said:
                if statement.kind is not StatementType.INVITATION:
                    self._publish(Heard(statement, self._named(statement.body), None))
                    self._tell_on(statement, None)
        return said

    def _sign_and_take(self, saying: Saying) -> SignedStatement:
        """A statement of this node's, signed; it counts here from now on."""
        statement = self._signer.sign(saying.make_body, saying.key or self._identity.signing_key())
        if statement.kind is StatementType.INVITATION:
            return statement
        if statement.kind in NOT_KEPT:
            self._ranks.take(statement)
        else:
            named = namespace_of(statement.body)
            told_in = self._identity.namespaces() if saying.namespaces is None else saying.namespaces
            scopes = [named] if named is not None else [each.id for each in told_in]
            if self._take(statement, frozenset(scopes), self._identity.policy()) is Verdict.FULL:
                raise StoreError(
                    f"expected room for one more {statement.kind.value} of this node, found too many of them",
                    hint="members keep so many of one key: `kvnet key rotate` makes a new one",
                )
        return statement

    def take(
        self,
        envelopes: Iterable[bytes],
        namespace: Namespace,
        session: PeerSession | None = None,
        *,
        asked: bool = False,
    ) -> int:
        """Queue statements to be checked; `settled` waits for that.

        Args:
            envelopes: as received.
            namespace: the namespace in which they were told.
            session: by whom.
            asked: this node has asked for them, so that they are no matter of limits.

        Returns:
            How many were queued: fewer when the peer tells too much. It is asked for them later.
        """
        talk = None if asked else self._talks.of(session)
        queued = 0
        for envelope in envelopes:
            digest = blake3_hash(envelope)
            if talk is not None:
                talk.exchanged.add(gossip.short(digest))
            known = self._book.holds(digest, namespace.id) or self._ranks.holds(digest)
            if known or self._opener.is_refused(gossip.short(digest), namespace.id):
                continue
            if self._inbox.put(Waiting(envelope, namespace, session, talk, asked)):
                queued += 1
            else:
                self.counters["statements_dropped"] += 1
        return queued

    async def settled(self) -> None:
        """Wait until everything queued so far has been checked."""
        await self._inbox.settled()

    def all(self, kind: StatementType, *, namespace: Namespace | NamespaceId | None = None) -> list[SignedStatement]:
        """The statements of a type that count, oldest first; of one namespace, or of all."""
        return self._book.all(kind, namespace=namespace.id if isinstance(namespace, Namespace) else namespace)

    def latest(self, kind: StatementType, subject: bytes, signer: bytes) -> SignedStatement | None:
        """What counts of one signer about one subject (`Statement.subject`)."""
        return self._book.latest(kind, subject, signer)

    def own_revocations(self, namespace: Namespace) -> Extent:
        """What provider records of this node have to say of its revocations in a namespace."""
        # Nobody would take a record that tells of what was said when this clock was ahead.
        until = int((self._now() + CLOCK_SKEW_S) * 1000)
        return self._book.revoked_in(self._identity.signing_key().public, namespace.id, until=until)

    def listeners(self, namespaces: Collection[Namespace]) -> int:
        """Connected members of any of these namespaces, who are told of what is new there."""
        return self._talks.listeners(namespaces)

    def spread(self, namespace: Namespace, envelopes: Iterable[bytes], *, but: PeerSession | None = None) -> None:
        """Tell these to every connected member of a namespace that is not known to know them.

        Args:
            namespace: which.
            envelopes: signed statements.
            but: whom not to tell: whoever told us.
        """
        self._talks.spread(namespace, envelopes, but)

    def applied(self, policy: TrustPolicy) -> TrustPolicy:
        """A policy with what statements say; worked out again only when one of the two has changed."""
        return self._standings.applied(policy)

    # --- life ---------------------------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Read what is on disk; subscribers are told of it."""
        for row in await self._writer.rows():
            statement = reopened(row)
            self._book.restore(row, statement)
            if statement is not None and timely(statement.body, self._now()) is None:
                self._publish(Heard(statement, self._named(statement.body), None))
        self._standings.changed()

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Check what is told and look for what did not arrive, until cancelled; call `load` before."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._check_all)
            nursery.start_soon(self._reconcile)
            nursery.start_soon(self._standings.look_for_withheld, self._talks.ask_everybody)
            task_status.started()

    async def forget(self, namespace: NamespaceId) -> None:
        """This node has left a namespace: what was told there alone is of no use any more."""
        self._writer.changed(self._book.leave(namespace))
        self._standings.leave(namespace)
        self._opener.leave(namespace)
        await self._writer.write()

    async def forget_others(self, namespaces: Collection[NamespaceId]) -> None:
        """Forget what was told in other namespaces than these alone: this node has left those, and was interrupted."""
        for namespace in self._book.namespaces().difference(namespaces):
            await self.forget(namespace)

    # --- saying -------------------------------------------------------------------------------------------------------

    def _named(self, body: AnyStatement) -> Namespace | None:
        named = namespace_of(body)
        return next((each for each in self._identity.namespaces() if each.id == named), None)

    def _publish(self, heard: Heard) -> None:
        for callback in self._callbacks.get(heard.statement.kind, ()):
            callback(heard)

    def _tell_on(self, statement: SignedStatement, but: PeerSession | None) -> None:
        kept = statement.kind not in NOT_KEPT
        scopes = self._book.scopes_of(statement) if kept else {namespace_of(statement.body)}
        for namespace in self._identity.namespaces():
            if namespace.id in scopes:
                self._talks.spread(namespace, [statement.envelope], but)

    # --- taking -------------------------------------------------------------------------------------------------------

    async def _check_all(self) -> None:
        async with aclosing(self._inbox.batches()) as batches:
            async for batch in batches:
                await self._check(batch)

    async def _check(self, batch: Sequence[Waiting]) -> None:
        heard: list[Heard] = []
        policy = self._identity.policy()
        for each in batch:
            await trio.lowlevel.checkpoint()
            statement = self._opener.opened(each.envelope, each.namespace.id)
            if statement is None:
                continue
            verdict = self._take(statement, self._scopes(statement.body, each.namespace), policy)
            self.counters[f"statements_{verdict.value}"] += 1
            if verdict in {Verdict.NEW, Verdict.WIDENED}:
                heard.append(Heard(statement, each.namespace, each.session))
        self.n_counted += len(heard)
        await self._writer.write()
        for each_heard in heard:
            self._publish(each_heard)
            if each_heard.statement.kind not in NOT_KEPT:
                self._tell_on(each_heard.statement, each_heard.session)

    def _scopes(self, body: AnyStatement, namespace: Namespace) -> frozenset[NamespaceId]:
        """Where it is told on: what concerns keys of a swarm concerns the owner's other machines too."""
        return scopes_of_body(body, [namespace.id, *(each.id for each in self._identity.namespaces()[:1])])

    def _take(self, statement: SignedStatement, scopes: frozenset[NamespaceId], policy: TrustPolicy) -> Verdict:
        if statement.kind in NOT_KEPT:
            verdict = self._ranks.take(statement)
            if verdict is Verdict.NEW and isinstance(statement.body, ProviderRecord):
                self._note_told_of(statement.signer, statement.body, policy)
            return verdict
        taken = self._book.take(statement, scopes, lambda namespace, signer: policy.believes(signer, namespace))
        self._writer.changed(taken.changed)
        if taken.changed:
            self._standings.taken(statement)
        return taken.verdict

    def _note_told_of(self, signer: bytes, record: ProviderRecord, policy: TrustPolicy) -> None:
        if self._standings.told_of(signer, record, policy):
            self.counters["revocations_withheld"] += 1

    async def _reconcile(self) -> None:
        while True:
            await trio.sleep(gossip.next_reconcile_s(self._random(1)[0] / 255))
            self._writer.changed(self._book.expire(self._now()))
            await self._writer.write()
            self._talks.ask_some()

    # --- what the talks read ------------------------------------------------------------------------------------------

    def namespaces(self) -> tuple[Namespace, ...]:
        """Those this node is in now."""
        return self._identity.namespaces()

    def refused(self, namespace: Namespace) -> Iterable[bytes]:
        """Short names of what was found to be no good in a namespace."""
        return self._opener.refused(namespace.id)

    def held(self, namespace: Namespace) -> dict[bytes, bytes]:
        """Everything that may be told in a namespace, by short name, the most important first."""
        now_s = self._now()
        rank = {kind: place for place, kind in enumerate(_FIRST_TOLD)}
        kept = [(digest, each) for digest, each in self._book.held_in(namespace.id) if not _expired(each.body, now_s)]
        kept.sort(key=lambda entry: (rank.get(entry[1].kind, len(rank)), entry[1].body.sequence))
        held = {gossip.short(digest): each.envelope for digest, each in kept}
        for source in self._sources:
            held.update((name_of(envelope), envelope) for envelope in source(namespace))
        return held


def _expired(body: AnyStatement, now_s: float) -> bool:
    return 0 < body.expires <= now_s
