"""Tables of who holds what, as members tell of themselves; what this node tells is in `own_tables`.

Everything that peers tell has been opened by `Statements`: size, shape, signature, times and namespace are good. What
counts here besides is who signed it.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import trio

from kvnet.errors import KvnetError
from kvnet.exchange.identity import Identity
from kvnet.exchange.own_tables import OwnTables
from kvnet.exchange.session import PeerSession
from kvnet.exchange.statements import Heard, Statements
from kvnet.exchange.told_dialing import ToldDialer
from kvnet.format.hashes import LookupKey
from kvnet.network.interface import Network
from kvnet.protocol.ids import PeerId
from kvnet.protocol.lookup import LookupQuery, PeerClaim
from kvnet.protocol.messages.artifacts import MAX_RECORDS
from kvnet.protocol.messages.handshake import Capability
from kvnet.protocol.provider_pages import PageLimits
from kvnet.protocol.scoring import PeerScores
from kvnet.protocol.tables import KnownMember, PeerTables, TableLimits, Taken
from kvnet.trust.envelope import StatementType
from kvnet.trust.namespace import Namespace
from kvnet.trust.policy import TrustPolicy
from kvnet.trust.statement_bodies import HeldEntry, ProviderRecord
from kvnet.trust.statements import SignedStatement, open_statement, timely

if TYPE_CHECKING:
    from trio_typing import TaskStatus

    from kvnet.exchange.node import ExchangeNode

_log = logging.getLogger(__name__)

LOOK_S = 5.0
"""How often addresses, keys and what has expired are looked at."""

DOUBT_S = 2.0
"""Seconds in which a peer that had less than its records say may take those back: it may have let it go just then."""

MAX_DOUBTS = 64
"""Claims in doubt at a time."""

MAX_STRANGERS = 64
"""Records kept of signers who are not believed yet: that they were let in may be heard after what they hold. A bound on
memory; whoever does not fit is heard with the next renewal."""


class Tables:
    """The tables of one node and its members.

    Args:
        network: to dial members.
        identity: signing key, namespaces and policy; read afresh at every use.
        statements: how records come and go.
        scores: where lies are remembered.
        now: seconds since 1970.
        random: source of random bytes, for the spread of renewals.
        pages: how often own pages are told.
        limits: how much is remembered of others.

    Attributes:
        own: what this node tells of itself.
        dialer: dials whom members tell of.
    """

    def __init__(
        self,
        network: Network,
        identity: Identity,
        statements: Statements,
        scores: PeerScores,
        *,
        now: Callable[[], float],
        random: Callable[[int], bytes],
        pages: PageLimits | None = None,
        limits: TableLimits | None = None,
    ) -> None:
        self._network = network
        self._identity = identity
        self._statements = statements
        self._scores = scores
        self._now = now
        self._tables = PeerTables(limits)
        self._told_on: dict[PeerId, tuple[str, ...]] = {}
        self._doubts: set[tuple[bytes, PeerId, bytes]] = set()
        self._strangers: OrderedDict[tuple[bytes, bytes, PeerId, int], Heard] = OrderedDict()
        self._judged_by: TrustPolicy | None = None
        self._nursery: trio.Nursery | None = None
        self.counters: Counter[str] = Counter()
        self.dialer = ToldDialer(network)
        self.own = OwnTables(network.peer_id, identity, statements, pages, now=now, random=random)
        statements.subscribe(StatementType.PROVIDER, self._heard)
        statements.also_tell(self.envelopes)

    def attach(self, node: "ExchangeNode") -> None:
        """Be the tables of this node."""
        node.use_tables(self)

    def envelopes(self, namespace: Namespace) -> list[bytes]:
        """Every record that counts in a namespace, own ones and others', for a member that asks."""
        return [*self.own.envelopes(namespace), *self._tables.envelopes(namespace.id, self._now())]

    # --- others' tables -----------------------------------------------------------------------------------------------

    def _heard(self, heard: Heard) -> None:
        body = heard.statement.body
        assert isinstance(body, ProviderRecord)  # noqa: S101 - subscribed to these alone
        if self._identity.policy().believes(heard.statement.signer, body.namespace):
            self._take(heard.statement, body, heard.session, heard.namespace)
            return
        self.counters["records_of_strangers"] += 1
        self._strangers[(heard.statement.signer, body.namespace, PeerId(body.peer), body.page)] = heard
        if len(self._strangers) > MAX_STRANGERS:
            self._strangers.popitem(last=False)

    def _hear_again(self, policy: TrustPolicy) -> None:
        """Who is believed has changed: strangers of before may count now."""
        believed = {place: heard for place, heard in self._strangers.items() if policy.believes(place[0], place[1])}
        for place, heard in believed.items():
            del self._strangers[place]
            if timely(heard.statement.body, self._now()) is None:
                self._heard(heard)

    def _take(
        self,
        statement: SignedStatement,
        record: ProviderRecord,
        session: PeerSession | None,
        namespace: Namespace | None,
    ) -> bool:
        """Whether a record says something new."""
        peer = PeerId(record.peer)
        if peer == self._network.peer_id:
            self._shown_own(statement, record)
            return False
        if not self._identity.policy().believes(statement.signer, record.namespace):
            self.counters["records_of_strangers"] += 1
            return False
        own_words = session is not None and session.peer == peer
        taken = self._tables.take(record, statement.signer, statement.envelope, self._now(), own_words=own_words)
        self.counters[f"records_{taken.value}"] += 1
        if taken is Taken.NEW and record.page == 0 and namespace is not None:
            self._tell_on(record, statement.envelope, namespace, session)
        return taken is Taken.NEW

    def _tell_on(self, record: ProviderRecord, envelope: bytes, namespace: Namespace, but: PeerSession | None) -> None:
        """That a member is there, or somewhere else than before, is told to those who cannot know it from itself."""
        if self._told_on.get(PeerId(record.peer)) != record.addresses:
            self._told_on[PeerId(record.peer)] = record.addresses
            self._statements.spread(namespace, [envelope], but=but)

    def _shown_own(self, statement: SignedStatement, record: ProviderRecord) -> None:
        """A record of this node's from before it was started, or one that somebody made up in its name."""
        if statement.signer == self._identity.signing_key().public:
            self.own.shown(record)

    def claims(
        self, query: LookupQuery, longer_than_tokens: int = 0, *, but: Collection[PeerId] = ()
    ) -> list[PeerClaim]:
        """What members hold of a prompt beyond what is here, as far as their records say."""
        found = self._tables.claims(query, self._now(), longer_than_tokens=longer_than_tokens, but=but)
        policy = self._identity.policy()
        return [claim for claim in found if policy.believes(claim.signer, query.namespace.id)]

    def tells(self, namespace: Namespace, peer: PeerId, key: LookupKey) -> bool:
        """Whether the records that a peer stands by say at this moment that it holds this key."""
        return self._tables.still_claims(namespace.id, peer, bytes(key), self._now())

    def tells_all(self, session: PeerSession, namespace: Namespace) -> bool:
        """Whether a connected peer need not be asked beyond what its records say."""
        told = Capability.STATEMENTS in session.opened.capabilities
        return told and self._tables.complete(namespace.id, session.peer, self._now())

    def records_for(self, peer: PeerId, namespace: Namespace, keys: Sequence[bytes]) -> tuple[bytes, ...]:
        """Records of others that hold one of the keys, the deepest first, for a peer that asks."""
        return self._tables.records(namespace.id, keys, self._now(), but=peer, at_most=MAX_RECORDS)

    def held(self, namespace: Namespace) -> list[tuple[PeerId, HeldEntry]]:
        """Every artifact of a namespace that a member says it holds."""
        policy = self._identity.policy()
        return [
            (peer, entry)
            for peer, signer, entry in self._tables.held(namespace.id, self._now())
            if policy.believes(signer, namespace.id)
        ]

    def members_of(self, namespace: Namespace) -> list[KnownMember]:
        """The peers that somebody has told of in a namespace."""
        return self._tables.members(namespace.id, self._now())

    def members(self) -> dict[PeerId, KnownMember]:
        """The peers that somebody has told of, in any of this node's namespaces."""
        now_s = self._now()
        return {
            member.peer: member
            for namespace in self._identity.namespaces()
            for member in self._tables.members(namespace.id, now_s)
        }

    def counted(self) -> dict[str, int]:
        """What happened since the start, and how much is known, for people to read."""
        return {
            **{f"tables_{name}": count for name, count in self.counters.items()},
            "tables_pages_signed": self.own.n_signed,
            "tables_members": len(self.members()),
            "tables_bytes": self.cost_bytes,
        }

    @property
    def cost_bytes(self) -> int:
        """Bytes of others' records that are kept."""
        return self._tables.cost_bytes

    def shown(self, envelopes: Sequence[bytes], namespace: Namespace) -> int:
        """Records that came with a lookup reply; how many of them say something new.

        A lookup waits for this, so they are opened here and now; there are few of them.
        """
        new = 0
        for envelope in envelopes:
            try:
                statement = open_statement(envelope, kind=StatementType.PROVIDER)
            except KvnetError:
                self.counters["records_invalid"] += 1
                continue
            body = statement.body
            assert isinstance(body, ProviderRecord)  # noqa: S101 - opened as one
            if body.namespace != namespace.id or timely(body, self._now()) is not None:
                self.counters["records_untimely"] += 1
                continue
            new += self._take(statement, body, None, namespace)
        return new

    def doubt(self, namespace: Namespace, peer: PeerId, key: bytes) -> None:
        """A peer had less than its records say. It is a lie if they still say so a moment later."""
        doubted = (bytes(namespace.id), peer, key)
        if self._nursery is not None and doubted not in self._doubts and len(self._doubts) < MAX_DOUBTS:
            self._doubts.add(doubted)
            self._nursery.start_soon(self._settle_doubt, namespace, peer, key)

    async def _settle_doubt(self, namespace: Namespace, peer: PeerId, key: bytes) -> None:
        await trio.sleep(DOUBT_S)
        self._doubts.discard((bytes(namespace.id), peer, key))
        if self._tables.still_claims(namespace.id, peer, key, self._now()):
            self.counters["lies"] += 1
            self._scores.lied(peer, trio.current_time())

    # --- life ---------------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Tell, renew and expire, until cancelled; the network runs already."""
        self._look()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self.own.run)
            nursery.start_soon(self._look_now_and_then)
            task_status.started()

    async def _look_now_and_then(self) -> None:
        while True:
            await trio.sleep(LOOK_S)
            self._look()

    def _look(self) -> None:
        """At the addresses of this node, at whom it believes, and at what has expired."""
        self.own.look(reachable(self._network.addresses()))
        policy, namespaces = self._identity.policy(), {namespace.id for namespace in self._identity.namespaces()}
        if policy != self._judged_by:
            self._judged_by = policy
            self._hear_again(policy)
        self._tables.keep_signers(
            lambda namespace, signer: namespace in namespaces and policy.believes(signer, namespace)
        )
        self._tables.expire(self._now())
        known = self.members()
        self._told_on = {peer: each for peer, each in self._told_on.items() if peer in known}


def reachable(addresses: Iterable[str]) -> tuple[str, ...]:
    """The addresses that others may be told; those of this machine alone only where there are no others."""
    known = list(addresses)
    far = [text for text in known if "/127.0.0.1/" not in text and "/ip6/::1/" not in text]
    return tuple(far or known)
