import io
import random
import tracemalloc
from pathlib import Path

import pytest

from kvnet.errors import IntegrityError, KvnetError, MalformedError, UnsupportedVersionError
from kvnet.format import container
from kvnet.format.chunks import ABSENT, ChunkEntry, encode_pages, page_size_bytes
from kvnet.format.container import ContainerLayout, Placement
from kvnet.format.hashes import blake3_hash
from kvnet.format.limits import ENVELOPE_AREA_BYTES, MAX_CHUNKS, MAX_ENVELOPE_BYTES
from tests.unit.format.examples import ROUNDS

CHUNKS = [b"first chunk", b"second", b"x" * 1000]
ENTRIES = [ChunkEntry(len(data), blake3_hash(data)) for data in CHUNKS]
ENVELOPE = b"an envelope"
GOLDEN = Path(__file__).parents[2] / "vectors" / "container.kva"


def written(entries: list[ChunkEntry] | None = None, chunks: list[bytes] | None = None) -> bytes:
    out = io.BytesIO()
    size = container.write_container(
        out.write, ENVELOPE, encode_pages(entries or ENTRIES), CHUNKS if chunks is None else chunks
    )
    assert size == len(out.getvalue())
    return out.getvalue()


def read(data: bytes) -> list[tuple[int, bytes]]:
    return list(container.read_container(io.BytesIO(data)))


class Dribble(io.RawIOBase):
    """A pipe that gives one byte at a time."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def read(self, size: int = -1, /) -> bytes:
        return self._data.read(min(size, 1))


def test_a_container_is_read_front_to_back_and_every_byte_is_verified() -> None:
    reader = container.read_container(io.BytesIO(written()))
    assert reader.header.envelope == ENVELOPE
    assert reader.header.pages == tuple(encode_pages(ENTRIES))
    assert reader.header.entries == tuple(ENTRIES)
    assert list(reader) == list(enumerate(CHUNKS))


def test_a_container_is_read_from_a_pipe_that_gives_little_at_a_time() -> None:
    assert list(container.read_container(Dribble(written()))) == list(enumerate(CHUNKS))


def test_places_follow_from_the_chunk_count_alone() -> None:
    layout = ContainerLayout(3)
    assert (layout.envelope_offset, layout.envelope_size) == (16, 8192)
    assert (layout.pages_offset, layout.pages_size) == (8208, 108)
    assert layout.data_offset == 8316
    data = written()
    assert data[layout.data_offset :].startswith(CHUNKS[0])
    assert sum(page_size_bytes(5000, page) for page in range(3)) == ContainerLayout(5000).pages_size
    for n_chunks in (0, -1, MAX_CHUNKS + 1):
        with pytest.raises(MalformedError, match="container"):
            ContainerLayout(n_chunks)


def test_an_absent_chunk_is_left_out_and_the_others_keep_their_indices() -> None:
    data = written([ENTRIES[0], ABSENT, ENTRIES[2]], [CHUNKS[0], CHUNKS[2]])
    assert read(data) == [(0, CHUNKS[0]), (2, CHUNKS[2])]


@pytest.mark.parametrize("chunks", [[], CHUNKS[:2], [*CHUNKS, b"more"], [CHUNKS[1], CHUNKS[0], CHUNKS[2]]])
def test_chunks_that_are_not_those_of_the_list_cannot_be_written(chunks: list[bytes]) -> None:
    with pytest.raises(MalformedError, match="container"):
        written(chunks=chunks)


@pytest.mark.parametrize("size", [0, MAX_ENVELOPE_BYTES + 1])
def test_an_envelope_that_does_not_fit_cannot_be_written(size: int) -> None:
    with pytest.raises(MalformedError, match="envelope"):
        container.encode_envelope_area(bytes(size))


def test_an_envelope_of_the_greatest_size_fits() -> None:
    area = container.encode_envelope_area(b"e" * MAX_ENVELOPE_BYTES)
    assert len(area) == ENVELOPE_AREA_BYTES
    assert container.parse_envelope_area(area) == b"e" * MAX_ENVELOPE_BYTES


def test_every_changed_byte_is_noticed() -> None:
    data = written()
    padding = range(200, 8000)
    for at in [*range(200), *padding[::97], *range(8000, len(data))]:
        changed = data[:at] + bytes((data[at] ^ 0x10,)) + data[at + 1 :]
        # The envelope is covered by its signature, not by the container; its length says what the signature sees.
        if 16 <= at < 20 + len(ENVELOPE):
            continue
        with pytest.raises(KvnetError):
            read(changed)


def test_every_cut_is_noticed() -> None:
    data = written()
    for end in [*range(40), *range(8000, len(data))]:
        with pytest.raises(MalformedError, match="expected"):
            read(data[:end])
    with pytest.raises(MalformedError, match="more bytes"):
        read(data + b"\0")


def test_a_wrong_chunk_is_never_given_out() -> None:
    data = bytearray(written())
    start = ContainerLayout(3).data_offset + len(CHUNKS[0])
    data[start] ^= 1
    given = []
    with pytest.raises(IntegrityError, match="chunk 1"):
        for index, _ in container.read_container(io.BytesIO(bytes(data))):
            given.append(index)
    assert given == [0]


def test_another_file_and_another_version_are_told_apart() -> None:
    with pytest.raises(MalformedError, match="something else"):
        read(b"PK\x03\x04" + bytes(10_000))
    data = bytearray(written())
    data[8] = 2
    with pytest.raises(UnsupportedVersionError, match="found 2"):
        read(bytes(data))
    with pytest.raises(MalformedError, match="header"):
        container.parse_header(b"short")


def test_a_container_mangled_by_line_ending_conversion_is_noticed_at_once() -> None:
    for mangled in (written().replace(b"\r\n", b"\n"), written().replace(b"\n", b"\r\n")):
        with pytest.raises(MalformedError, match="something else"):
            read(mangled)


@pytest.mark.parametrize(
    ("area", "reason"),
    [
        (bytes(10), "area"),
        (bytes(8192), "found 0"),
        ((8189).to_bytes(4, "little") + bytes(8188), "found 8189"),
        (b"\xff" * 8192, "found 4294967295"),
        (b"\1\0\0\0e" + bytes(8186) + b"\1", "zeros"),
    ],
)
def test_a_malformed_envelope_area_is_refused(area: bytes, reason: str) -> None:
    with pytest.raises(MalformedError, match=reason):
        container.parse_envelope_area(area)


def test_declared_sizes_are_refused_before_anything_is_allocated() -> None:
    header = container.MAGIC + (1).to_bytes(4, "little") + (0xFFFFFFFF).to_bytes(4, "little")
    tracemalloc.start()
    with pytest.raises(MalformedError, match="chunks"):
        read(header + bytes(100))
    huge = (0xFFFFFFFF).to_bytes(4, "little") + b"\1" * 32
    data = container.encode_header(1) + container.encode_envelope_area(ENVELOPE) + huge
    with pytest.raises(MalformedError, match="chunks of at most"):
        read(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


LAYOUT = ContainerLayout(3)
FIRST = Placement(0, LAYOUT.data_offset, 10)


def parsed(placements: list[Placement], footer_offset: int = 20_000) -> tuple[Placement, ...]:
    return container.parse_footer(container.encode_footer(placements), footer_offset, LAYOUT)


def test_a_footer_tells_where_the_chunks_of_a_pack_lie_in_any_order_and_with_gaps() -> None:
    later = Placement(1, LAYOUT.data_offset + 500, 10)
    earlier = Placement(2, LAYOUT.data_offset + 100, 400)
    assert parsed([later, earlier]) == (later, earlier)
    assert parsed([]) == ()


def test_the_trailer_tells_where_the_footer_starts() -> None:
    data = written()
    trailer = data[-container.TRAILER_SIZE_BYTES :]
    start = container.parse_trailer(trailer, len(data), LAYOUT)
    placements = container.parse_footer(data[start:], start, LAYOUT)
    assert [data[place.offset : place.offset + place.length_bytes] for place in placements] == CHUNKS


@pytest.mark.parametrize(
    "placements",
    [
        [FIRST, FIRST],
        [Placement(3, LAYOUT.data_offset, 10)],
        [Placement(0, LAYOUT.data_offset - 1, 10)],
        [Placement(0, 0, 10)],
        [Placement(0, LAYOUT.data_offset, 0)],
        [Placement(0, 1 << 63, 10)],
        [Placement(0, LAYOUT.data_offset, 20_000)],
        [Placement(0, LAYOUT.data_offset, 0xFFFFFFFF)],
        [FIRST, Placement(1, LAYOUT.data_offset + 9, 10)],
    ],
)
def test_a_footer_with_impossible_places_is_refused(placements: list[Placement]) -> None:
    with pytest.raises(MalformedError, match="container"):
        parsed(placements)


def test_a_damaged_footer_is_refused_by_its_hash() -> None:
    data = bytearray(container.encode_footer([FIRST]))
    data[5] ^= 1
    with pytest.raises(IntegrityError, match="footer"):
        container.parse_footer(bytes(data), 20_000, LAYOUT)


def test_a_trailer_that_cannot_be_is_refused() -> None:
    good = container.encode_footer([FIRST])
    for data, reason in (
        (b"short", "trailer"),
        (bytes(48), "its end"),
        ((1 << 60).to_bytes(8, "little") + good[-40:], "at most 48 bytes"),
        ((17).to_bytes(8, "little") + good[-40:], "at most 48 bytes"),
    ):
        with pytest.raises(MalformedError, match=reason):
            container.parse_trailer(data, 20_000, LAYOUT)
    with pytest.raises(MalformedError, match="at most 48 bytes"):
        container.parse_trailer(good[-48:], LAYOUT.data_offset + 50, LAYOUT)
    with pytest.raises(MalformedError, match="footer of 16 bytes, found 32"):
        container.parse_footer(bytes(16) + good, 20_000, LAYOUT)


def test_the_golden_container_is_read() -> None:
    reader = container.read_container(io.BytesIO(GOLDEN.read_bytes()))
    assert reader.header.layout.n_chunks == 6
    assert [index for index, _ in reader] == list(range(6))


@ROUNDS
def test_damaged_containers_are_refused_within_bounds(rounds: int) -> None:
    rng = random.Random(17)
    small = written([ENTRIES[0]], [CHUNKS[0]])
    tracemalloc.start()
    for _ in range(rounds):
        data = bytearray(small)
        for _change in range(rng.randrange(1, 4)):
            at = rng.choice((rng.randrange(20), rng.randrange(8208, len(data))))
            data[at] = rng.randrange(256)
        end = rng.choice((len(data), rng.randrange(len(data))))
        try:
            assert read(bytes(data[:end])) == [(0, CHUNKS[0])]
        except KvnetError:
            continue
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The largest allowed chunk list is 9 MiB; nothing is allocated for bytes that are not there.
    assert peak < 4 << 20


@ROUNDS
def test_damaged_footers_are_refused(rounds: int) -> None:
    rng = random.Random(19)
    good = container.encode_footer([FIRST, Placement(2, 9000, 77)])
    for _ in range(rounds):
        data = bytearray(good)
        for _change in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        received = bytes(data[: rng.choice((len(data), rng.randrange(len(data))))])
        if received == good:
            continue
        with pytest.raises((MalformedError, IntegrityError)):
            container.parse_footer(received, 20_000, LAYOUT)
