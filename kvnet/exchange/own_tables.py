"""What this node tells members that it holds: pages of artifacts, signed, told when they change, and renewed."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import trio

from kvnet.exchange.identity import Identity
from kvnet.exchange.statements import Statements
from kvnet.format.hashes import ArtifactHash, LookupKey, PrefixKey
from kvnet.network.news import News
from kvnet.protocol.held import HeldArtifact
from kvnet.protocol.ids import PeerId
from kvnet.protocol.provider_pages import OwnPages, PageLimits, Telling, held_entry
from kvnet.trust.namespace import Namespace
from kvnet.trust.policy import TrustPolicy
from kvnet.trust.statement_bodies import HeldEntry, ProviderRecord
from kvnet.trust.statements import sign_statement
from kvnet.trust.withheld import NO_REVOCATIONS, Extent

TELL_BYTES_S = 128 * 1024
TELL_BURST_BYTES = 2 * 1024 * 1024
"""Bytes of own pages told to each member a second, and at once: half of what a session takes in requests."""


MAX_CHANGES = 1024
"""Artifacts that may come or go while the store is read."""


@dataclass(slots=True)
class _Own:
    """What this node tells in one namespace.

    Attributes:
        namespace: as it is now.
        pages: what to tell.
        signed: the last record of each page, and when it expires, in seconds since 1970.
        revocations: what the last page said of this node's revocations.
    """

    namespace: Namespace
    pages: OwnPages
    signed: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    revocations: Extent = NO_REVOCATIONS


@dataclass(frozen=True, slots=True)
class _HeldHere:
    artifact: HeldArtifact
    keys: tuple[PrefixKey, ...]


class OwnTables:
    """What one node tells of itself, in each of its namespaces.

    Args:
        peer: this node.
        identity: signing key, namespaces and policy; read afresh at every use.
        statements: who tells it.
        limits: how often.
        now: seconds since 1970.
        random: source of random bytes, for the spread of renewals.

    Attributes:
        n_signed: pages signed since the start.
    """

    def __init__(
        self,
        peer: PeerId,
        identity: Identity,
        statements: Statements,
        limits: PageLimits | None = None,
        *,
        now: Callable[[], float],
        random: Callable[[int], bytes],
    ) -> None:
        self._peer = peer
        self._identity = identity
        self._statements = statements
        self._limits = limits or PageLimits()
        self._now = now
        self._random = random
        self._own: dict[bytes, _Own] = {}
        self._held: dict[ArtifactHash, _HeldHere] = {}
        self._since: dict[ArtifactHash, _HeldHere | None] = {}
        self._addresses: tuple[str, ...] = ()
        self._policy: TrustPolicy | None = None
        self._changed = News()
        self._level_bytes = float(TELL_BURST_BYTES)
        self._told_at = float("-inf")
        self.n_signed = 0

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
        self.renew_all()

    def hold(self, artifact: HeldArtifact, keys: Sequence[PrefixKey]) -> None:
        """An artifact is held from now on."""
        held = self._held[artifact.hash] = self._since[artifact.hash] = _HeldHere(artifact, tuple(keys))
        policy = self._identity.policy()
        for own in self._owns():
            if own.namespace.id == artifact.manifest.namespace and policy.may_serve(artifact.manifest):
                own.pages.hold(*_entry(own.namespace, held))
        self._bound_since()
        self._changed.tell()

    def drop(self, artifact: ArtifactHash) -> None:
        """An artifact is held no longer."""
        self._since[artifact] = None
        self._bound_since()
        if self._held.pop(artifact, None) is not None:
            for own in self._owns():
                own.pages.drop(own.namespace.keyed_artifact(artifact))
            self._changed.tell()

    def _bound_since(self) -> None:
        while len(self._since) > MAX_CHANGES:
            del self._since[next(iter(self._since))]

    def renew_all(self) -> None:
        """Whom this node believes, or its namespaces, have changed: tell only what it would serve."""
        policy = self._policy = self._identity.policy()
        for own in self._owns():
            own.pages.replace(
                _entry(own.namespace, held)
                for held in self._held.values()
                if held.artifact.manifest.namespace == own.namespace.id and policy.may_serve(held.artifact.manifest)
            )
        self._changed.tell()

    def _owns(self) -> list[_Own]:
        """The pages of each of this node's namespaces; those of namespaces it has left are told no more."""
        namespaces = {bytes(namespace.id): namespace for namespace in self._identity.namespaces()}
        self._own = {key: own for key, own in self._own.items() if key in namespaces}
        for key, namespace in namespaces.items():
            own = self._own.setdefault(key, _Own(namespace, OwnPages(self._limits)))
            own.namespace = namespace
        return list(self._own.values())

    def envelopes(self, namespace: Namespace) -> list[bytes]:
        """Every page that counts in a namespace, page 0 after the others."""
        own, now_s = self._own.get(namespace.id), self._now()
        signed = sorted(own.signed.items(), reverse=True) if own is not None else []
        return [envelope for _, (envelope, expires_s) in signed if expires_s > now_s]

    def shown(self, record: ProviderRecord) -> None:
        """Somebody has a page of this node's from before it was started."""
        own = self._own.get(record.namespace)
        if own is not None:
            own.pages.shown(record.page, record.sequence)
            self._changed.tell()

    def look(self, addresses: tuple[str, ...]) -> None:
        """See whether anything has changed that nobody said.

        Args:
            addresses: where this node is reached now.
        """
        if addresses != self._addresses:
            self._addresses = addresses
            for own in self._owns():
                own.pages.moved()
            self._changed.tell()
        if self._identity.policy() != self._policy:
            self.renew_all()
        now_s = self._now()
        for own in self._owns():
            if self._statements.own_revocations(own.namespace) != own.revocations:
                # Whoever is not told of a revocation learns from page 0 that there is one.
                own.pages.moved()
                self._changed.tell()
            own.signed = {number: each for number, each in own.signed.items() if each[1] > now_s}

    async def run(self) -> None:
        """Sign and tell what is due, until cancelled."""
        while True:
            with trio.move_on_at(min((own.pages.next_due() for own in self._owns()), default=float("inf"))) as scope:
                await self._changed.wait()
            if not scope.cancelled_caught:
                continue
            await trio.lowlevel.checkpoint()
            for own in self._owns():
                await self._tell(own)

    async def _tell(self, own: _Own) -> None:
        """Sign what is due in a namespace and tell the members."""
        now_s = self._now()
        own.revocations = self._statements.own_revocations(own.namespace)
        who = Telling(own.namespace.id, self._peer, self._addresses, own.revocations)
        key = self._identity.signing_key()
        envelopes: list[bytes] = []
        for number in own.pages.due(trio.current_time()):
            record = own.pages.record(number, who, trio.current_time(), now_s, self._random(1)[0] / 255)
            envelope = sign_statement(record, key).envelope
            own.signed[number] = (envelope, record.expires)
            envelopes.append(envelope)
            self.n_signed += 1
            await trio.lowlevel.checkpoint()
        self._statements.spread(own.namespace, envelopes)
        await self._pace(sum(map(len, envelopes)))

    async def _pace(self, n_bytes: int) -> None:
        """Wait until members can take so much more."""
        now = trio.current_time()
        refilled_bytes = TELL_BYTES_S * min(now - self._told_at, TELL_BURST_BYTES / TELL_BYTES_S)
        self._level_bytes = min(float(TELL_BURST_BYTES), self._level_bytes + refilled_bytes) - n_bytes
        self._told_at = now
        if self._level_bytes < 0:
            await trio.sleep(-self._level_bytes / TELL_BYTES_S)


def _entry(namespace: Namespace, held: _HeldHere) -> tuple[LookupKey, HeldEntry]:
    artifact = held.artifact
    name = namespace.keyed_artifact(artifact.hash)
    return name, held_entry(namespace, name, artifact.manifest, held.keys)
