"""Serve: what a peer gets for a request, decided from what it has proved, what is held, and what it has had already.

A request is authorised by the namespace of the artifact it names, which both sides have proved in this session, and
never by a hash alone. A peer that has not proved the namespace gets the same answers, byte for byte, as one that asks
for something nobody has: an empty lookup reply, or ``unknown``.

The machine decides; its driver reads the store and sends.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvnet.format.hashes import LookupKey
from kvnet.protocol.have import encode_runs
from kvnet.protocol.held import HeldArtifact, HeldTable
from kvnet.protocol.ids import PeerId
from kvnet.protocol.messages.artifacts import (
    MAX_MATCHES,
    ChunkListReply,
    GetChunkList,
    GetHave,
    GetManifest,
    Have,
    Lookup,
    LookupReply,
    ManifestReply,
    Match,
)
from kvnet.protocol.messages.chunks import GetChunks
from kvnet.protocol.messages.control import ArtifactRequest, BulkRequest, Reply
from kvnet.protocol.messages.liveness import Ping, Pong
from kvnet.protocol.messages.refusals import RefusalReason, Refused
from kvnet.protocol.pace import Pace, Purpose, purpose_of
from kvnet.trust.namespace import Namespace
from kvnet.trust.policy import TrustPolicy


@dataclass(frozen=True, slots=True)
class ServeLimits:
    """What one peer may ask for.

    Attributes:
        chunk_requests_in_flight: chunk requests being answered.
        requests_per_s: control requests, on average.
        request_burst: control requests at once, before the average counts.
        bytes_per_s: chunk bytes, on average; 0 for no limit.
        burst_bytes: chunk bytes at once, before the average counts.
        total_bytes_per_s: chunk bytes of all peers together, shared by `kvnet.protocol.pace`; 0 for no limit.
        upload_slots: chunk requests of all peers being answered; some are kept for those that wait for an answer.
    """

    chunk_requests_in_flight: int = 8
    requests_per_s: float = 50.0
    request_burst: float = 200.0
    bytes_per_s: float = 0.0
    burst_bytes: float = 32 * 1024 * 1024
    total_bytes_per_s: float = 0.0
    upload_slots: int = 64


SLOT_SHARES: Mapping[Purpose, float] = {Purpose.INTERACTIVE: 1.0, Purpose.REPLICATION: 0.75, Purpose.SCRUB: 0.5}
"""Up to this share of all slots a request of that purpose is taken."""

RecordsOf = Callable[[Namespace, Sequence[bytes]], tuple[bytes, ...]]
"""Signed provider records of others in a namespace that hold one of these keys, the deepest first; at most
`MAX_RECORDS`."""

Holding = Callable[["HeldArtifact"], Iterable[int]]
"""The indices of an artifact's chunks that are held at this moment, ascending."""


@dataclass(frozen=True, slots=True)
class SendReply:
    """Answer a control request with this message."""

    reply: Reply


@dataclass(frozen=True, slots=True)
class SendChunks:
    """Answer a chunk request: these chunks of this artifact, in this order.

    Attributes:
        artifact: the record.
        indices: those to read and send; the driver refuses one as ``not_held`` when the store has it no longer.
        not_held: those to refuse at once as ``not_held``: there is no such chunk.
    """

    artifact: HeldArtifact
    indices: tuple[int, ...]
    not_held: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RefuseChunks:
    """Answer a chunk request with a refusal of every chunk it names."""

    indices: tuple[int, ...]
    reason: RefusalReason


@dataclass(slots=True)
class _Bucket:
    """A token bucket that may be overdrawn by one request."""

    level: float
    updated: float

    def refill(self, rate: float, burst: float, now: float) -> None:
        self.level = min(burst, self.level + rate * max(0.0, now - self.updated))
        self.updated = now


@dataclass(slots=True)
class _Usage:
    requests: _Bucket
    bytes: _Bucket
    chunks_in_flight: int = 0


class ServeMachine:
    """Decides about every request of every peer.

    Args:
        limits: what one peer may ask for.
        serving: False refuses everything as ``not_serving`` (on battery, on a metered link).
    """

    def __init__(self, limits: ServeLimits | None = None, *, serving: bool = True) -> None:
        self._limits = limits or ServeLimits()
        self._usage: dict[PeerId, _Usage] = {}
        self._pace = Pace(self._limits.total_bytes_per_s)
        self.serving = serving

    def decide(
        self,
        peer: PeerId,
        slots: Mapping[int, Namespace],
        request: ArtifactRequest | Ping,
        table: HeldTable,
        policy: TrustPolicy,
        now: float,
        *,
        holding: Holding | None = None,
        others: RecordsOf | None = None,
    ) -> SendReply:
        """The answer to a control request; how many may be open at once is the session's to limit.

        Args:
            peer: who asks.
            slots: of the session it asks in: slot -> namespace.
            request: what it asks.
            table: what is held.
            policy: what is revoked is not served.
            now: the time.
            holding: what is held of an artifact; all of it without.
            others: who else holds a prefix; nobody is named without.
        """
        if isinstance(request, Ping):
            return SendReply(Pong(request_id=request.request_id))
        reason = self._admit(peer, now)
        if reason is not None:
            return SendReply(Refused(request_id=request.request_id, reason=reason))
        namespace = slots.get(request.slot)
        if isinstance(request, Lookup):
            return SendReply(_lookup_reply(request, namespace, table, policy, others))
        artifact = _find(table, namespace, request.artifact, policy)
        if artifact is None:
            return SendReply(Refused(request_id=request.request_id, reason=RefusalReason.UNKNOWN))
        if isinstance(request, GetManifest):
            return SendReply(ManifestReply(request_id=request.request_id, envelope=artifact.envelope))
        if isinstance(request, GetHave):
            held = _existing(artifact) if holding is None else holding(artifact)
            return SendReply(Have(request_id=request.request_id, runs=encode_runs(held)))
        return SendReply(_page_reply(request, artifact))

    def refuse_bulk(
        self, peer: PeerId, slots: Mapping[int, Namespace], request: BulkRequest, now: float
    ) -> Refused | None:
        """Whether a peer may have a bulk connection; None: yes.

        Args:
            peer: who asks.
            slots: of the session it asks in. Who shares no namespace gets no chunks, and no thread for them.
            request: what it asks.
            now: the time.
        """
        reason = self._admit(peer, now) or (None if slots else RefusalReason.UNKNOWN)
        return None if reason is None else Refused(request_id=request.request_id, reason=reason)

    def decide_chunks(
        self,
        peer: PeerId,
        slots: Mapping[int, Namespace] | None,
        request: GetChunks,
        table: HeldTable,
        policy: TrustPolicy,
        now: float,
    ) -> SendChunks | RefuseChunks:
        """The answer to a chunk request; after `SendChunks` call `finished_chunks` when it is sent or given up.

        Args:
            peer: who asks.
            slots: of the session that the request names; None when this peer has no such session.
            request: what it asks.
            table: what is held.
            policy: what is revoked is not served.
            now: the time.
        """
        if not self.serving:
            return RefuseChunks(request.indices, RefusalReason.NOT_SERVING)
        usage = self._usage_of(peer, now)
        if usage.chunks_in_flight >= self._slots_of(usage, purpose_of(request.purpose)):
            return RefuseChunks(request.indices, RefusalReason.BUSY)
        artifact = _find(table, (slots or {}).get(request.slot), request.artifact, policy)
        if artifact is None:
            return RefuseChunks(request.indices, RefusalReason.UNKNOWN)
        usage.chunks_in_flight += 1
        held = tuple(index for index in request.indices if _exists(artifact, index))
        return SendChunks(artifact, held, tuple(index for index in request.indices if not _exists(artifact, index)))

    @property
    def uploading(self) -> bool:
        """Whether chunk requests are being answered."""
        return any(each.chunks_in_flight for each in self._usage.values())

    def finished_chunks(self, peer: PeerId) -> None:
        """A `SendChunks` plan is done or given up."""
        self._usage[peer].chunks_in_flight -= 1

    def _slots_of(self, usage: _Usage, purpose: Purpose) -> int:
        """How many requests of a peer may be answered at once: the fewer the more peers want slots."""
        limits = self._limits
        busy = [each.chunks_in_flight for each in self._usage.values() if each.chunks_in_flight]
        if sum(busy) >= SLOT_SHARES[purpose] * limits.upload_slots:
            return 0
        n_peers = len(busy) + (usage.chunks_in_flight == 0)
        return min(limits.chunk_requests_in_flight, max(1, limits.upload_slots // n_peers))

    @property
    def limits_rate(self) -> bool:
        """Whether chunk bytes are limited at all."""
        return self._limits.bytes_per_s > 0 or self._pace.limited

    def delay_s(self, peer: PeerId, n_bytes: int, now: float, purpose: Purpose = Purpose.INTERACTIVE) -> float:
        """Seconds over which this many chunk bytes are sent to a peer, beginning now; they count as sent.

        Args:
            peer: who gets them.
            n_bytes: length of the chunk.
            now: the time.
            purpose: what for.
        """
        shared_s = self._pace.spread_s(peer, purpose, n_bytes, now)
        rate = self._limits.bytes_per_s
        if rate <= 0:
            return shared_s
        bucket = self._usage_of(peer, now).bytes
        bucket.refill(rate, self._limits.burst_bytes, now)
        bucket.level -= n_bytes
        return max(shared_s, -bucket.level / rate)

    @property
    def n_remembered(self) -> int:
        """Peers whose usage is remembered."""
        return len(self._usage)

    def session_ended(self, now: float) -> None:
        """A peer has gone: forget everybody who owes nothing.

        Whoever has used up its budget, or has chunks on their way, is remembered: a new session is no new budget.
        """
        self._usage = {peer: usage for peer, usage in self._usage.items() if not self._owes_nothing(usage, now)}

    def _owes_nothing(self, usage: _Usage, now: float) -> bool:
        limits = self._limits
        usage.requests.refill(limits.requests_per_s, limits.request_burst, now)
        usage.bytes.refill(limits.bytes_per_s, limits.burst_bytes, now)
        full = usage.requests.level >= limits.request_burst and usage.bytes.level >= limits.burst_bytes
        return full and usage.chunks_in_flight == 0

    # --- inside ---

    def _usage_of(self, peer: PeerId, now: float) -> _Usage:
        limits = self._limits
        return self._usage.setdefault(
            peer, _Usage(_Bucket(limits.request_burst, now), _Bucket(limits.burst_bytes, now))
        )

    def _admit(self, peer: PeerId, now: float) -> RefusalReason | None:
        if not self.serving:
            return RefusalReason.NOT_SERVING
        bucket = self._usage_of(peer, now).requests
        bucket.refill(self._limits.requests_per_s, self._limits.request_burst, now)
        if bucket.level < 1:
            return RefusalReason.BUSY
        bucket.level -= 1
        return None


def _find(table: HeldTable, namespace: Namespace | None, name: bytes, policy: TrustPolicy) -> HeldArtifact | None:
    artifact = table.find(namespace, LookupKey(name))
    return artifact if artifact is not None and policy.may_serve(artifact.manifest) else None


def _exists(artifact: HeldArtifact, index: int) -> bool:
    return index < len(artifact.entries) and artifact.entries[index].length_bytes > 0


def _existing(artifact: HeldArtifact) -> list[int]:
    return [index for index in range(len(artifact.entries)) if _exists(artifact, index)]


def _lookup_reply(
    request: Lookup,
    namespace: Namespace | None,
    table: HeldTable,
    policy: TrustPolicy,
    others: RecordsOf | None,
) -> LookupReply:
    found = [match for match in table.match(namespace, request.keys) if policy.may_serve(match[2].manifest)]
    # The deepest first; at one depth the newest, as it is the likeliest to be looked for again.
    found.sort(key=lambda match: (match[0], -match[2].manifest.created, match[1]))
    matches = tuple(
        Match(
            key_index=key_index,
            artifact=name,
            n_tokens=artifact.manifest.n_tokens,
            codec=artifact.manifest.codec.value,
            size_bytes=artifact.manifest.total_size_bytes,
        )
        for key_index, name, artifact in found[:MAX_MATCHES]
    )
    records: tuple[bytes, ...] = ()
    if others is not None and namespace is not None and table.knows(namespace):
        # Only who holds more than this node does is worth another round.
        records = others(namespace, request.keys[: found[0][0]] if found else request.keys)
    return LookupReply(request_id=request.request_id, matches=matches, records=records)


def _page_reply(request: GetChunkList, artifact: HeldArtifact) -> Reply:
    if request.page >= len(artifact.pages):
        return Refused(request_id=request.request_id, reason=RefusalReason.NOT_HELD)
    return ChunkListReply(request_id=request.request_id, page=artifact.pages[request.page])
