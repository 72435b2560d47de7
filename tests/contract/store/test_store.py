import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvnet.errors import (
    AmbiguousHashError,
    IntegrityError,
    MalformedError,
    NotInStoreError,
    StoreError,
    StoreFullError,
    TrustError,
    UsageError,
)
from kvnet.format.chunks import ABSENT, ChunkEntry
from kvnet.format.hashes import ArtifactHash, ChunkHash, artifact_text, blake3_hash, short_text
from kvnet.format.manifest import Manifest
from kvnet.store.interface import Store
from tests.contract.store.conftest import Clock, OpenStore
from tests.unit.store.samples import (
    FINGERPRINT,
    FRIEND,
    MINE,
    OTHER,
    OTHER_FINGERPRINT,
    Sample,
    Written,
    check_whole,
    fill,
    keys_of,
    publish,
    sample,
)

NOBODY = ArtifactHash(b"\7" * 32)
CONTEXT = b'{"messages":[{"content":"x","role":"system"}],"template_inputs":{}}'


def accept(_: Manifest) -> None:
    """A policy that trusts everybody."""


def edited(artifact: Sample, n_tokens: int, n_more: int) -> Sample:
    """Another artifact that shares the first ``n_tokens`` tokens."""
    return sample([*artifact.tokens[:n_tokens], *range(70_000, 70_000 + n_more)])


# --- publishing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_tokens", [1, 2, 255, 256, 257, 511, 512, 513, 5000])
def test_what_was_published_is_read_back_whole(store: Store, n_tokens: int) -> None:
    artifact = sample(range(n_tokens), context=CONTEXT)
    record = publish(store, artifact)
    assert record.hash == artifact.hash
    assert record.envelope == artifact.envelope
    assert record.pages == artifact.pages
    check_whole(store, artifact)
    assert [one.hash for one in store.artifacts()] == [artifact.hash]


def test_a_context_of_several_chunks_is_read_back_in_order(store: Store) -> None:
    artifact = sample(range(10), context=os.urandom((1 << 20) + 17))
    publish(store, artifact)
    assert store.context_of(artifact.hash) == artifact.context


def test_nothing_is_visible_before_it_is_published(store: Store) -> None:
    artifact = sample()
    writer = store.begin_pack(len(artifact.chunks))
    fill(writer, artifact)
    assert store.artifacts() == []
    assert store.get(artifact.hash) is None
    assert not store.has_chunk(artifact.entries[0].hash)
    assert store.prefix_rows(MINE.id) == []
    writer.abort()


def test_an_aborted_pack_leaves_nothing(store: Store) -> None:
    artifact = sample()
    writer = store.begin_pack(len(artifact.chunks))
    path = writer.path
    fill(writer, artifact)
    before = store.usage().chunks
    writer.abort()
    writer.abort()
    assert not path.exists()
    assert store.usage().chunks == before == 0
    with pytest.raises(StoreError, match="has ended"):
        writer.put(0, artifact.chunks[0])


def test_a_chunk_that_is_not_what_was_expected_is_refused(store: Store) -> None:
    artifact = sample()
    writer = store.begin_pack(len(artifact.chunks))
    with pytest.raises(IntegrityError):
        writer.put(0, artifact.chunks[1], artifact.entries[0].hash)
    writer.put(0, artifact.chunks[0], artifact.entries[0].hash)
    with pytest.raises(StoreError, match="already"):
        writer.put(0, artifact.chunks[0])
    with pytest.raises(StoreError, match="index below"):
        writer.put(len(artifact.chunks), b"x")
    with pytest.raises(MalformedError, match="bytes"):
        writer.put(1, b"")
    writer.abort()


def test_chunks_that_do_not_belong_to_the_manifest_are_not_published(store: Store) -> None:
    artifact, other = sample(), sample(range(1, 601))
    writer = store.begin_pack(len(other.chunks))
    fill(writer, other)
    with pytest.raises(IntegrityError, match="root"):
        writer.publish(artifact.envelope, keys=artifact.keys, pinned=False)
    assert store.artifacts() == []
    assert store.usage().chunks == 0


def test_a_pack_of_another_number_of_chunks_is_not_published(store: Store) -> None:
    artifact = sample()
    writer = store.begin_pack(len(artifact.chunks) + 1)
    fill(writer, artifact)
    with pytest.raises(MalformedError, match="chunks as in the pack"):
        writer.publish(artifact.envelope, keys=artifact.keys, pinned=False)


def test_a_manifest_that_its_publisher_did_not_sign_is_not_published(store: Store) -> None:
    artifact = sample()
    forged = bytearray(artifact.envelope)
    forged[-1] ^= 1
    writer = store.begin_pack(len(artifact.chunks))
    fill(writer, artifact)
    with pytest.raises(TrustError):
        writer.publish(bytes(forged), keys=artifact.keys, pinned=False)
    assert store.artifacts() == []


def test_prefix_keys_other_than_the_signed_one_are_refused(store: Store) -> None:
    artifact = sample()
    wrong = [artifact.keys[:-1], (*artifact.keys[:-1], sample(range(1, 601)).keys[-1])]
    for keys in wrong:
        writer = store.begin_pack(len(artifact.chunks))
        fill(writer, artifact)
        with pytest.raises(IntegrityError, match="prefix key"):
            writer.publish(artifact.envelope, keys=keys, pinned=False)
    assert store.artifacts() == []


def test_an_artifact_with_chunks_missing_is_published_only_when_that_is_allowed(store: Store) -> None:
    artifact = sample()
    for entries in (None, artifact.entries):
        writer = store.begin_pack(len(artifact.chunks))
        fill(writer, artifact, [0, 1])
        with pytest.raises(NotInStoreError, match="2 of 4 chunks"):
            writer.publish(artifact.envelope, keys=artifact.keys, pinned=False, entries=entries)
    record = publish(store, artifact, [0, 1])
    assert not record.complete
    assert record.size_bytes == len(artifact.chunks[0]) + len(artifact.chunks[1])
    assert store.tokens_of(artifact.hash) == list(artifact.tokens)
    with pytest.raises(NotInStoreError):
        store.read_chunk(artifact.entries[2].hash)


def test_a_partial_artifact_is_completed_by_a_second_pack(store: Store) -> None:
    artifact = sample()
    publish(store, artifact, [0, 1])
    record = publish(store, artifact)
    assert record.complete
    check_whole(store, artifact)
    assert len(store.artifacts()) == 1
    store.remove(artifact.hash)
    assert store.usage().chunks == 0


def test_a_partial_artifact_becomes_whole_when_another_brings_what_it_lacks(store: Store) -> None:
    first = sample(range(512))
    longer = sample(range(700))
    publish(store, first, [0, 1])
    publish(store, longer)
    check_whole(store, first)


def test_publishing_the_same_again_changes_nothing_but_the_pin(store: Store) -> None:
    artifact = sample()
    publish(store, artifact)
    held = store.usage()
    again = publish(store, artifact, pinned=True)
    assert again.pinned
    assert store.usage().chunks == held.chunks
    assert store.usage().artifacts == 1
    assert not publish(store, sample(range(9))).pinned
    assert publish(store, artifact).pinned


def test_equal_chunks_of_one_artifact_are_stored_once(store: Store) -> None:
    artifact = sample()
    twin = replace(artifact, chunks=(artifact.chunks[0],) * 2)
    writer = store.begin_pack(len(artifact.chunks))
    start = writer.next_offset
    writer.put(0, twin.chunks[0])
    writer.put(1, twin.chunks[1])
    assert writer.next_offset == start + len(twin.chunks[0])
    writer.abort()


# --- sharing ----------------------------------------------------------------------------------------------------------


def test_an_extended_artifact_costs_only_its_new_blocks(store: Store) -> None:
    first = sample(range(1024))
    longer = sample(range(1280))
    publish(store, first)
    writer = store.begin_pack(len(longer.chunks))
    start = writer.next_offset
    fill(writer, longer)
    # Its token ids and its one new tile; the other four tiles are there.
    assert writer.next_offset - start == len(longer.chunks[0]) + len(longer.chunks[-1])
    writer.publish(longer.envelope, keys=longer.keys, pinned=False)
    check_whole(store, first)
    check_whole(store, longer)


def test_removing_an_artifact_keeps_what_others_use(store: Store) -> None:
    first = sample(range(600), context=CONTEXT)
    second = edited(first, 512, 100)
    publish(store, first)
    publish(store, second)
    freed = store.remove(first.hash)
    assert freed > 0
    assert store.get(first.hash) is None
    check_whole(store, second)
    # Nothing of what only the first one had is left: neither its tokens nor its context.
    for index in (0, 1, len(first.chunks) - 1):
        assert not store.has_chunk(first.entries[index].hash)
    store.remove(second.hash)
    assert store.usage().chunks == 0
    assert store.artifacts() == []


def test_letting_go_and_writing_packs_anew_are_removing_in_two_steps(open_store: OpenStore) -> None:
    first = sample(range(600), context=CONTEXT)
    second = edited(first, 512, 100)
    freed: list[int] = []
    for in_two_steps in (False, True):
        store = open_store()
        for artifact in (first, second):
            publish(store, artifact)
        freed.append(store.release(first.hash) + store.compact() if in_two_steps else store.remove(first.hash))
        assert not store.has_chunk(first.entries[0].hash)
        check_whole(store, second)
        assert store.compact() == 0
        store.remove(second.hash)
        assert store.usage().chunks == 0
    assert freed[0] == freed[1] > 0


def test_removed_artifacts_can_come_back(store: Store) -> None:
    first, second = sample(range(600)), sample(range(512))
    publish(store, first)
    publish(store, second)
    store.remove(first.hash)
    publish(store, first)
    check_whole(store, first)
    check_whole(store, second)


def test_a_chunk_can_be_referenced_only_while_it_is_held(store: Store) -> None:
    first, longer = sample(range(512)), sample(range(513))
    writer = store.begin_pack(len(longer.chunks))
    with pytest.raises(NotInStoreError):
        writer.reference(1, longer.entries[1])
    writer.abort()
    publish(store, first)
    writer = store.begin_pack(len(longer.chunks))
    writer.reference(1, longer.entries[1])
    writer.reference(2, longer.entries[2])
    fill(writer, longer, [0, 3])
    assert writer.publish(longer.envelope, keys=longer.keys, pinned=False).complete
    check_whole(store, longer)


def test_a_referenced_chunk_outlives_its_artifact_until_the_pack_has_ended(store: Store) -> None:
    first, longer = sample(range(512)), sample(range(513))
    publish(store, first)
    writer = store.begin_pack(len(longer.chunks))
    writer.reference(1, longer.entries[1])
    writer.reference(2, longer.entries[2])
    store.remove(first.hash)
    store.collect_garbage(everything=True)
    fill(writer, longer, [0, 3])
    writer.publish(longer.envelope, keys=longer.keys, pinned=False)
    check_whole(store, longer)
    writer = store.begin_pack(1)
    assert not store.has_chunk(first.entries[0].hash)
    writer.abort()


# --- chunks from another process --------------------------------------------------------------------------------------


def engine_writes(path: Path, offset: int, artifact: Sample, indices: range) -> list[Written]:
    """What an engine does with a pack: it writes tiles back to back from an offset, and says where they are."""
    written = []
    with path.open("r+b") as file:
        file.seek(offset)
        for index in indices:
            data = artifact.chunks[index]
            written.append(Written(index, file.tell(), len(data), blake3_hash(data)))
            file.write(data)
    return written


def test_chunks_written_by_another_process_are_adopted(store: Store) -> None:
    artifact = sample(context=CONTEXT)
    writer = store.begin_pack(len(artifact.chunks))
    fill(writer, artifact, [0, 1])
    written = engine_writes(writer.path, writer.next_offset, artifact, range(2, len(artifact.chunks)))
    writer.adopt(tuple(reversed(written)))
    writer.publish(artifact.envelope, keys=artifact.keys, pinned=True)
    check_whole(store, artifact)


def test_adopted_chunks_are_hashed_whatever_their_writer_says(store: Store) -> None:
    artifact = sample()
    writer = store.begin_pack(len(artifact.chunks))
    written = engine_writes(writer.path, writer.next_offset, artifact, range(len(artifact.chunks)))
    with writer.path.open("r+b") as file:
        file.seek(written[2].offset + 5)
        file.write(b"!")
    with pytest.raises(IntegrityError, match="chunk 2"):
        writer.adopt(written)
    writer.abort()


@pytest.mark.parametrize("change", ["before the chunks", "overlapping", "beyond the end", "too large", "twice"])
def test_adopted_chunks_lie_where_chunks_may_lie(store: Store, change: str) -> None:
    artifact = sample()
    writer = store.begin_pack(len(artifact.chunks))
    written = engine_writes(writer.path, writer.next_offset, artifact, range(len(artifact.chunks)))
    last = written[-1]
    bad = {
        "before the chunks": replace(last, offset=16),
        "overlapping": replace(last, offset=last.offset - 1),
        "beyond the end": replace(last, offset=last.offset + 1),
        "too large": replace(last, length_bytes=1 << 40),
        "twice": replace(last, index=0),
    }[change]
    with pytest.raises((StoreError, MalformedError)):
        writer.adopt([*written[:-1], bad])
    writer.abort()
    assert store.usage().chunks == 0


def test_a_located_chunk_can_be_read_by_another_process(store: Store) -> None:
    artifact = sample()
    publish(store, artifact)
    for entry, data in zip(artifact.entries, artifact.chunks, strict=True):
        location = store.locate_all([entry.hash])[0]
        assert location is not None
        with location.path.open("rb") as file:
            file.seek(location.offset)
            assert file.read(location.length_bytes) == data
        assert location.path.stat().st_mode & 0o777 == 0o600
    assert store.locate_all([ChunkHash(bytes(32))])[0] is None


def test_chunks_are_located_together_as_one_by_one(store: Store) -> None:
    artifact = sample()
    publish(store, artifact)
    wanted = [ChunkHash(bytes(32)), *(entry.hash for entry in reversed(artifact.entries)), artifact.entries[0].hash]
    assert store.locate_all(wanted) == [store.locate_all([chunk])[0] for chunk in wanted]
    assert store.locate_all(wanted)[0] is None
    assert store.locate_all([]) == []


# --- prefixes ---------------------------------------------------------------------------------------------------------


def test_the_deepest_common_block_of_every_artifact_is_found(store: Store) -> None:
    long, short, other = sample(range(1024)), sample(range(512)), sample(range(1, 600))
    for artifact in (long, short, other):
        publish(store, artifact)
    prompt = sample([*range(768), *range(9000, 9100)])
    assert store.find_prefix(MINE.id, prompt.keys[::-1]) == [(long.hash, 3), (short.hash, 2)]
    assert store.find_prefix(OTHER.id, prompt.keys[::-1]) == []
    assert store.find_prefix(MINE.id, []) == []


def test_a_prompt_of_thousands_of_blocks_is_looked_up(store: Store) -> None:
    artifact = sample(range(300))
    publish(store, artifact)
    others = [blake3_hash(str(number).encode()) for number in range(4000)]
    keys = [*map(type(artifact.keys[0]), others), *artifact.keys[::-1]]
    assert store.find_prefix(MINE.id, keys) == [(artifact.hash, 2)]


def test_prefix_rows_name_every_block_of_every_artifact(store: Store) -> None:
    artifact, foreign = sample(range(600)), sample(range(600), namespace=OTHER)
    publish(store, artifact)
    publish(store, foreign)
    assert store.prefix_rows(MINE.id) == [(key, artifact.hash, n) for n, key in enumerate(artifact.keys, start=1)]
    store.remove(artifact.hash)
    assert store.prefix_rows(MINE.id) == []
    assert len(store.prefix_rows(OTHER.id)) == 3


def test_artifacts_are_listed_by_model_and_namespace(store: Store, clock: Clock) -> None:
    first, second = sample(range(40)), sample(range(50))
    publish(store, first)
    clock.now_s += 1
    publish(store, second)
    publish(store, sample(range(60), namespace=OTHER))
    publish(store, sample(range(70), fingerprint=OTHER_FINGERPRINT))
    assert store.artifacts_of(FINGERPRINT.hash, MINE.id) == [second.hash, first.hash]
    clock.now_s += 1
    store.touch(first.hash)
    assert store.artifacts_of(FINGERPRINT.hash, MINE.id) == [first.hash, second.hash]
    assert store.count(MINE.id) == 3
    assert store.count(OTHER.id) == 1
    store.touch(NOBODY)


def test_an_artifact_whose_token_ids_are_not_held_leads_nowhere(store: Store) -> None:
    artifact = sample()
    publish(store, artifact, [1, 2])
    assert store.find_prefix(MINE.id, artifact.keys[::-1]) == []
    assert store.prefix_rows(MINE.id) == []
    assert store.artifacts_of(FINGERPRINT.hash, MINE.id) == []
    with pytest.raises(NotInStoreError):
        store.tokens_of(artifact.hash)
    publish(store, artifact, [0])
    assert store.find_prefix(MINE.id, artifact.keys[::-1]) == [(artifact.hash, 3)]


def test_prefix_rows_are_computed_once_the_namespace_is_known(store: Store) -> None:
    mine, foreign, broken = sample(), sample(range(600), namespace=OTHER), sample(range(9), keys=sample().keys[:1])
    for artifact in (mine, foreign, broken):
        publish(store, artifact, keyed=False)
    assert store.prefix_rows(MINE.id) == []
    assert store.index_prefixes(keys_of) == 1
    assert store.find_prefix(MINE.id, mine.keys[::-1]) == [(mine.hash, 3)]
    assert store.index_prefixes(keys_of) == 0


# --- resolving --------------------------------------------------------------------------------------------------------


def test_full_and_short_hashes_mean_an_artifact(store: Store) -> None:
    artifact = sample()
    publish(store, artifact)
    text = artifact_text(artifact.hash)
    for form in (text, short_text(artifact.hash), text[7:15], text[7:]):
        assert store.resolve(form) == artifact.hash


@pytest.mark.parametrize("text", ["", "bafyr4i", "bafyr4iabcdefg", "BAFYR4IABCDEFGH", "../../etc", "b" * 60, "x y"])
def test_what_is_no_hash_is_a_usage_error(store: Store, text: str) -> None:
    with pytest.raises(UsageError):
        store.resolve(text)


def test_a_hash_of_nothing_held_here_is_said_to_be_unknown(store: Store) -> None:
    publish(store, sample())
    for text in (artifact_text(NOBODY), short_text(NOBODY)):
        with pytest.raises(NotInStoreError, match="no artifact here"):
            store.resolve(text)


def test_unknown_artifacts_are_refused_everywhere(store: Store) -> None:
    for method in (store.pin, store.unpin, store.remove, store.verify, store.tokens_of, store.context_of):
        with pytest.raises(NotInStoreError, match="not held here"):
            method(NOBODY)
    assert store.get(NOBODY) is None
    with pytest.raises(NotInStoreError):
        store.read_chunk(ChunkHash(NOBODY))


# --- room -------------------------------------------------------------------------------------------------------------


def size_in(open_store: OpenStore, *artifacts: Sample) -> int:
    """What a store holds once these are in it."""
    store = open_store()
    for artifact in artifacts:
        publish(store, artifact)
    return store.usage().held_bytes


A, B, C = (sample(range(start, start + 3000)) for start in (0, 10_000, 20_000))


def test_the_least_recently_used_make_room(open_store: OpenStore, clock: Clock) -> None:
    store = open_store(quota_bytes=int(size_in(open_store, A, B) + A.size_bytes * 0.5))
    for artifact in (A, B):
        publish(store, artifact)
        clock.now_s += 1
    store.touch(A.hash)
    publish(store, C)
    assert {record.hash for record in store.artifacts()} == {A.hash, C.hash}
    assert store.usage().held_bytes <= store.usage().quota_bytes
    assert store.take_evicted() == [B.hash]
    assert store.take_evicted() == []
    check_whole(store, A)
    check_whole(store, C)


def test_pinned_artifacts_never_make_room(open_store: OpenStore, clock: Clock) -> None:
    store = open_store(quota_bytes=int(size_in(open_store, A, B) + A.size_bytes * 0.5))
    publish(store, A, pinned=True)
    publish(store, B, pinned=True)
    with pytest.raises(StoreFullError, match=r"quota of [\d.,]+ [kMGT]?(B|bytes)\b"):
        publish(store, C, pinned=True)
    assert {record.hash for record in store.artifacts()} == {A.hash, B.hash}
    store.unpin(A.hash)
    publish(store, C, pinned=True)
    assert {record.hash for record in store.artifacts()} == {B.hash, C.hash}


def test_nothing_is_evicted_for_what_cannot_fit_anyway(open_store: OpenStore) -> None:
    store = open_store(quota_bytes=int(size_in(open_store, A) * 1.2))
    publish(store, A)
    with pytest.raises(StoreFullError):
        store.begin_pack(4, expected_bytes=1 << 40)
    check_whole(store, A)


def test_garbage_collection_removes_all_that_is_not_pinned_when_asked(store: Store) -> None:
    publish(store, A, pinned=True)
    publish(store, B)
    assert store.collect_garbage().removed == ()
    collected = store.collect_garbage(everything=True)
    assert collected.removed == (B.hash,)
    assert store.take_evicted() == [B.hash]
    assert [record.hash for record in store.artifacts()] == [A.hash]
    assert not any(store.has_chunk(entry.hash) for entry in B.entries)
    check_whole(store, A)


def test_usage_counts_everything(store: Store) -> None:
    empty = store.usage()
    publish(store, A, pinned=True)
    publish(store, B)
    usage = store.usage()
    assert (usage.artifacts, usage.pinned) == (2, 1)
    assert usage.chunks == len(A.chunks) + len(B.chunks)
    assert usage.held_bytes >= empty.held_bytes + A.size_bytes + B.size_bytes
    writer = store.begin_pack(len(C.chunks))
    fill(writer, C)
    assert store.usage().held_bytes >= usage.held_bytes + C.size_bytes
    writer.abort()
    assert store.usage().held_bytes < usage.held_bytes + C.size_bytes


# --- files ------------------------------------------------------------------------------------------------------------


def test_an_exported_artifact_is_imported_whole(open_store: OpenStore, tmp_path: Path) -> None:
    giver, taker = open_store(), open_store()
    first, second = sample(range(600)), sample([*range(512), *range(7000, 7090)], context=CONTEXT)
    publish(giver, first)
    publish(giver, second)
    path = tmp_path / "artifact.kva"
    assert giver.export(second.hash, path) == path.stat().st_size
    assert path.stat().st_mode & 0o777 == 0o600
    record = taker.import_container(path, judge=accept, keys_of=keys_of, pinned=True)
    assert record.pinned
    check_whole(taker, second)
    assert taker.find_prefix(MINE.id, second.keys[::-1]) == [(second.hash, 3)]
    # Equal bytes from both: the export depends on the artifact alone.
    again = tmp_path / "again.kva"
    taker.export(second.hash, again)
    assert again.read_bytes() == path.read_bytes()


def test_an_existing_file_is_not_overwritten_by_an_export(store: Store, tmp_path: Path) -> None:
    publish(store, A)
    path = tmp_path / "precious"
    path.write_bytes(b"data")
    with pytest.raises(StoreError):
        store.export(A.hash, path)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError):
        store.export(A.hash, link)
    assert path.read_bytes() == b"data"
    assert not (tmp_path / "elsewhere").exists()


def test_an_incomplete_artifact_is_not_exported(store: Store, tmp_path: Path) -> None:
    artifact = sample()
    publish(store, artifact, [0, 1])
    with pytest.raises(NotInStoreError, match="2 of 4 chunks"):
        store.export(artifact.hash, tmp_path / "x.kva")
    assert not (tmp_path / "x.kva").exists()


def test_a_refused_container_leaves_nothing(open_store: OpenStore, tmp_path: Path) -> None:
    giver, taker = open_store(), open_store()
    artifact = sample(key=FRIEND)
    publish(giver, artifact)
    giver.export(artifact.hash, tmp_path / "x.kva")

    def refuse(manifest: Manifest) -> None:
        assert manifest.publisher == FRIEND.public
        raise TrustError("not trusted")

    with pytest.raises(TrustError, match="not trusted"):
        taker.import_container(tmp_path / "x.kva", judge=refuse)
    assert taker.artifacts() == []
    assert taker.usage().chunks == 0


def test_a_container_with_any_byte_changed_is_refused(open_store: OpenStore, tmp_path: Path) -> None:
    giver, taker = open_store(), open_store()
    artifact = sample(range(260))
    publish(giver, artifact)
    giver.export(artifact.hash, tmp_path / "x.kva")
    sound = (tmp_path / "x.kva").read_bytes()
    for position in [*range(0, len(sound), 397), len(sound) - 1]:
        damaged = bytearray(sound)
        damaged[position] ^= 0x10
        (tmp_path / "bad.kva").write_bytes(damaged)
        with pytest.raises((IntegrityError, MalformedError, TrustError)):
            taker.import_container(tmp_path / "bad.kva", judge=accept)
    for size in (0, 10, 8200, len(sound) // 2, len(sound) - 1):
        (tmp_path / "bad.kva").write_bytes(sound[:size])
        with pytest.raises((IntegrityError, MalformedError)):
            taker.import_container(tmp_path / "bad.kva", judge=accept)
    (tmp_path / "bad.kva").write_bytes(sound + b"x")
    with pytest.raises(MalformedError):
        taker.import_container(tmp_path / "bad.kva", judge=accept)
    assert taker.artifacts() == []
    assert taker.usage().chunks == 0


def test_a_container_whose_tokens_have_another_prefix_key_is_refused(open_store: OpenStore, tmp_path: Path) -> None:
    giver, taker = open_store(), open_store()
    artifact = sample(range(9), keys=sample(range(8)).keys)
    publish(giver, artifact, keyed=False)
    giver.export(artifact.hash, tmp_path / "x.kva")
    with pytest.raises(IntegrityError, match="prefix key"):
        taker.import_container(tmp_path / "x.kva", judge=accept, keys_of=keys_of)
    assert taker.artifacts() == []


def test_verify_finds_what_is_missing(store: Store) -> None:
    artifact = sample()
    publish(store, artifact, [0, 2])
    verified = store.verify(artifact.hash)
    assert verified.missing == (1, 3)
    assert verified.bad == ()
    assert verified.chunks == 2
    assert verified.size_bytes == len(artifact.chunks[0]) + len(artifact.chunks[2])


def test_an_ambiguous_short_hash_names_the_artifacts(store: Store) -> None:
    # Two real artifacts whose hashes begin alike cannot be made; the rule is the same for any list.
    from kvnet.store.reading import resolve_text

    near = ArtifactHash(NOBODY[:-1] + b"\x08")
    with pytest.raises(AmbiguousHashError, match=artifact_text(near)):
        resolve_text(short_text(NOBODY), [NOBODY, near])
    assert resolve_text(artifact_text(near), [NOBODY, near]) == near


def test_absent_entries_are_not_taken_for_chunks() -> None:
    assert ChunkEntry(0, ChunkHash(bytes(32))) == ABSENT


def test_a_closed_store_takes_nothing(store: Store) -> None:
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.begin_pack(1)


def test_closing_aborts_open_packs(store: Store) -> None:
    writer = store.begin_pack(4)
    path = writer.path
    store.close()
    assert not path.exists()
