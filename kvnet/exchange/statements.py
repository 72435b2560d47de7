"""Statements of this node and of others: say them, take them, keep them, spread them among members.

What a peer tells is queued, then checked in this order: size, shape, signature, times, namespace, rank. What is new is
written to disk, shown to whoever subscribed, and told on to every other member. Provider records are not kept and not
told on here: whoever subscribed keeps them in RAM, and says what of them is told to others (`also_tell`, `spread`).
Invitations are secrets between two people: they are neither taken nor told.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import trio

from kvnet.errors import KvnetError, StoreError
from kvnet.exchange.identity import Identity
from kvnet.exchange.lane import Lane
from kvnet.exchange.session import PeerSession
from kvnet.format.hashes import NamespaceId, blake3_hash
from kvnet.protocol import gossip
from kvnet.protocol.messages import (
    MAX_TOLD_BYTES,
    Capability,
    GetStatements,
    RefusalReason,
    Refused,
    Reply,
    Request,
    Tell,
    Told,
)
from kvnet.protocol.messages import (
    Statements as StatementsReply,
)
from kvnet.trust.envelope import StatementType
from kvnet.trust.namespace import Namespace
from kvnet.trust.statement_book import NOT_KEPT, PlaceKey, Ranks, Row, StatementBook, Verdict, scopes_of_body
from kvnet.trust.statements import (
    AnyStatement,
    Revocation,
    SignedStatement,
    next_sequence,
    open_statement,
    sign_statement,
    timely,
)

if TYPE_CHECKING:
    from trio_typing import TaskStatus

    from kvnet.exchange.node import ExchangeNode

_log = logging.getLogger(__name__)

BATCH = 64
"""Statements checked and written together."""
MAX_WAITING_TO_SEND = 4096
"""Statements waiting for one peer; what does not fit it gets when it asks."""
MAX_REFUSED = 4096
"""Statements remembered as no good, so that nobody sends them again and again."""
MAX_WITHHELD = 1024
"""Signers of whom a revocation is known to be missing."""
MEMBERS_ASKED = 2
"""Members asked at each look for what did not arrive."""

_FIRST_TOLD = (
    StatementType.REVOCATION,
    StatementType.REKEY,
    StatementType.MEMBERSHIP,
    StatementType.KEY_ROTATION,
)
"""What a first page begins with; the rest follows in any order."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A statement that counts.

    Attributes:
        statement: what, and by whom; its signature and times are good, and it outranks what was here before.
        namespace: in which it was told; None when this node has said it in several.
        session: by which peer; None for one of this node's own, or one read from disk.
    """

    statement: SignedStatement
    namespace: Namespace | None
    session: PeerSession | None


Callback = Callable[[Heard], None]
"""Told of a statement, right after it was written to disk; fast, and never raises."""

Source = Callable[[Namespace], Iterable[bytes]]
"""Envelopes to tell members of a namespace besides those kept here, such as provider records that are still good."""


class StatementKeep(Protocol):
    """Where statements outlive the node. Blocking: called in a lane."""

    def rows(self) -> list[Row]:
        """Everything written and not removed."""
        ...

    def write(self, rows: Sequence[Row], gone: Sequence[PlaceKey]) -> None:
        """Write and remove, all or nothing; on disk when it returns.

        Raises:
            StoreError: it cannot be written.
        """
        ...


class RamKeep:
    """Keeps statements as long as the process runs."""

    def __init__(self) -> None:
        self._rows: dict[tuple[bytes, str, bytes], Row] = {}

    def rows(self) -> list[Row]:
        """Everything written and not removed."""
        return list(self._rows.values())

    def write(self, rows: Sequence[Row], gone: Sequence[PlaceKey]) -> None:
        """Write and remove."""
        for signer, kind, subject in gone:
            self._rows.pop((signer, kind.value, subject), None)
        for row in rows:
            self._rows[row.signer, row.kind, row.subject] = row


@dataclass(frozen=True, slots=True)
class _Waiting:
    envelope: bytes
    namespace: Namespace
    session: PeerSession | None


@dataclass(slots=True, eq=False)
class _Talk:
    """What goes on with one session."""

    session: PeerSession
    told: gossip.Allowance
    asks: gossip.Allowance
    exchanged: gossip.Exchanged = field(default_factory=gossip.Exchanged)
    waiting: deque[tuple[Namespace, bytes]] = field(default_factory=deque)
    wanted: trio.Event = field(default_factory=trio.Event)
    ask: trio.Event = field(default_factory=trio.Event)
    queued: int = 0

    def slot(self, namespace: Namespace) -> int | None:
        """The slot of a namespace that both sides have proved."""
        return self.session.slots.get(namespace)


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
        self._keep = keep
        self._lane = lane
        self._now = now
        self._random = random
        self._limits = limits or gossip.GossipLimits()
        self._book = StatementBook()
        self._ranks = Ranks()
        self._refused = gossip.Exchanged(MAX_REFUSED)
        self._withheld: dict[tuple[NamespaceId, bytes], int] = {}
        self._callbacks: dict[StatementType, list[Callback]] = {}
        self._sources: list[Source] = []
        self._talks: dict[PeerSession, _Talk] = {}
        self._queue: deque[_Waiting] = deque()
        self._queued_bytes = 0
        self._queue_filled = trio.Event()
        self._settled = trio.Event()
        self._settled.set()
        self._unwritten: set[PlaceKey] = set()
        self._writing = trio.Lock()
        self.counters: Counter[str] = Counter()

    # --- what others use ----------------------------------------------------------------------------------------------

    def attach(self, node: "ExchangeNode") -> None:
        """Speak with the peers of this node, from its next session on."""
        node.offer_capability(Capability.STATEMENTS)
        node.answer_with(Tell, self._answer_tell)
        node.answer_with(GetStatements, self._answer_ask)
        node.greet_with(self._greet)

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
        make_body: Callable[[int, int], AnyStatement],
        *,
        namespaces: Sequence[Namespace] | None = None,
    ) -> SignedStatement:
        """Sign a statement with this node's signing key, keep it, and tell the members.

        Args:
            make_body: gets the sequence and the time of issue (seconds since 1970) and returns the body; called again
                when the sequence was too low.
            namespaces: where to tell a statement that names no namespace itself; by default in all of this node's.

        Raises:
            StoreError: it cannot be written, or there are too many of its kind already.
        """
        statement = self._sign(make_body)
        if statement.kind is StatementType.INVITATION:
            return statement
        told_in = self._identity.namespaces() if namespaces is None else namespaces
        if statement.kind in NOT_KEPT:
            self._ranks.take(statement)
            self._tell_subscribers(Heard(statement, self._named(statement.body), None))
        else:
            taken = self._book.take(statement, scopes_of_body(statement.body, (n.id for n in told_in)), self._is_known)
            if taken.verdict is Verdict.FULL:
                raise StoreError(
                    f"expected room for one more {statement.kind.value} of this node, found too many of them",
                    hint="kvnet doctor shows how many statements are kept",
                )
            self._unwritten.update(taken.changed)
            await self._write()
            self._tell_subscribers(Heard(statement, self._named(statement.body), None))
        self._tell_on(statement, None)
        return statement

    def take(self, envelopes: Iterable[bytes], namespace: Namespace, session: PeerSession | None = None) -> int:
        """Queue statements to be checked; `settled` says when that is done.

        Args:
            envelopes: as received.
            namespace: the namespace in which they were told.
            session: by whom; None when that is no matter of limits, as with what this node has asked for.

        Returns:
            How many were queued: fewer when the peer tells too much. It is asked for them later.
        """
        talk = self._talks.get(session) if session is not None else None
        queued = 0
        for envelope in envelopes:
            digest = blake3_hash(envelope)
            if talk is not None:
                talk.exchanged.add(gossip.short(digest))
            if gossip.short(digest) in self._refused or self._book.holds(digest, namespace.id):
                continue
            if self._queued_bytes + len(envelope) > self._limits.queued_bytes or not self._may_queue(talk):
                self.counters["statements_dropped"] += 1
                continue
            self._queue.append(_Waiting(envelope, namespace, session))
            self._queued_bytes += len(envelope)
            queued += 1
        if queued:
            self._settled = trio.Event() if self._settled.is_set() else self._settled
            self._queue_filled.set()
        return queued

    async def settled(self) -> None:
        """Wait until everything queued so far has been checked."""
        while not self._settled.is_set():
            await self._settled.wait()

    def all(self, kind: StatementType, *, namespace: Namespace | NamespaceId | None = None) -> list[SignedStatement]:
        """The statements of a type that count, oldest first; of one namespace, or of all."""
        return self._book.all(kind, namespace=namespace.id if isinstance(namespace, Namespace) else namespace)

    def latest(self, kind: StatementType, subject: bytes, signer: bytes) -> SignedStatement | None:
        """What counts of one signer about one subject (`AnyStatement.subject`)."""
        return self._book.latest(kind, subject, signer)

    def latest_revocation(self, namespace: Namespace) -> int:
        """What `ProviderRecord.revocations` of this node has to be in a namespace."""
        return self._book.revocations(self._identity.signing_key().public, namespace.id)

    def spread(self, namespace: Namespace, envelopes: Iterable[bytes], *, but: PeerSession | None = None) -> None:
        """Tell these to every connected member of a namespace that is not known to know them.

        Args:
            namespace: which.
            envelopes: signed statements.
            but: whom not to tell: whoever told us.
        """
        named = [(gossip.short(blake3_hash(envelope)), envelope) for envelope in envelopes]
        for session, talk in self._talks.items():
            if session is but or talk.slot(namespace) is None:
                continue
            for name, envelope in named:
                if len(talk.waiting) < MAX_WAITING_TO_SEND and talk.exchanged.add(name):
                    talk.waiting.append((namespace, envelope))
            if talk.waiting:
                talk.wanted.set()

    # --- life ---------------------------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Read what is on disk; subscribers are told of it."""
        for row in await self._lane.run(self._keep.rows):
            statement = _reopened(row)
            self._book.restore(row, statement)
            if statement is not None and timely(statement.body, self._now()) is None:
                self._tell_subscribers(Heard(statement, self._named(statement.body), None))

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Check what is told and look for what did not arrive, until cancelled; call `load` before."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._check_queue)
            nursery.start_soon(self._reconcile_now_and_then)
            task_status.started()

    # --- saying -------------------------------------------------------------------------------------------------------

    def _sign(self, make_body: Callable[[int, int], AnyStatement]) -> SignedStatement:
        now_s = self._now()
        key = self._identity.signing_key()
        body = make_body(int(now_s * 1000), int(now_s))
        draft = sign_statement(body, key)
        rank = self._ranks if draft.kind in NOT_KEPT else self._book
        last = rank.sequence(draft.kind, body.subject, draft.signer)
        if isinstance(body, Revocation):
            # One number stands for all of a signer's revocations in its provider records.
            last = max(last, self._book.revocations(draft.signer))
        sequence = next_sequence(now_s, last)
        return draft if sequence == body.sequence else sign_statement(make_body(sequence, int(now_s)), key)

    def _named(self, body: AnyStatement) -> Namespace | None:
        named = getattr(body, "namespace", None)
        return next((each for each in self._identity.namespaces() if each.id == named), None)

    def _is_known(self, namespace: NamespaceId, signer: bytes) -> bool:
        del namespace
        policy = self._identity.policy()
        return signer in policy.own or signer in policy.trusted

    async def _write(self) -> None:
        """Have what has changed on disk. What cannot be written counts all the same, and is tried again later."""
        async with self._writing:
            changed = list(self._unwritten)
            rows = [row for key in changed if (row := self._book.row(key)) is not None]
            gone = [key for key in changed if self._book.row(key) is None]
            if not changed:
                return
            try:
                await self._lane.run(self._keep.write, rows, gone)
            except KvnetError as error:
                self.counters["statements_not_written"] += len(changed)
                _log.warning("statements not written: %s", error)
            else:
                self._unwritten.difference_update(changed)

    def _tell_subscribers(self, heard: Heard) -> None:
        for callback in self._callbacks.get(heard.statement.kind, ()):
            callback(heard)

    def _tell_on(self, statement: SignedStatement, but: PeerSession | None) -> None:
        if statement.kind is StatementType.PROVIDER:
            named = self._named(statement.body)
            scopes = frozenset() if named is None else frozenset({named.id})
        else:
            scopes = self._book.scopes_of(statement)
        for namespace in self._identity.namespaces():
            if namespace.id in scopes:
                self.spread(namespace, [statement.envelope], but=but)

    # --- taking -------------------------------------------------------------------------------------------------------

    def _may_queue(self, talk: _Talk | None) -> bool:
        if talk is None:
            return True
        if talk.queued >= self._limits.queued or not talk.told.take(1, trio.current_time()):
            return False
        talk.queued += 1
        return True

    async def _check_queue(self) -> None:
        while True:
            await self._queue_filled.wait()
            batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
            self._queued_bytes -= sum(len(each.envelope) for each in batch)
            await self._check(batch)
            if not self._queue:
                self._queue_filled = trio.Event()
                self._settled.set()

    async def _check(self, batch: Sequence[_Waiting]) -> None:
        heard: list[Heard] = []
        for each in batch:
            await trio.lowlevel.checkpoint()
            talk = self._talks.get(each.session) if each.session is not None else None
            if talk is not None:
                talk.queued -= 1
            statement = self._opened(each)
            if statement is None:
                continue
            verdict = self._rank(statement, each.namespace)
            self.counters[f"statements_{verdict.value}"] += 1
            if verdict in {Verdict.NEW, Verdict.WIDENED}:
                heard.append(Heard(statement, each.namespace, each.session))
        await self._write()
        for each_heard in heard:
            self._tell_subscribers(each_heard)
            if each_heard.statement.kind not in NOT_KEPT:
                self._tell_on(each_heard.statement, each_heard.session)

    def _rank(self, statement: SignedStatement, namespace: Namespace) -> Verdict:
        if statement.kind in NOT_KEPT:
            return self._ranks.take(statement)
        taken = self._book.take(statement, self._scopes(statement.body, namespace), self._is_known)
        self._unwritten.update(taken.changed)
        return taken.verdict

    def _opened(self, waiting: _Waiting) -> SignedStatement | None:
        """The statement in an envelope, if it may count here and now."""
        name = gossip.short(blake3_hash(waiting.envelope))
        try:
            statement = open_statement(waiting.envelope)
        except KvnetError:
            self._refused.add(name)
            self.counters["statements_invalid"] += 1
            return None
        untimely = timely(statement.body, self._now())
        if untimely is not None:
            self.counters["statements_untimely"] += 1
            return None
        if statement.kind is StatementType.INVITATION or not scopes_of_body(statement.body, [waiting.namespace.id]):
            self._refused.add(name)
            self.counters["statements_misplaced"] += 1
            return None
        return statement

    def _scopes(self, body: AnyStatement, namespace: Namespace) -> frozenset[NamespaceId]:
        """Where it is told on: what concerns keys of a swarm concerns the owner's other machines too."""
        namespaces = self._identity.namespaces()
        mine = [namespaces[0].id] if namespaces else []
        return scopes_of_body(body, [namespace.id, *mine])

    # --- answering ----------------------------------------------------------------------------------------------------

    def _shared(self, session: PeerSession, slot: int) -> Namespace | None:
        namespace = session.opened.namespaces.get(slot)
        return namespace if namespace in self._identity.namespaces() else None

    def _answer_tell(self, session: PeerSession, request: Request) -> Reply:
        assert isinstance(request, Tell)  # noqa: S101 - the node hands out requests by their kind
        namespace = self._shared(session, request.slot)
        if namespace is None:
            return Refused(request_id=request.request_id, reason=RefusalReason.UNKNOWN)
        if gossip.size_bytes(request) > MAX_TOLD_BYTES:
            return Refused(request_id=request.request_id, reason=RefusalReason.BUSY)
        self.take(request.statements, namespace, session)
        return Told(request_id=request.request_id)

    def _answer_ask(self, session: PeerSession, request: Request) -> Reply:
        assert isinstance(request, GetStatements)  # noqa: S101 - the node hands out requests by their kind
        namespace = self._shared(session, request.slot)
        if namespace is None or not gossip.is_ordered(request):
            return Refused(request_id=request.request_id, reason=RefusalReason.UNKNOWN)
        talk = self._talks.get(session)
        if talk is not None and not talk.asks.take(1, trio.current_time()):
            return Refused(request_id=request.request_id, reason=RefusalReason.BUSY)
        reply = gossip.answer(request, self._held(namespace))
        if talk is not None:
            for name in [*request.known, *(gossip.short(blake3_hash(each)) for each in reply.statements)]:
                talk.exchanged.add(name)
        return reply

    def _held(self, namespace: Namespace) -> dict[bytes, bytes]:
        """Everything that may be told in a namespace, by short name, the most important first."""
        now_s = self._now()
        rank = {kind: place for place, kind in enumerate(_FIRST_TOLD)}
        kept = sorted(
            self._book.held_in(namespace.id),
            key=lambda entry: (rank.get(entry[1].kind, len(rank)), entry[1].body.sequence),
        )
        held = {
            gossip.short(digest): statement.envelope
            for digest, statement in kept
            if not statement.body.expires or statement.body.expires > now_s
        }
        for source in self._sources:
            held.update((gossip.short(blake3_hash(envelope)), envelope) for envelope in source(namespace))
        return held

    # --- asking and telling -------------------------------------------------------------------------------------------

    async def _greet(self, session: PeerSession) -> None:
        """Ask for everything that is not known, and tell of what is new, as long as the session lasts."""
        if Capability.STATEMENTS not in session.opened.capabilities or not session.slots:
            return
        now = trio.current_time()
        limits = self._limits
        talk = _Talk(
            session,
            gossip.Allowance(limits.statements_per_s, limits.statements_burst, now),
            gossip.Allowance(limits.asks_per_s, limits.asks_burst, now),
        )
        self._talks[session] = talk
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_telling, talk)
                talk.ask.set()
                await self._keep_asking(talk)
        finally:
            del self._talks[session]

    async def _keep_asking(self, talk: _Talk) -> None:
        while True:
            await talk.ask.wait()
            talk.ask = trio.Event()
            for namespace in talk.session.slots:
                try:
                    await self._ask_for_all(talk, namespace)
                except KvnetError as error:
                    _log.debug("a member did not tell its statements: %s", error)

    async def _ask_for_all(self, talk: _Talk, namespace: Namespace) -> None:
        slot = talk.slot(namespace)
        if slot is None:
            return
        asking = gossip.Asking({*self._held(namespace), *self._refused})
        again = True
        while again:
            again = False
            for known in gossip.windows(asking.known):
                reply = await talk.session.ask(GetStatements(request_id=0, slot=slot, known=known))
                assert isinstance(reply, StatementsReply)  # noqa: S101 - the session lets only fitting replies through
                names = [gossip.short(blake3_hash(each)) for each in reply.statements]
                again |= asking.learned(names, more=reply.more)
                # Asked for: it costs the peer nothing of what it may tell, and us no more than we ask.
                self.take(reply.statements, namespace)
                for name in names:
                    talk.exchanged.add(name)
                await self.settled()

    async def _keep_telling(self, talk: _Talk) -> None:
        while True:
            await talk.wanted.wait()
            talk.wanted = trio.Event()
            while talk.waiting:
                namespace = talk.waiting[0][0]
                count = next((i for i, (each, _) in enumerate(talk.waiting) if each != namespace), len(talk.waiting))
                envelopes = [talk.waiting.popleft()[1] for _ in range(count)]
                slot = talk.slot(namespace)
                if slot is None:
                    continue
                for page in gossip.pages(envelopes):
                    try:
                        await talk.session.ask(Tell(request_id=0, slot=slot, statements=page))
                    except KvnetError as error:
                        _log.debug("a member could not be told: %s", error)

    async def _reconcile_now_and_then(self) -> None:
        while True:
            await trio.sleep(gossip.next_reconcile_s(self._random(1)[0] / 255))
            self._unwritten.update(self._book.expire(self._now()))
            await self._write()
            talks = list(self._talks.values())
            for _ in range(min(MEMBERS_ASKED, len(talks))):
                chosen = int.from_bytes(self._random(4), "big") % len(talks)
                talks.pop(chosen).ask.set()

    def ask_everybody(self) -> None:
        """Ask all connected members for what is not known here."""
        for talk in self._talks.values():
            talk.ask.set()


def _reopened(row: Row) -> SignedStatement | None:
    """The statement of a row; a damaged one is asked for again."""
    if not row.envelope:
        return None
    try:
        return open_statement(row.envelope)
    except KvnetError:
        return None
