"""What a channel for chunks reports: the same whichever way the bytes came."""

from dataclasses import dataclass

from kvnet.format.hashes import BytesLike, ChunkHash
from kvnet.protocol.messages.chunks import ChunkHeader, ChunkRefused


@dataclass(frozen=True, slots=True)
class BytesArrived:
    """Some bytes of a chunk that is not whole yet: whoever waits can tell a slow peer from a dead one."""

    n_bytes: int


@dataclass(frozen=True, slots=True)
class ChunkArrived:
    """All bytes of a chunk, as long as was asked for. Nobody has compared its hash yet.

    Attributes:
        index: in the chunk plan.
        data: valid until the channel is told that it is done with; whoever keeps them keeps a copy.
        digest: BLAKE3 of `data`, from whoever read them off the wire; ``None`` when nobody hashed them on the way.
    """

    index: int
    data: BytesLike
    digest: ChunkHash | None = None


ChunkEvent = ChunkHeader | BytesArrived | ChunkArrived | ChunkRefused
"""A `ChunkHeader` comes before the bytes where a channel reports it, and alone when it announces what nobody asked."""
