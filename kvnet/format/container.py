"""The one-file container ``.kva``, which is also the store's pack format.

::

    header    16   magic, u32 version, u32 chunk count
    envelope  8192 u32 length, envelope, zeros
    pages          the chunk list, 36 bytes per chunk
    chunks         anywhere behind, back to back in plan order in an exported file
    footer         16 bytes per chunk that is here: u32 index, u64 offset, u32 length; ascending by index
    trailer   48   u64 footer length, 32-byte hash of footer and length, magic

All numbers are little-endian. Everything before the chunks has a place that follows from the chunk count alone, so a
pack is filled first and its envelope written last. A pack may lack chunks that are held elsewhere; an exported file
lacks only those its publisher left out, and can be verified while it streams in.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvnet.errors import IntegrityError, MalformedError, UnsupportedVersionError
from kvnet.format.chunks import ChunkEntry, decode_page, page_count, page_size_bytes
from kvnet.format.codecs import Codec, max_stored_bytes
from kvnet.format.hashes import FOOTER_CONTEXT, BytesLike, blake3_hash, derive_key
from kvnet.format.limits import (
    ENTRY_SIZE_BYTES,
    ENVELOPE_AREA_BYTES,
    MAX_CHUNK_BYTES,
    MAX_CHUNKS,
    MAX_ENVELOPE_BYTES,
)

CONTAINER_VERSION: Final = 1
"""The only one this build writes and reads."""
MAGIC: Final = b"\x89kva\r\n\x1a\n"
"""Begins with a byte that is no text and holds both line endings: a file mangled as text is noticed at once."""
TRAILER_MAGIC: Final = b"kva-end\n"
"""The last 8 bytes: a container that was cut short has none."""
_HEADER: Final = struct.Struct("<8sII")
_U32: Final = struct.Struct("<I")
_PLACEMENT: Final = struct.Struct("<IQI")
_TRAILER: Final = struct.Struct("<Q32s8s")

HEADER_SIZE_BYTES: Final = _HEADER.size
"""Magic, version and number of chunks."""
PLACEMENT_SIZE_BYTES: Final = _PLACEMENT.size
"""Of one chunk in the footer: index, offset and size."""
TRAILER_SIZE_BYTES: Final = _TRAILER.size
"""Length and hash of the footer, and the magic."""
MAX_STORED_CHUNK_BYTES: Final = max(max_stored_bytes(codec, MAX_CHUNK_BYTES) for codec in Codec)
"""No chunk of any codec is stored in more."""


class Readable(Protocol):
    """A binary file or pipe, read from front to back."""

    def read(self, size: int, /) -> bytes:
        """At most ``size`` bytes; none at the end."""
        ...


@dataclass(frozen=True, slots=True)
class ContainerLayout:
    """Where things lie in a container of ``n_chunks`` chunks, absent ones included.

    Raises:
        MalformedError: no chunk, or more than the limit.
    """

    n_chunks: int

    def __post_init__(self) -> None:
        if not 1 <= self.n_chunks <= MAX_CHUNKS:
            raise MalformedError(f"container: expected 1 to {MAX_CHUNKS} chunks, found {self.n_chunks}")

    @property
    def envelope_offset(self) -> int:
        """Start of the envelope's area."""
        return HEADER_SIZE_BYTES

    @property
    def envelope_size(self) -> int:
        """Bytes of the envelope's area."""
        return ENVELOPE_AREA_BYTES

    @property
    def pages_offset(self) -> int:
        """Start of the chunk list."""
        return self.envelope_offset + self.envelope_size

    @property
    def pages_size(self) -> int:
        """Bytes of the chunk list."""
        return self.n_chunks * ENTRY_SIZE_BYTES

    @property
    def data_offset(self) -> int:
        """Start of the chunks."""
        return self.pages_offset + self.pages_size


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a chunk lies in its container."""

    index: int
    offset: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class ContainerHeader:
    """What comes before the chunks.

    Attributes:
        layout: where things lie.
        envelope: the signed manifest; not judged here.
        pages: the chunk list as it stands; compare its root with the manifest's.
        entries: what the pages say.
    """

    layout: ContainerLayout
    envelope: bytes
    pages: tuple[bytes, ...]
    entries: tuple[ChunkEntry, ...]


def encode_header(n_chunks: int) -> bytes:
    """The first 16 bytes of a container."""
    return _HEADER.pack(MAGIC, CONTAINER_VERSION, ContainerLayout(n_chunks).n_chunks)


def parse_header(data: BytesLike) -> ContainerLayout:
    """The layout that the first 16 bytes announce.

    Raises:
        MalformedError: not a container, or more chunks than the limit.
        UnsupportedVersionError: a container of another version.
    """
    if len(data) != HEADER_SIZE_BYTES:
        raise MalformedError(f"container: expected a header of {HEADER_SIZE_BYTES} bytes, found {len(data)}")
    magic, version, n_chunks = _HEADER.unpack(data)
    if magic != MAGIC:
        raise MalformedError("expected a .kva container, found something else", hint="kvnet export writes one.")
    if version != CONTAINER_VERSION:
        raise UnsupportedVersionError(
            f"container: expected version {CONTAINER_VERSION}, found {version}", hint="A newer kvnet may read it."
        )
    return ContainerLayout(n_chunks)


def encode_envelope_area(envelope: bytes) -> bytes:
    """The envelope in its area of ``ENVELOPE_AREA_BYTES`` bytes.

    Raises:
        MalformedError: an empty envelope, or one that does not fit.
    """
    if not 0 < len(envelope) <= MAX_ENVELOPE_BYTES:
        raise MalformedError(f"envelope: expected 1 to {MAX_ENVELOPE_BYTES} bytes, found {len(envelope)}")
    return (_U32.pack(len(envelope)) + envelope).ljust(ENVELOPE_AREA_BYTES, b"\0")


def parse_envelope_area(data: BytesLike) -> bytes:
    """The envelope in its area.

    Raises:
        MalformedError: another size, a length that cannot be, or padding that is not zeros.
    """
    if len(data) != ENVELOPE_AREA_BYTES:
        raise MalformedError(f"envelope: expected an area of {ENVELOPE_AREA_BYTES} bytes, found {len(data)}")
    (length,) = _U32.unpack_from(data)
    if not 0 < length <= MAX_ENVELOPE_BYTES:
        raise MalformedError(
            f"envelope: expected 1 to {MAX_ENVELOPE_BYTES} bytes, found {length}",
            hint="A length of 0 is a pack whose writing never ended.",
        )
    end = _U32.size + length
    # Nothing may hide behind the envelope: no signature covers it.
    if any(data[end:]):
        raise MalformedError("envelope: expected zeros behind it")
    return bytes(data[_U32.size : end])


def encode_footer(placements: Iterable[Placement]) -> bytes:
    """Footer and trailer for the chunks that are in the container, in any order."""
    ordered = sorted(placements, key=lambda placement: placement.index)
    footer = b"".join(_PLACEMENT.pack(place.index, place.offset, place.length_bytes) for place in ordered)
    return footer + _TRAILER.pack(len(footer), _footer_hash(footer), TRAILER_MAGIC)


def parse_trailer(data: BytesLike, container_size_bytes: int, layout: ContainerLayout) -> int:
    """Where the footer starts, from the last ``TRAILER_SIZE_BYTES`` bytes of a container.

    Raises:
        MalformedError: no trailer, or a footer that cannot be of that length.
    """
    if len(data) != TRAILER_SIZE_BYTES:
        raise MalformedError(f"container: expected a trailer of {TRAILER_SIZE_BYTES} bytes, found {len(data)}")
    length, _, magic = _TRAILER.unpack(data)
    if magic != TRAILER_MAGIC:
        raise MalformedError(
            "container: expected its end, found something else; it is cut short or still being written"
        )
    start: int = container_size_bytes - TRAILER_SIZE_BYTES - length
    most = layout.n_chunks * PLACEMENT_SIZE_BYTES
    if length > most or length % PLACEMENT_SIZE_BYTES or start < layout.data_offset:
        raise MalformedError(f"container: expected a footer of at most {most} bytes, found {length}")
    return start


def parse_footer(data: BytesLike, footer_offset: int, layout: ContainerLayout) -> tuple[Placement, ...]:
    """The chunks in a container, ascending by index.

    Args:
        data: footer and trailer, from ``footer_offset`` to the end.
        footer_offset: where they start.
        layout: of the container.

    Raises:
        IntegrityError: the footer does not match its hash.
        MalformedError: indices out of order, or chunks that overlap or lie outside the chunks' area.
    """
    parse_trailer(data[-TRAILER_SIZE_BYTES:], footer_offset + len(data), layout)
    length, digest, _ = _TRAILER.unpack_from(data, len(data) - TRAILER_SIZE_BYTES)
    if length != len(data) - TRAILER_SIZE_BYTES:
        raise MalformedError(f"container: expected a footer of {length} bytes, found {len(data) - TRAILER_SIZE_BYTES}")
    footer = bytes(data[:length])
    if _footer_hash(footer) != digest:
        raise IntegrityError("the container's footer does not match its hash")
    placements = tuple(Placement(*fields) for fields in _PLACEMENT.iter_unpack(footer))
    indices = [placement.index for placement in placements]
    if indices != sorted(set(indices)) or (indices and indices[-1] >= layout.n_chunks):
        raise MalformedError(f"container: expected ascending chunk indices below {layout.n_chunks}")
    reached = layout.data_offset
    for place in sorted(placements, key=lambda placement: placement.offset):
        if place.offset < reached or not 0 < place.length_bytes <= MAX_STORED_CHUNK_BYTES:
            raise MalformedError(f"container: chunk {place.index} is empty, too large or overlaps another")
        reached = place.offset + place.length_bytes
    if reached > footer_offset:
        raise MalformedError("container: expected chunks to end before the footer")
    return placements


def _footer_hash(footer: bytes) -> bytes:
    return derive_key(FOOTER_CONTEXT, footer + struct.pack("<Q", len(footer)))


def write_container(
    write: Callable[[bytes], object], envelope: bytes, pages: Sequence[bytes], chunks: Iterable[bytes]
) -> int:
    """Writes a container front to back, as ``kvnet export`` does.

    Args:
        write: takes the next bytes.
        envelope: the signed manifest.
        pages: its chunk list.
        chunks: stored bytes of every chunk that is not absent, in plan order.

    Returns:
        Bytes written.

    Raises:
        MalformedError: chunks that are not those of the chunk list in number or size.
    """
    entries = [entry for page in pages for entry in decode_page(page)]
    layout = ContainerLayout(len(entries))
    for part in (encode_header(layout.n_chunks), encode_envelope_area(envelope), *pages):
        write(part)
    present = [(index, entry) for index, entry in enumerate(entries) if not entry.absent]
    offset = layout.data_offset
    placements: list[Placement] = []
    for data in chunks:
        index, entry = present[len(placements)] if len(placements) < len(present) else (len(entries), None)
        if entry is None or entry.length_bytes != len(data):
            raise MalformedError(f"container: chunk {index} is not the {len(data)} bytes given")
        write(data)
        placements.append(Placement(index, offset, len(data)))
        offset += len(data)
    if len(placements) != len(present):
        raise MalformedError(f"container: expected {len(present)} chunks, found {len(placements)}")
    footer = encode_footer(placements)
    write(footer)
    return offset + len(footer)


class ContainerReader:
    """Reads an exported container front to back and verifies every byte; made by :func:`read_container`.

    ``header`` is read at once. Compare the root of its pages with that of the manifest in its envelope, then iterate:
    each step gives the index and the verified stored bytes of one chunk. The iteration ends only after the footer has
    been checked too.

    Raises:
        IntegrityError: in the iteration: a chunk or the footer does not match.
        MalformedError: in the iteration: the file is cut short, or goes on behind its end.
    """

    def __init__(self, file: Readable, header: ContainerHeader) -> None:
        self._file = file
        self.header = header

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        layout = self.header.layout
        offset = layout.data_offset
        placements: list[Placement] = []
        for index, entry in enumerate(self.header.entries):
            if entry.absent:
                continue
            data = _read_exactly(self._file, entry.length_bytes, f"chunk {index}")
            if blake3_hash(data) != entry.hash:
                raise IntegrityError(f"chunk {index} of the container does not match its hash")
            placements.append(Placement(index, offset, len(data)))
            offset += len(data)
            yield index, data
        expected = encode_footer(placements)
        if _read_exactly(self._file, len(expected), "footer") != expected:
            raise IntegrityError("the container's footer does not describe its chunks")
        if self._file.read(1):
            raise MalformedError("container: expected its end, found more bytes")


def read_container(file: Readable) -> ContainerReader:
    """Starts reading an exported container: header, envelope and chunk list.

    Raises:
        MalformedError: not a container, cut short, or sizes beyond the limits.
        UnsupportedVersionError: a container of another version.
    """
    layout = parse_header(_read_exactly(file, HEADER_SIZE_BYTES, "header"))
    envelope = parse_envelope_area(_read_exactly(file, ENVELOPE_AREA_BYTES, "envelope"))
    pages = tuple(
        _read_exactly(file, page_size_bytes(layout.n_chunks, page), "chunk list")
        for page in range(page_count(layout.n_chunks))
    )
    entries = tuple(entry for page in pages for entry in decode_page(page))
    if any(entry.length_bytes > MAX_STORED_CHUNK_BYTES for entry in entries):
        raise MalformedError(f"container: expected chunks of at most {MAX_STORED_CHUNK_BYTES} bytes")
    return ContainerReader(file, ContainerHeader(layout, envelope, pages, entries))


def _read_exactly(file: Readable, size: int, what: str) -> bytes:
    parts: list[bytes] = []
    left = size
    while left:
        part = file.read(left)
        if not part:
            raise MalformedError(
                f"container: expected {size} bytes of {what}, found {size - left}", hint="The file is cut short."
            )
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
