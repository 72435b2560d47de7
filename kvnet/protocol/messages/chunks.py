"""What is said on chunk streams and bulk connections, around the raw bytes of chunks."""

from typing import Annotated

import msgspec

from kvnet.errors import ProtocolViolationError
from kvnet.format import limits
from kvnet.protocol.messages.base import BaseMessage, decode_body
from kvnet.protocol.messages.fields import Bytes32, ChunkIndex, Reason, Slot, Word

MAX_CHUNKS_PER_REQUEST = 256
"""A request of that many takes less than 2 KiB; whoever wants more asks again."""

SessionId = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class GetChunks(BaseMessage, frozen=True, tag="get_chunks"):
    """Send these chunks of an artifact, in this order, on this stream or bulk connection.

    Attributes:
        session: id of a control session of the same two peers; the slot is one of that session.
        slot: the namespace that authorises.
        artifact: the artifact hash under the lookup secret.
        indices: in the chunk plan, each once.
        purpose: what for, a `kvnet.protocol.pace.Purpose`: who waits comes first where bytes are limited.
    """

    session: SessionId
    slot: Slot
    artifact: Bytes32
    indices: Annotated[tuple[ChunkIndex, ...], msgspec.Meta(min_length=1, max_length=MAX_CHUNKS_PER_REQUEST)]
    purpose: Word = "interactive"


class CancelChunks(BaseMessage, frozen=True, tag="cancel_chunks"):
    """Send nothing more of what was asked for on this bulk connection: refuse it, as `cancelled`."""


class ChunkHeader(BaseMessage, frozen=True, tag="chunk"):
    """The chunk of this index follows: `length_bytes` raw bytes after this frame."""

    index: ChunkIndex
    length_bytes: Annotated[int, msgspec.Meta(ge=1, le=limits.MAX_CHUNK_BYTES)]


class ChunkRefused(BaseMessage, frozen=True, tag="chunk_refused"):
    """The chunk of this index does not follow."""

    index: ChunkIndex
    reason: Reason


BulkAsk = GetChunks | CancelChunks
ChunkAnswer = ChunkHeader | ChunkRefused


def decode_chunk_request(body: bytes) -> GetChunks:
    """The only message a peer that opened a chunk stream sends on it.

    Raises:
        ProtocolViolationError: anything else.
    """
    return _checked(decode_body(GetChunks, body, "chunk request"))


def decode_bulk_ask(body: bytes) -> BulkAsk:
    """What the asking peer sends on a bulk connection.

    Raises:
        ProtocolViolationError: anything else.
    """
    ask: BulkAsk = decode_body(BulkAsk, body, "chunk request")
    return ask if isinstance(ask, CancelChunks) else _checked(ask)


def decode_chunk_answer(body: bytes) -> ChunkAnswer:
    """What comes back on a chunk stream, before the raw bytes.

    Raises:
        ProtocolViolationError: anything else.
    """
    answer: ChunkAnswer = decode_body(ChunkAnswer, body, "chunk answer")
    return answer


def _checked(request: GetChunks) -> GetChunks:
    if len(set(request.indices)) != len(request.indices):
        raise ProtocolViolationError("expected each chunk index once in a chunk request, found one twice")
    return request
