"""Chunks read from packs, whether the kernel has them in memory or not."""

import os
from pathlib import Path

import pytest

from kvnet.exchange.open_packs import OpenPacks
from kvnet.format.hashes import ChunkHash
from kvnet.store.interface import ChunkLocation

LENGTH = 300_000
CHUNK = ChunkHash(bytes(32))


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    path = tmp_path / "pack"
    path.write_bytes(os.urandom(3 * LENGTH))
    return path


def forget(path: Path, offset: int) -> None:
    """Have the kernel let go of what it keeps of a chunk, as far as it takes such a hint."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), offset, LENGTH, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("forgotten", [(), (0,), (1,), (0, 1, 2)])
def test_chunks_are_read_whole_from_memory_and_from_disk(pack: Path, forgotten: tuple[int, ...]) -> None:
    for number in forgotten:
        forget(pack, number * LENGTH)
    whole = pack.read_bytes() if not forgotten else None
    with OpenPacks() as packs:
        places = [packs.place(ChunkLocation(pack, number * LENGTH, LENGTH, CHUNK)) for number in range(3)]
        found = []
        for place, following in zip(places, [*places[1:], None], strict=True):
            assert place is not None
            view = memoryview(bytearray(LENGTH))
            assert packs.read(place, view, following)
            found.append(bytes(view))
    assert b"".join(found) == (whole or pack.read_bytes())


def test_file_that_is_too_short_is_no_chunk(pack: Path) -> None:
    with OpenPacks() as packs:
        place = packs.place(ChunkLocation(pack, 2 * LENGTH + 1, LENGTH, CHUNK))
        assert place is not None
        assert not packs.read(place, memoryview(bytearray(LENGTH)), place)


def test_pack_is_opened_once_and_one_that_has_gone_has_no_place(pack: Path) -> None:
    with OpenPacks() as packs:
        first, second = (packs.place(ChunkLocation(pack, offset, 1, CHUNK)) for offset in (0, 1))
        assert first is not None
        assert second is not None
        assert first.handle == second.handle
        assert packs.place(ChunkLocation(pack.with_name("gone"), 0, 1, CHUNK)) is None
        assert packs.place(None) is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first.handle)
