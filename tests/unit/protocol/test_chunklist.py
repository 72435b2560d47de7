"""Chunk lists: nothing counts but what the manifest's root vouches for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnet.errors import IntegrityError, MalformedError
from kvnet.format.chunks import ABSENT, ChunkEntry, encode_pages, pages_root
from kvnet.format.hashes import blake3_hash
from kvnet.protocol.chunklist import verify_chunk_list
from tests.unit.trust.samples import make_artifact, resigned

ARTIFACT = make_artifact(range(700))
PAGE = ARTIFACT.pages[0]


def test_chunk_list_of_the_manifest_is_accepted() -> None:
    assert verify_chunk_list(ARTIFACT.manifest, ARTIFACT.pages) == ARTIFACT.entries


@pytest.mark.parametrize("pages", [[], [PAGE, PAGE], [PAGE[:-36]], [PAGE + PAGE[:36]], [PAGE[:-1]], [b""]])
def test_chunk_list_of_another_size_is_the_fault_of_the_peer_that_sent_it(pages: list[bytes]) -> None:
    with pytest.raises(IntegrityError, match="chunk list"):
        verify_chunk_list(ARTIFACT.manifest, pages)


@given(st.integers(0, len(PAGE) - 1), st.integers(1, 255))
def test_any_changed_byte_is_the_fault_of_the_peer_that_sent_it(position: int, difference: int) -> None:
    changed = bytearray(PAGE)
    changed[position] ^= difference
    with pytest.raises(IntegrityError, match="root"):
        verify_chunk_list(ARTIFACT.manifest, [bytes(changed)])


def test_chunk_list_of_another_artifact_is_refused() -> None:
    other = make_artifact([*range(1, 700), 5])
    with pytest.raises(IntegrityError, match="root"):
        verify_chunk_list(ARTIFACT.manifest, other.pages)


@pytest.mark.parametrize(
    "entries",
    [
        [ABSENT, *ARTIFACT.entries[1:]],
        [ChunkEntry(ARTIFACT.entries[0].length_bytes + 4, blake3_hash(b"x")), *ARTIFACT.entries[1:]],
        [ARTIFACT.entries[1], ARTIFACT.entries[0], *ARTIFACT.entries[2:]],
    ],
)
def test_chunk_list_that_matches_and_contradicts_its_manifest_is_the_fault_of_the_publisher(
    entries: list[ChunkEntry],
) -> None:
    pages = encode_pages(entries)
    with pytest.raises(MalformedError):
        verify_chunk_list(resigned(ARTIFACT, root=pages_root(pages)).manifest, pages)
