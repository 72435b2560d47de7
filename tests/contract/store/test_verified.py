"""Chunks that were hashed as they arrived are kept as any other, and hashed when they are read."""

import pytest

from kvnet.errors import StoreError
from kvnet.format.chunks import VerifiedChunk
from tests.contract.store.conftest import OpenStore
from tests.unit.store.samples import check_whole, sample

ARTIFACT = sample(range(1024))


def verified(index: int) -> VerifiedChunk:
    return VerifiedChunk(index, memoryview(bytearray(ARTIFACT.chunks[index])), ARTIFACT.entries[index].hash)


def test_verified_chunks_make_the_artifact_and_their_memory_may_be_used_again(open_store: OpenStore) -> None:
    store = open_store()
    writer = store.resume_pack(ARTIFACT.hash, ARTIFACT.entries)
    for index in range(len(ARTIFACT.chunks)):
        chunk = verified(index)
        writer.put_verified(chunk)
        assert isinstance(chunk.data, memoryview)
        chunk.data[:] = bytes(len(chunk.data))
    writer.publish(ARTIFACT.envelope, keys=ARTIFACT.keys, pinned=False)
    check_whole(store, ARTIFACT)


def test_verified_chunk_that_is_there_already_is_refused(open_store: OpenStore) -> None:
    writer = open_store().begin_pack(len(ARTIFACT.chunks))
    writer.put_verified(verified(0))
    with pytest.raises(StoreError):
        writer.put_verified(verified(0))
    writer.abort()
