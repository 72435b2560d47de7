"""Serve: answer peers' requests from the store, as far as the serve machine allows."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import trio

from kvnet.errors import KvnetError, NotInStoreError
from kvnet.exchange.frames import receive_frame
from kvnet.exchange.identity import Identity
from kvnet.exchange.lane import Lane
from kvnet.exchange.session import PeerSession
from kvnet.format.hashes import ArtifactHash, PrefixKey
from kvnet.network.bulk.sending import pieces_of
from kvnet.network.interface import ByteStream
from kvnet.protocol.framing import encode_frame
from kvnet.protocol.held import HeldArtifact, HeldTable
from kvnet.protocol.ids import PeerId
from kvnet.protocol.messages.base import encode_message
from kvnet.protocol.messages.bulk import DialBulk, OpenBulk
from kvnet.protocol.messages.chunks import ChunkHeader, ChunkRefused, GetChunks, decode_chunk_request
from kvnet.protocol.messages.control import ArtifactRequest, BulkRequest, Reply
from kvnet.protocol.messages.refusals import RefusalReason, Refused
from kvnet.protocol.pace import purpose_of
from kvnet.protocol.serve import RefuseChunks, SendChunks, SendReply, ServeLimits, ServeMachine
from kvnet.store.interface import ArtifactRecord, Store
from kvnet.trust.namespace import Namespace

CHUNK_STREAM_REST_S = 60.0
"""Seconds a chunk stream may rest between two requests before it is closed."""

MAX_CHANGES = 1024
"""Artifacts that may come or go while the table of held ones is made anew."""

WRITE_SIZE_BYTES = 256 * 1024
"""Bytes of one write to a stream; larger ones gain nothing over the control transport."""

OthersOf = Callable[[PeerId, Namespace, Sequence[bytes]], tuple[bytes, ...]]
"""Records of others than a peer that hold one of these keys, see `kvnet.protocol.serve.RecordsOf`."""

FindSession = Callable[[PeerId, bytes], PeerSession | None]
"""The open control session of a peer that has this session id."""


class ChunkServer:
    """Answers lookups, manifests, chunk lists and chunks.

    Args:
        store: what is held.
        lane: where blocking store work runs.
        identity: namespaces and policy; read afresh at every request.
        find_session: who may name which session on a chunk stream.
        limits: what one peer may ask for.
    """

    def __init__(
        self,
        store: Store,
        lane: Lane,
        identity: Identity,
        find_session: FindSession,
        limits: ServeLimits | None = None,
    ) -> None:
        self._store = store
        self._lane = lane
        self._identity = identity
        self._find_session = find_session
        self._machine = ServeMachine(limits)
        self._table = HeldTable(identity.namespaces())
        self._changes: deque[Callable[[HeldTable], object]] = deque(maxlen=MAX_CHANGES)
        self._bulk: Callable[[PeerSession, BulkRequest], Reply] | None = None
        self._others: OthersOf | None = None
        self._streams: dict[trio.CancelScope, PeerId] = {}
        self.revoked: frozenset[ArtifactHash] = frozenset()
        """Artifacts of which not one chunk more goes out, not even of a request that was granted."""
        self.counters: Counter[str] = Counter()

    async def load(self) -> None:
        """Offer everything that is in the store, for the namespaces as they are now."""
        namespaces = self._identity.namespaces()
        table = HeldTable(namespaces)
        self._changes.clear()
        for namespace in namespaces:
            rows = await self._lane.run(self._store.prefix_rows, namespace.id)
            for artifact, keys in _by_artifact(rows).items():
                record = await self._lane.run(self._store.get, artifact)
                if record is not None and self._identity.policy().may_serve(record.manifest):
                    table.add(record, keys)
        # What came or went while the store was read counts after what was read.
        for change in self._changes:
            change(table)
        self._changes.clear()
        self._table = table

    def offer(self, record: ArtifactRecord, keys: Iterable[PrefixKey]) -> None:
        """Offer one more artifact."""
        kept = list(keys)
        self._changes.append(lambda table: table.add(record, kept))
        self._table.add(record, kept)

    def withdraw(self, artifact: ArtifactHash) -> None:
        """Offer an artifact no longer."""
        self._changes.append(lambda table: table.remove(artifact))
        self._table.remove(artifact)

    @property
    def serving(self) -> bool:
        """Whether anything is answered but refusals."""
        return self._machine.serving

    @serving.setter
    def serving(self, serving: bool) -> None:
        self._machine.serving = serving

    @property
    def uploading(self) -> bool:
        """Whether chunk requests are being answered."""
        return self._machine.uploading

    def __len__(self) -> int:
        return len(self._table)

    def session_ended(self) -> None:
        """A session with a peer has ended."""
        self._machine.session_ended(trio.current_time())

    def answer(self, session: PeerSession, request: ArtifactRequest | BulkRequest) -> Reply:
        """The reply to a request for artifacts or for a bulk connection."""
        self.counters[f"requests_{type(request).__name__}"] += 1
        if isinstance(request, OpenBulk | DialBulk):
            now = trio.current_time()
            namespaces = {slot: each for slot, each in session.opened.namespaces.items() if not each.former}
            refused = self._machine.refuse_bulk(session.peer, namespaces, request, now)
            not_serving = Refused(request_id=request.request_id, reason=RefusalReason.NOT_SERVING)
            return refused or (not_serving if self._bulk is None else self._bulk(session, request))
        decision: SendReply = self._machine.decide(
            session.peer,
            session.opened.namespaces,
            request,
            self._table,
            self._identity.policy(),
            trio.current_time(),
            holding=self._holding,
            others=partial(self._others, session.peer) if self._others is not None else None,
        )
        return decision.reply

    def _holding(self, artifact: HeldArtifact) -> list[int]:
        """The chunks of an artifact that are in the store at this moment."""
        return [
            index
            for index, entry in enumerate(artifact.entries)
            if not entry.absent and self._store.has_chunk(entry.hash)
        ]

    def name_others_with(self, others: OthersOf) -> None:
        """Say who knows which other peers hold more than this node."""
        self._others = others

    def answer_bulk_with(self, answer: Callable[[PeerSession, BulkRequest], Reply]) -> None:
        """Say who answers requests for bulk connections, once a peer may have one."""
        self._bulk = answer

    def begin_chunks(self, peer: PeerId, request: GetChunks) -> SendChunks | RefuseChunks:
        """What a peer gets for a chunk request; after a `SendChunks` call `end_chunks`."""
        session = self._find_session(peer, request.session)
        slots: Mapping[int, Namespace] | None = session.opened.namespaces if session is not None else None
        policy = self._identity.policy()
        plan = self._machine.decide_chunks(peer, slots, request, self._table, policy, trio.current_time())
        if isinstance(plan, RefuseChunks):
            self.counters["chunk_requests_refused"] += 1
        return plan

    def end_chunks(self, peer: PeerId, counted: Mapping[str, int]) -> None:
        """A `SendChunks` plan is done or given up; these are what it came to."""
        self._machine.finished_chunks(peer)
        self.counters.update(counted)

    @property
    def limits_rate(self) -> bool:
        """Whether `delay_s` ever says anything but 0."""
        return self._machine.limits_rate

    def delay_s(self, peer: PeerId, n_bytes: int, purpose: str) -> float:
        """Seconds over which this many bytes of a chunk are sent to a peer; they count as sent."""
        return self._machine.delay_s(peer, n_bytes, trio.current_time(), purpose_of(purpose))

    async def serve_chunks(self, peer: PeerId, stream: ByteStream) -> None:
        """Answer the chunk requests on one stream until the peer ends it, or may have nothing any more."""
        stream.idle_timeout_s = None
        with trio.CancelScope() as scope:
            self._streams[scope] = peer
            try:
                await self._serve_requests(peer, stream)
            finally:
                del self._streams[scope]

    def end_streams(self, peer: PeerId) -> None:
        """Send a peer nothing more on the streams that it has, in the middle of a request too."""
        for scope in [scope for scope, other in self._streams.items() if other == peer]:
            scope.cancel()

    async def _serve_requests(self, peer: PeerId, stream: ByteStream) -> None:
        while True:
            frame = None
            with trio.move_on_after(CHUNK_STREAM_REST_S):
                frame = await receive_frame(stream)
            if frame is None:
                return
            await self._serve_request(peer, stream, decode_chunk_request(frame))

    async def _serve_request(self, peer: PeerId, stream: ByteStream, request: GetChunks) -> None:
        plan = self.begin_chunks(peer, request)
        if isinstance(plan, RefuseChunks):
            for index in plan.indices:
                await _refuse(stream, index, plan.reason)
            return
        try:
            await self._send_chunks(peer, stream, request, plan)
        finally:
            self._machine.finished_chunks(peer)

    async def _send_chunks(self, peer: PeerId, stream: ByteStream, request: GetChunks, plan: SendChunks) -> None:
        """In the order asked for; each chunk is read and hashed again right before it goes out."""
        not_held = set(plan.not_held)
        for index in request.indices:
            withdrawn = index in not_held or plan.artifact.hash in self.revoked
            data = None if withdrawn else await self._read(plan, index)
            if data is None:
                await _refuse(stream, index, RefusalReason.NOT_HELD)
                continue
            await _send_chunk(stream, index, data, self.delay_s(peer, len(data), request.purpose))
            self.counters["chunks_served"] += 1
            self.counters["bytes_served"] += len(data)

    async def _read(self, plan: SendChunks, index: int) -> bytes | None:
        """Stored bytes that match their hash, or ``None``: damaged bytes are never sent on."""
        try:
            return await self._lane.run(self._store.read_chunk, plan.artifact.entries[index].hash)
        except NotInStoreError:
            return None
        except KvnetError:
            self.counters["chunks_damaged"] += 1
            return None


async def _refuse(stream: ByteStream, index: int, reason: RefusalReason) -> None:
    await stream.send_all(encode_frame(encode_message(ChunkRefused(index=index, reason=reason))))


async def _send_chunk(stream: ByteStream, index: int, data: bytes, spread_s: float) -> None:
    """The header travels with the first bytes: one write less for a small chunk."""
    header = encode_frame(encode_message(ChunkHeader(index=index, length_bytes=len(data))))
    view = memoryview(data)
    n_pieces = max(-(-len(view) // WRITE_SIZE_BYTES), pieces_of(len(view), spread_s))
    size = -(-len(view) // n_pieces)
    for start in range(0, len(view), size):
        piece = view[start : start + size]
        await stream.send_all(piece if start else header + bytes(piece))
        if spread_s:
            await trio.sleep(spread_s / n_pieces)


def _by_artifact(rows: Iterable[tuple[PrefixKey, ArtifactHash, int]]) -> dict[ArtifactHash, list[PrefixKey]]:
    """Each artifact's keys, the first block first."""
    grouped: dict[ArtifactHash, list[tuple[int, PrefixKey]]] = {}
    for key, artifact, n_blocks in rows:
        grouped.setdefault(artifact, []).append((n_blocks, key))
    return {artifact: [key for _, key in sorted(pairs)] for artifact, pairs in grouped.items()}
