"""Tables of who holds what: tell members of this node's own, and keep theirs.

Everything that peers tell has been opened by `Statements`: size, shape, signature, times and namespace are good. What
counts here besides is who signed it.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from kvnet.errors import KvnetError
from kvnet.exchange.identity import Identity
from kvnet.exchange.session import PeerSession
from kvnet.exchange.statements import Heard, Statements
from kvnet.format.hashes import ArtifactHash, LookupKey, PrefixKey
from kvnet.network.interface import Network
from kvnet.protocol.ids import PeerId
from kvnet.protocol.lookup import LookupQuery, PeerClaim
from kvnet.protocol.messages import MAX_RECORDS, Capability
from kvnet.protocol.provider_pages import OwnPages, PageLimits, Telling, held_entry
from kvnet.protocol.scoring import PeerScores
from kvnet.protocol.serve import HeldArtifact
from kvnet.protocol.tables import KnownMember, PeerTables, TableLimits, Taken
from kvnet.trust.envelope import StatementType
from kvnet.trust.namespace import Namespace
from kvnet.trust.policy import TrustPolicy
from kvnet.trust.statements import HeldEntry, ProviderRecord, SignedStatement, open_statement, sign_statement, timely

if TYPE_CHECKING:
    from trio_typing import TaskStatus

    from kvnet.exchange.node import ExchangeNode

_log = logging.getLogger(__name__)

LOOK_S = 5.0
"""How often addresses, keys and what has expired are looked at."""

DOUBT_S = 2.0
"""Seconds in which a peer that had less than its records say may take those back: it may have let it go just then."""

MAX_CHANGES = 1024
"""Artifacts that may come or go while the store is read."""

MAX_DOUBTS = 64
"""Claims in doubt at a time."""

TELL_BYTES_S = 128 * 1024
TELL_BURST_BYTES = 2 * 1024 * 1024
"""Bytes of own pages told to each member a second, and at once: half of what a session takes in requests."""


Accepts = Callable[[Namespace, bytes], bool]
"""Whether records that this publisher signed count in a namespace."""


@dataclass(slots=True)
class _Own:
    """What this node tells in one namespace.

    Attributes:
        namespace: as it is now.
        pages: what to tell.
        signed: the last record of each page, and when it expires, in seconds since 1970.
    """

    namespace: Namespace
    pages: OwnPages
    signed: dict[int, tuple[bytes, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _HeldHere:
    artifact: HeldArtifact
    keys: tuple[PrefixKey, ...]


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
        accepts: whose records count; by default those whom the policy believes in the namespace.
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
        self._random = random
        self._page_limits = pages or PageLimits()
        self._tables = PeerTables(limits)
        self._own: dict[bytes, _Own] = {}
        self._held: dict[ArtifactHash, _HeldHere] = {}
        self._since: dict[ArtifactHash, _HeldHere | None] = {}
        self._addresses: tuple[str, ...] = ()
        self._policy: TrustPolicy | None = None
        self._changed = trio.Event()
        self._told_on: dict[PeerId, tuple[str, ...]] = {}
        self._doubts: set[tuple[bytes, PeerId, bytes]] = set()
        self._node: ExchangeNode | None = None
        self._nursery: trio.Nursery | None = None
        self._tell_level_bytes = float(TELL_BURST_BYTES)
        self._told_s = float("-inf")
        self.accepts: Accepts = self._policy_accepts
        self.counters: Counter[str] = Counter()
        statements.subscribe(StatementType.PROVIDER, self._heard)
        statements.also_tell(self.envelopes)

    def attach(self, node: "ExchangeNode") -> None:
        """Be the tables of this node."""
        self._node = node
        node.use_tables(self)

    # --- own pages ----------------------------------------------------------------------------------------------------

    def begin_reload(self) -> None:
        """The store is about to be read: what comes or goes from now on counts after what will be read."""
        self._since.clear()

    def reload(self, held: Iterable[tuple[HeldArtifact, Sequence[PrefixKey]]]) -> None:
        """This is all that was held when the store was read, for the namespaces as they are now."""
        self._held = {artifact.hash: _HeldHere(artifact, tuple(keys)) for artifact, keys in held}
        for artifact, each in self._since.items():
            if each is None:
                self._held.pop(artifact, None)
            else:
                self._held[artifact] = each
        self._since.clear()
        self._renew_all()

    def hold(self, artifact: HeldArtifact, keys: Sequence[PrefixKey]) -> None:
        """An artifact is held from now on."""
        held = self._held[artifact.hash] = self._since[artifact.hash] = _HeldHere(artifact, tuple(keys))
        policy = self._identity.policy()
        for own in self._owns():
            if own.namespace.id == artifact.manifest.namespace and policy.may_serve(artifact.manifest):
                own.pages.hold(*_entry(own.namespace, held))
        self._bound_since()
        self._wake()

    def drop(self, artifact: ArtifactHash) -> None:
        """An artifact is held no longer."""
        self._since[artifact] = None
        self._bound_since()
        if self._held.pop(artifact, None) is not None:
            for own in self._owns():
                own.pages.drop(own.namespace.keyed_artifact(artifact))
            self._wake()

    def _bound_since(self) -> None:
        while len(self._since) > MAX_CHANGES:
            del self._since[next(iter(self._since))]

    def _renew_all(self) -> None:
        policy = self._policy = self._identity.policy()
        for own in self._owns():
            own.pages.replace(
                _entry(own.namespace, held)
                for held in self._held.values()
                if held.artifact.manifest.namespace == own.namespace.id and policy.may_serve(held.artifact.manifest)
            )
        self._wake()

    def _owns(self) -> list[_Own]:
        """The pages of each of this node's namespaces; those of namespaces it has left are told no more."""
        namespaces = {bytes(namespace.id): namespace for namespace in self._identity.namespaces()}
        self._own = {key: own for key, own in self._own.items() if key in namespaces}
        for key, namespace in namespaces.items():
            own = self._own.setdefault(key, _Own(namespace, OwnPages(self._page_limits)))
            own.namespace = namespace
        return list(self._own.values())

    def envelopes(self, namespace: Namespace) -> list[bytes]:
        """Every record that counts in a namespace, own ones and others', for a member that asks."""
        own, now_s = self._own.get(namespace.id), self._now()
        signed = sorted(own.signed.items(), reverse=True) if own is not None else []
        mine = [envelope for _, (envelope, expires_s) in signed if expires_s > now_s]
        return [*mine, *self._tables.envelopes(namespace.id, now_s)]

    # --- others' tables -----------------------------------------------------------------------------------------------

    def _policy_accepts(self, namespace: Namespace, signer: bytes) -> bool:
        return self._identity.policy().believes(signer, namespace.id)

    def _accepted(self, namespace: bytes, signer: bytes) -> bool:
        return any(each.id == namespace and self.accepts(each, signer) for each in self._identity.namespaces())

    def _heard(self, heard: Heard) -> None:
        body = heard.statement.body
        assert isinstance(body, ProviderRecord)  # noqa: S101 - subscribed to these alone
        self._take(heard.statement, body, heard.session, heard.namespace)

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
        if not self._accepted(record.namespace, statement.signer):
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
        own = self._own.get(record.namespace)
        if own is not None and statement.signer == self._identity.signing_key().public:
            own.pages.shown(record.page, record.sequence)
            self._wake()

    def claims(
        self, query: LookupQuery, longer_than_tokens: int = 0, *, but: Collection[PeerId] = ()
    ) -> list[PeerClaim]:
        """What members hold of a prompt beyond what is here, as far as their records say."""
        found = self._tables.claims(query, self._now(), longer_than_tokens=longer_than_tokens, but=but)
        return [claim for claim in found if self.accepts(query.namespace, claim.signer)]

    def tells_all(self, session: PeerSession, namespace: Namespace) -> bool:
        """Whether a connected peer need not be asked beyond what its records say."""
        told = Capability.STATEMENTS in session.opened.capabilities
        return told and self._tables.complete(namespace.id, session.peer, self._now())

    def records_for(self, peer: PeerId, namespace: Namespace, keys: Sequence[bytes]) -> tuple[bytes, ...]:
        """Records of others that hold one of the keys, the deepest first, for a peer that asks."""
        return self._tables.records(namespace.id, keys, self._now(), but=peer, at_most=MAX_RECORDS)

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
        """Tell, renew and expire, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._keep_telling)
            nursery.start_soon(self._look_now_and_then)
            task_status.started()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _keep_telling(self) -> None:
        while True:
            changed = self._changed
            with trio.move_on_at(min((own.pages.next_due() for own in self._owns()), default=float("inf"))) as scope:
                await changed.wait()
            if not scope.cancelled_caught:
                continue
            await trio.lowlevel.checkpoint()
            for own in self._owns():
                await self._tell(own)

    async def _tell(self, own: _Own) -> None:
        """Sign what is due in a namespace and tell the members."""
        now_s = self._now()
        who = Telling(
            own.namespace.id,
            self._network.peer_id,
            self._addresses,
            self._statements.latest_revocation(own.namespace),
        )
        key = self._identity.signing_key()
        envelopes: list[bytes] = []
        for number in own.pages.due(trio.current_time()):
            record = own.pages.record(number, who, trio.current_time(), now_s, self._random(1)[0] / 255)
            envelope = sign_statement(record, key).envelope
            own.signed[number] = (envelope, record.expires)
            envelopes.append(envelope)
            self.counters["pages_signed"] += 1
            await trio.lowlevel.checkpoint()
        self._statements.spread(own.namespace, envelopes)
        await self._pace(sum(map(len, envelopes)))

    async def _pace(self, n_bytes: int) -> None:
        """Wait until members can take so much more."""
        if self._node is None or not self._node.sessions():
            return
        now_s = trio.current_time()
        refilled = self._tell_level_bytes + TELL_BYTES_S * min(now_s - self._told_s, TELL_BURST_BYTES / TELL_BYTES_S)
        self._tell_level_bytes = min(float(TELL_BURST_BYTES), refilled) - n_bytes
        self._told_s = now_s
        if self._tell_level_bytes < 0:
            await trio.sleep(-self._tell_level_bytes / TELL_BYTES_S)

    async def _look_now_and_then(self) -> None:
        while True:
            self._look()
            await trio.sleep(LOOK_S)

    def _look(self) -> None:
        """At the addresses of this node, at who is revoked, and at what has expired."""
        addresses = reachable(self._network.addresses())
        if addresses != self._addresses:
            self._addresses = addresses
            for own in self._owns():
                own.pages.moved()
            self._wake()
        if self._identity.policy() != self._policy:
            self._renew_all()
        now_s = self._now()
        self._tables.keep_signers(self._accepted)
        self._tables.expire(now_s)
        known = self.members()
        self._told_on = {peer: each for peer, each in self._told_on.items() if peer in known}
        for own in self._owns():
            own.signed = {number: each for number, each in own.signed.items() if each[1] > now_s}


def reachable(addresses: Iterable[str]) -> tuple[str, ...]:
    """The addresses that others may be told; those of this machine alone only where there are no others."""
    known = list(addresses)
    far = [text for text in known if "/127.0.0.1/" not in text and "/ip6/::1/" not in text]
    return tuple(far or known)


def _entry(namespace: Namespace, held: _HeldHere) -> tuple[LookupKey, HeldEntry]:
    artifact = held.artifact
    name = namespace.keyed_artifact(artifact.hash)
    return name, held_entry(namespace, name, artifact.manifest, held.keys)
