"""What only a store with files can get wrong: failures, crashes, damage, strangers in its folders."""

import errno
import os
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvnet.errors import IntegrityError, KvnetError, NotInStoreError, StoreError, StoreFullError
from kvnet.format.hashes import artifact_text
from kvnet.store.disk import DiskStore
from kvnet.store.osfile import OsFiles
from kvnet.store.packs import pack_name
from kvnet.store.records import RecordCache
from tests.unit.store.faults import FaultyFiles
from tests.unit.store.samples import MINE, OTHER, Sample, check_whole, fill, keys_of, publish, sample

FIRST = sample(range(600))
SECOND = sample([*range(512), *range(7000, 7100)], context=b"context")
EIGHT_CHUNKS = sample([*range(9000, 9000 + 6 * 256)], context=b"c")
assert len(EIGHT_CHUNKS.chunks) == 8


OpenStore = Callable[..., DiskStore]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[OpenStore]:
    """Opens the store of this test, again and again."""
    opened: list[DiskStore] = []

    def open_one(
        files: OsFiles | None = None, *, quota_bytes: int = 1 << 30, min_free_bytes: int = 0, keyed: bool = True
    ) -> DiskStore:
        for store in opened:
            store.close()
        opened.append(
            DiskStore.open(
                tmp_path / "store",
                quota_bytes=quota_bytes,
                min_free_bytes=min_free_bytes,
                files=files,
                keys_of=keys_of if keyed else None,
            )
        )
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def files_of(root: Path) -> list[str]:
    """Every file but the index."""
    return sorted(
        str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and "index.sqlite" not in path.name
    )


def pack_path(tmp_path: Path, artifact: Sample) -> Path:
    return tmp_path / "store" / "packs" / pack_name(artifact.hash)


# --- failures ---------------------------------------------------------------------------------------------------------


def steps_of_a_publish(tmp_path: Path) -> list[tuple[str, int]]:
    """Every single file operation that publishing a pinned artifact makes."""
    files = FaultyFiles()
    store = DiskStore.open(tmp_path / "counting", quota_bytes=1 << 30, min_free_bytes=0, files=files)
    publish(store, FIRST)
    before = dict(files.seen)
    publish(store, EIGHT_CHUNKS, pinned=True)
    after = dict(files.seen)
    store.close()
    return [
        (operation, number)
        for operation, count in after.items()
        for number in range(before.get(operation, 0) + 1, count + 1)
        # Leftovers that cannot be unlinked are for the next opening.
        if operation != "unlink"
    ]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["disk full", "disk error"])
@pytest.mark.parametrize("forever", [False, True], ids=["once", "from then on"])
def test_a_failed_write_sync_or_rename_publishes_nothing_and_harms_nothing(
    open_store: OpenStore, tmp_path: Path, code: int, forever: bool, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "store"
    steps = steps_of_a_publish(tmp_path)
    assert {operation for operation, _ in steps} == {"create", "write", "truncate", "sync", "sync_directory", "rename"}
    assert len([operation for operation, _ in steps if operation == "write"]) > 8
    store = open_store()
    publish(store, FIRST)
    before = files_of(root)
    for operation, number in steps:
        # Counted from a fresh store: opening it makes no such steps.
        store = open_store(FaultyFiles(operation, number - _made_before(steps, operation), code, forever=forever))
        caplog.clear()
        with pytest.raises(StoreFullError if code == errno.ENOSPC else StoreError):
            publish(store, EIGHT_CHUNKS, pinned=True)
        assert len([record for record in caplog.records if "nothing was published" in record.message]) <= 1
        assert [record.hash for record in store.artifacts()] == [FIRST.hash]
        assert not any(store.has_chunk(entry.hash) for entry in EIGHT_CHUNKS.entries)
        assert store.find_prefix(MINE.id, EIGHT_CHUNKS.keys[::-1]) == []
        assert {artifact for _, artifact, _ in store.prefix_rows(MINE.id)} == {FIRST.hash}
        check_whole(store, FIRST)
        assert files_of(root) == before, (operation, number)
        store = open_store()
        assert [record.hash for record in store.artifacts()] == [FIRST.hash]
    publish(store, EIGHT_CHUNKS, pinned=True)
    check_whole(store, EIGHT_CHUNKS)


def _made_before(steps: list[tuple[str, int]], operation: str) -> int:
    return min(number for name, number in steps if name == operation) - 1


def test_a_full_index_publishes_nothing(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    publish(store, FIRST)
    before = files_of(tmp_path / "store")
    database = store._parts.index._db
    pages = database.execute("PRAGMA page_count").fetchone()[0]
    database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreFullError, match="index"):
        publish(store, sample(range(40_000)), pinned=True)
    assert files_of(tmp_path / "store") == before
    assert [record.hash for record in store.artifacts()] == [FIRST.hash]
    check_whole(store, FIRST)


def test_a_failed_removal_keeps_the_artifact_or_loses_it_for_good(open_store: OpenStore) -> None:
    for operation in ("create", "write", "sync", "rename", "sync_directory", "unlink"):
        for number in range(1, 6):
            store = open_store()
            publish(store, FIRST, pinned=True)
            publish(store, SECOND)
            files = FaultyFiles(operation, number)
            store = open_store(files)
            files.seen.clear()
            try:
                store.remove(FIRST.hash)
                failed = False
            except StoreError:
                failed = True
            listed = store.get(FIRST.hash) is not None
            if listed:
                assert failed
                check_whole(store, FIRST)
            check_whole(store, SECOND)
            store = open_store()
            # A removal that was reported as done stays done; one that failed may have been recorded already.
            assert failed or store.get(FIRST.hash) is None
            check_whole(store, SECOND)


def test_free_space_is_left(open_store: OpenStore) -> None:
    files = FaultyFiles()
    store = open_store(files, min_free_bytes=10_000_000)
    files.free = 10_300_000
    publish(store, FIRST)
    files.free = 9_000_000
    with pytest.raises(StoreFullError, match=r"9 MB free, of which 10 MB are to stay free") as raised:
        publish(store, EIGHT_CHUNKS)
    assert "min_free_bytes" in raised.value.hint
    assert "quota_bytes" not in raised.value.hint


# --- opening again ----------------------------------------------------------------------------------------------------


def test_everything_is_there_after_opening_again(open_store: OpenStore) -> None:
    store = open_store()
    publish(store, FIRST, pinned=True)
    publish(store, SECOND)
    before = store.artifacts()
    store = open_store()
    assert store.artifacts() == before
    assert store.problems == ()
    check_whole(store, FIRST)
    check_whole(store, SECOND)
    assert store.find_prefix(MINE.id, FIRST.keys[::-1]) == [(FIRST.hash, 3), (SECOND.hash, 2)]


def test_a_lost_index_is_made_anew(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    publish(store, FIRST, pinned=True)
    publish(store, SECOND)
    rows = store.prefix_rows(MINE.id)
    store.close()
    for path in (tmp_path / "store").glob("index.sqlite*"):
        path.unlink()
    store = open_store()
    check_whole(store, FIRST)
    check_whole(store, SECOND)
    assert sorted(store.prefix_rows(MINE.id)) == sorted(rows)
    pinned = store.get(FIRST.hash)
    assert pinned is not None
    assert pinned.pinned


@pytest.mark.parametrize("damage", ["junk", "header", "middle", "empty", "another version", "a directory"])
def test_a_damaged_index_is_made_anew(open_store: OpenStore, tmp_path: Path, damage: str) -> None:
    store = open_store()
    publish(store, FIRST)
    publish(store, SECOND)
    store.close()
    path = tmp_path / "store" / "index.sqlite"
    data = bytearray(path.read_bytes())
    if damage == "junk":
        path.write_bytes(os.urandom(50_000))
    elif damage == "header":
        path.write_bytes(b"\0" * 100 + data[100:])
    elif damage == "middle":
        data[4096:] = os.urandom(len(data) - 4096)
        path.write_bytes(data)
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "another version":
        with sqlite3.connect(path) as database:
            database.execute("PRAGMA user_version = 99")
        database.close()
    else:
        path.unlink()
        path.mkdir()
        with pytest.raises(StoreError):
            open_store()
        path.rmdir()
    store = open_store()
    check_whole(store, FIRST)
    check_whole(store, SECOND)


def test_rebuilding_gives_the_same_index(open_store: OpenStore) -> None:
    store = open_store()
    publish(store, FIRST, pinned=True)
    publish(store, SECOND)
    publish(store, sample(range(9), namespace=OTHER), keyed=False)
    publish(store, EIGHT_CHUNKS, [0, 1, 3])
    publish(store, EIGHT_CHUNKS, [4])
    gone = sample(range(300))
    publish(store, gone)
    store.remove(gone.hash)
    rows, before = (
        sorted(store.prefix_rows(MINE.id)),
        {r.hash: (r.complete, r.pinned, r.size_bytes) for r in store.artifacts()},
    )
    for verify_chunks in (False, True):
        rebuilt = store.rebuild(keys_of, verify_chunks=verify_chunks)
        assert rebuilt.artifacts == 4
        assert rebuilt.problems == ()
        assert rebuilt.chunks == store.usage().chunks
        assert sorted(store.prefix_rows(MINE.id)) == rows
        assert {r.hash: (r.complete, r.pinned, r.size_bytes) for r in store.artifacts()} == before
        check_whole(store, FIRST)
        check_whole(store, SECOND)


def test_a_removed_artifact_stays_removed_though_its_pack_has_to_stay(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    publish(store, FIRST)
    publish(store, SECOND)
    store.remove(FIRST.hash)
    assert any(artifact_text(FIRST.hash) in name for name in files_of(tmp_path / "store" / "packs"))
    for _ in range(2):
        store = open_store()
        assert [record.hash for record in store.artifacts()] == [SECOND.hash]
        check_whole(store, SECOND)
    store.rebuild(keys_of)
    assert [record.hash for record in store.artifacts()] == [SECOND.hash]
    store.remove(SECOND.hash)
    assert files_of(tmp_path / "store") == []


def test_nothing_of_a_removed_text_stays_in_the_files(open_store: OpenStore, tmp_path: Path) -> None:
    secret = b"the launch code is 0000" * 10
    first = sample(range(600), context=secret)
    store = open_store()
    publish(store, first)
    publish(store, SECOND)
    assert any(secret in path.read_bytes() for path in (tmp_path / "store").rglob("*.kva"))
    store.remove(first.hash)
    for path in (tmp_path / "store").rglob("*.kva"):
        assert secret not in path.read_bytes()
        assert first.chunks[0] not in path.read_bytes()
    check_whole(store, SECOND)


def test_a_pack_in_use_elsewhere_is_read_on_while_it_is_compacted(open_store: OpenStore) -> None:
    store = open_store()
    publish(store, FIRST)
    publish(store, SECOND)
    location = store.locate_all([FIRST.entries[1].hash])[0]
    assert location is not None
    with location.path.open("rb") as held:
        store.remove(FIRST.hash)
        held.seek(location.offset)
        assert held.read(location.length_bytes) == FIRST.chunks[1]
    # Whoever comes too late finds no file, never other bytes in its place.
    assert not location.path.exists()
    check_whole(store, SECOND)


def test_leftovers_of_packs_never_published_are_removed(open_store: OpenStore, tmp_path: Path) -> None:
    open_store().close()
    leftover = tmp_path / "store" / "tmp" / "0123-1.part"
    leftover.write_bytes(b"x" * 1000)
    target = tmp_path / "precious"
    target.write_bytes(b"data")
    (tmp_path / "store" / "tmp" / "link").symlink_to(target)
    open_store()
    assert files_of(tmp_path / "store") == []
    assert target.read_bytes() == b"data"


def test_a_quota_that_shrank_is_kept_from_the_start(open_store: OpenStore) -> None:
    store = open_store()
    kept, evictable = sample(range(3000)), sample(range(5000, 8000))
    publish(store, evictable)
    publish(store, kept, pinned=True)
    store = open_store(quota_bytes=kept.size_bytes + 200_000)
    assert [record.hash for record in store.artifacts()] == [kept.hash]
    # A pinned one stays even when it alone is too large: nothing that was asked for is thrown away.
    store = open_store(quota_bytes=1000)
    check_whole(store, kept)
    with pytest.raises(StoreFullError):
        store.begin_pack(4)


# --- damage -----------------------------------------------------------------------------------------------------------


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))


def test_a_damaged_chunk_is_never_given_away(open_store: OpenStore) -> None:
    store = open_store()
    publish(store, FIRST)
    publish(store, SECOND)
    shared = FIRST.entries[1].hash
    location = store.locate_all([shared])[0]
    assert location is not None
    flip(location.path, location.offset + 100)
    with pytest.raises(IntegrityError):
        store.read_chunk(shared)
    with pytest.raises(NotInStoreError):
        store.read_chunk(shared)
    assert store.locate_all([shared])[0] is None
    assert [record.complete for record in store.artifacts()] == [False, False]
    # It can be fetched again, and then both are whole.
    publish(store, SECOND)
    check_whole(store, FIRST)
    check_whole(store, SECOND)
    store = open_store()
    check_whole(store, FIRST)


def test_a_sound_copy_of_a_damaged_chunk_is_read_in_its_place(open_store: OpenStore) -> None:
    store = open_store()
    publish(store, FIRST)
    location = store.locate_all([FIRST.entries[1].hash])[0]
    assert location is not None
    flip(location.path, location.offset)
    with pytest.raises(IntegrityError):
        store.read_chunk(FIRST.entries[1].hash)
    publish(store, FIRST)
    store.rebuild(keys_of)
    check_whole(store, FIRST)


def test_verification_names_the_damaged_chunk(open_store: OpenStore) -> None:
    store = open_store()
    publish(store, FIRST)
    location = store.locate_all([FIRST.entries[2].hash])[0]
    assert location is not None
    flip(location.path, location.offset)
    assert store.verify(FIRST.hash).bad == (2,)
    again = store.verify(FIRST.hash)
    assert (again.bad, again.missing) == ((), (2,))


def test_damaged_token_ids_lead_nowhere(open_store: OpenStore) -> None:
    store = open_store()
    publish(store, FIRST)
    location = store.locate_all([FIRST.entries[0].hash])[0]
    assert location is not None
    flip(location.path, location.offset)
    with pytest.raises(IntegrityError):
        store.tokens_of(FIRST.hash)
    assert store.find_prefix(MINE.id, FIRST.keys) == []


def test_a_rebuild_that_hashes_chunks_leaves_out_the_damaged_ones(open_store: OpenStore) -> None:
    store = open_store()
    publish(store, FIRST)
    location = store.locate_all([FIRST.entries[2].hash])[0]
    assert location is not None
    flip(location.path, location.offset)
    rebuilt = store.rebuild(keys_of, verify_chunks=True)
    assert rebuilt.chunks == len(FIRST.chunks) - 1
    assert len(rebuilt.problems) == 1
    assert "1 chunks" in rebuilt.problems[0].reason
    assert not store.has_chunk(FIRST.entries[2].hash)


def test_a_pack_that_has_gone_takes_its_artifact_along(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    publish(store, FIRST)
    publish(store, SECOND)
    pack_path(tmp_path, FIRST).unlink()
    with pytest.raises(NotInStoreError):
        store.read_chunk(FIRST.entries[0].hash)
    store = open_store()
    assert [record.hash for record in store.artifacts()] == [SECOND.hash]
    record = store.get(SECOND.hash)
    assert record is not None
    assert not record.complete
    publish(store, SECOND)
    check_whole(store, SECOND)


@pytest.mark.parametrize("size", [0, 15, 16, 4000, 9000, 20_000, -1])
def test_a_truncated_pack_is_set_aside_and_reported(open_store: OpenStore, tmp_path: Path, size: int) -> None:
    store = open_store()
    publish(store, FIRST)
    publish(store, EIGHT_CHUNKS)
    store.close()
    path = pack_path(tmp_path, FIRST)
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    store = open_store()
    assert [record.hash for record in store.artifacts()] == [EIGHT_CHUNKS.hash]
    assert [problem.path for problem in store.problems] == [path]
    assert "set aside" in store.problems[0].reason
    assert (tmp_path / "store" / "quarantine" / path.name).exists()
    check_whole(store, EIGHT_CHUNKS)
    # It was reported; nothing is left to report.
    store = open_store()
    assert store.problems == ()
    store.collect_garbage()
    assert not any((tmp_path / "store" / "quarantine").iterdir())


def test_a_pack_with_any_byte_of_its_own_account_changed_is_set_aside(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    publish(store, FIRST)
    store.close()
    path = pack_path(tmp_path, FIRST)
    sound = path.read_bytes()
    head = 16 + 8192 + 4 * 36
    for position in [*range(0, 16, 3), *range(16, head, 211), *range(len(sound) - 100, len(sound), 7)]:
        flip(path, position)
        store = open_store()
        assert store.artifacts() == [], position
        assert len(store.problems) == 1
        store.close()
        path.write_bytes(sound)
    store = open_store()
    check_whole(store, FIRST)


def test_a_pack_under_another_artifacts_name_is_set_aside(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    publish(store, FIRST)
    store.close()
    other = pack_path(tmp_path, EIGHT_CHUNKS)
    other.parent.mkdir(exist_ok=True)
    other.write_bytes(pack_path(tmp_path, FIRST).read_bytes())
    store = open_store()
    assert [record.hash for record in store.artifacts()] == [FIRST.hash]
    assert [problem.path for problem in store.problems] == [other]
    assert not other.exists()


# --- strangers --------------------------------------------------------------------------------------------------------


def test_strangers_among_the_packs_are_left_alone_and_reported(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    publish(store, FIRST)
    store.close()
    packs = tmp_path / "store" / "packs"
    real = pack_path(tmp_path, FIRST)
    outside = tmp_path / "outside.kva"
    outside.write_bytes(real.read_bytes())
    (packs / "notes.txt").write_text("x")
    (packs / "zz").mkdir()
    (packs / "zz" / real.name).write_bytes(real.read_bytes())
    (packs / "link").symlink_to(tmp_path)
    other = pack_path(tmp_path, EIGHT_CHUNKS)
    other.parent.mkdir(exist_ok=True)
    other.symlink_to(outside)
    fifo = pack_path(tmp_path, SECOND)
    fifo.parent.mkdir(exist_ok=True)
    os.mkfifo(fifo)
    store = open_store()
    assert [record.hash for record in store.artifacts()] == [FIRST.hash]
    found = {problem.path.relative_to(packs) for problem in store.problems}
    assert found == {
        Path("notes.txt"),
        Path("link"),
        Path("zz") / real.name,
        other.relative_to(packs),
        fifo.relative_to(packs),
    }
    assert outside.read_bytes() == real.read_bytes()
    assert (packs / "notes.txt").exists()
    # A name that is taken by a stranger is not written through.
    publish(store, EIGHT_CHUNKS)
    assert other.is_symlink()
    check_whole(store, EIGHT_CHUNKS)


def test_a_pack_replaced_by_a_link_is_not_followed(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    publish(store, FIRST)
    path = pack_path(tmp_path, FIRST)
    moved = tmp_path / "moved"
    path.rename(moved)
    path.symlink_to(moved)
    with pytest.raises(StoreError):
        store.read_chunk(FIRST.entries[0].hash)


@pytest.mark.parametrize("name", ["../../escape", "..", "x" * 59, ".hidden", "bafyr4i"])
def test_marker_files_with_strange_names_mean_nothing(open_store: OpenStore, tmp_path: Path, name: str) -> None:
    store = open_store()
    publish(store, FIRST)
    store.close()
    for folder in ("pins", "removed"):
        base = Path(name).name
        if base not in {"..", ""}:
            (tmp_path / "store" / folder / base).touch()
    store = open_store()
    check_whole(store, FIRST)


def test_a_forged_pack_is_set_aside(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    publish(store, FIRST)
    store.close()
    path = pack_path(tmp_path, FIRST)
    data = bytearray(path.read_bytes())
    (length,) = (int.from_bytes(data[16:20], "little"),)
    data[16 + 4 + length - 1] ^= 1
    path.write_bytes(data)
    store = open_store()
    assert store.artifacts() == []
    assert "signature" in store.problems[0].reason


def test_only_the_owner_can_read_anything(open_store: OpenStore, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store = open_store()
        publish(store, FIRST, pinned=True)
        publish(store, SECOND)
        store.remove(FIRST.hash)
        writer = store.begin_pack(4)
        fill(writer, FIRST, [0])
        store.export(SECOND.hash, tmp_path / "x.kva")
        for path in [tmp_path / "store", *(tmp_path / "store").rglob("*"), tmp_path / "x.kva"]:
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode == (0o700 if path.is_dir() else 0o600), path
        writer.abort()
    finally:
        os.umask(old)


def test_a_store_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(KvnetError, match="opening the store"):
        DiskStore.open(tmp_path / "file" / "store", quota_bytes=1, min_free_bytes=0)


def test_reading_goes_on_in_other_threads_while_artifacts_come_and_go(open_store: OpenStore) -> None:
    store = open_store()
    publish(store, FIRST, pinned=True)
    stop = threading.Event()

    def read() -> int:
        rounds = 0
        while not stop.is_set():
            check_whole(store, FIRST)
            assert store.find_prefix(MINE.id, FIRST.keys[::-1])[0] == (FIRST.hash, 3)
            assert store.usage().pinned == 1
            rounds += 1
        return rounds

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read) for _ in range(3)]
        for _ in range(5):
            for artifact in (SECOND, EIGHT_CHUNKS):
                publish(store, artifact)
            store.remove(SECOND.hash)
            store.collect_garbage(everything=True)
        stop.set()
        assert all(reader.result() > 0 for reader in readers)
    check_whole(store, FIRST)


# --- less usual -------------------------------------------------------------------------------------------------------


def test_a_pack_of_a_later_version_is_left_alone_and_reported(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    publish(store, FIRST)
    store.close()
    path = pack_path(tmp_path, FIRST)
    with path.open("r+b") as file:
        file.seek(8)
        file.write((2).to_bytes(4, "little"))
    later = path.read_bytes()
    store = open_store()
    assert store.artifacts() == []
    assert "left alone" in store.problems[0].reason
    assert path.read_bytes() == later
    # It still counts.
    assert store.usage().held_bytes > len(later)


def test_two_damaged_packs_of_one_name_are_both_set_aside(open_store: OpenStore, tmp_path: Path) -> None:
    for _ in range(2):
        store = open_store()
        publish(store, FIRST)
        store.close()
        os.truncate(pack_path(tmp_path, FIRST), 100)
        open_store()
    assert len(list((tmp_path / "store" / "quarantine").iterdir())) == 2


def test_a_damaged_pack_that_cannot_be_moved_is_not_used_either(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    publish(store, FIRST)
    store.close()
    os.truncate(pack_path(tmp_path, FIRST), 100)
    store = open_store(FaultyFiles("rename", 1))
    assert store.artifacts() == []
    assert len(store.problems) == 1


def test_a_damaged_chunk_is_not_carried_into_a_compacted_pack(open_store: OpenStore) -> None:
    store = open_store()
    publish(store, FIRST)
    publish(store, SECOND)
    location = store.locate_all([FIRST.entries[1].hash])[0]
    assert location is not None
    flip(location.path, location.offset)
    store.remove(FIRST.hash)
    assert not store.has_chunk(FIRST.entries[1].hash)
    record = store.get(SECOND.hash)
    assert record is not None
    assert not record.complete
    assert store.verify(SECOND.hash).missing == (2,)
    publish(store, SECOND)
    check_whole(store, SECOND)


def test_garbage_that_could_not_be_compacted_is_compacted_later(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    publish(store, FIRST)
    publish(store, SECOND)
    # Of the syncs of a removal, the second is that of the new pack.
    store = open_store(FaultyFiles("sync", 2, errno.ENOSPC))
    store.remove(FIRST.hash)
    packs = list((tmp_path / "store" / "packs").rglob("*.kva"))
    assert any(FIRST.chunks[0] in path.read_bytes() for path in packs)
    store.collect_garbage()
    packs = list((tmp_path / "store" / "packs").rglob("*.kva"))
    assert not any(FIRST.chunks[0] in path.read_bytes() for path in packs)
    check_whole(store, SECOND)


def test_room_is_first_made_from_what_nobody_uses(open_store: OpenStore) -> None:
    base, longer = sample(range(5000)), sample([*range(256), *range(90_000, 90_300)])
    store = open_store()
    publish(store, base)
    publish(store, longer)
    store = open_store(FaultyFiles("sync", 2, errno.ENOSPC))
    store.remove(base.hash)
    held = store.usage().held_bytes
    assert held > base.size_bytes
    store = open_store(quota_bytes=held)
    assert store.tidy(unused_s=1e9).removed == ()
    store.begin_pack(4, expected_bytes=base.size_bytes // 2).abort()
    check_whole(store, longer)


def test_a_reservation_that_fails_leaves_nothing(
    open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = open_store()
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(StoreFullError, match="reserving a pack"):
        store.begin_pack(4, expected_bytes=1000)
    assert files_of(tmp_path / "store") == []


@pytest.mark.parametrize("operation", ["create", "write", "sync"])
def test_a_failed_export_leaves_no_file(open_store: OpenStore, tmp_path: Path, operation: str) -> None:
    publish(open_store(), FIRST)
    store = open_store(FaultyFiles(operation, 1, errno.ENOSPC))
    with pytest.raises(StoreFullError, match="writing"):
        store.export(FIRST.hash, tmp_path / "x.kva")
    assert not (tmp_path / "x.kva").exists()


def test_an_export_ends_at_the_first_damaged_chunk(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    publish(store, FIRST)
    location = store.locate_all([FIRST.entries[2].hash])[0]
    assert location is not None
    flip(location.path, location.offset)
    with pytest.raises(IntegrityError):
        store.export(FIRST.hash, tmp_path / "x.kva")
    assert not (tmp_path / "x.kva").exists()


def test_a_fetch_that_cannot_fit_ends_early(open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvnet.store.writer.ROOM_STEP_BYTES", 100_000)
    store = open_store(quota_bytes=400_000)
    artifact = sample(range(20_000))
    writer = store.begin_pack(len(artifact.chunks))
    with pytest.raises(StoreFullError):
        fill(writer, artifact)
    assert writer.size_bytes < 400_000
    writer.abort()
    assert store.usage().held_bytes < 400_000


def test_records_are_right_also_when_few_are_kept_in_memory(open_store: OpenStore) -> None:
    store = open_store()
    store._records = RecordCache(max_entries=5)
    for artifact in (FIRST, SECOND, EIGHT_CHUNKS):
        publish(store, artifact)
    for _ in range(2):
        for artifact in (FIRST, SECOND, EIGHT_CHUNKS):
            check_whole(store, artifact)


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM artifacts",
        "UPDATE artifacts SET hash = x'00'",
        "UPDATE packs SET artifact = x'00'",
        "UPDATE packs SET name = '../../elsewhere'",
        "DROP TABLE refs",
        "ALTER TABLE packs RENAME COLUMN name TO label",
        "DELETE FROM artifacts; DELETE FROM refs; DELETE FROM chunks",
    ],
)
def test_an_index_that_lost_an_artifact_does_not_cost_its_pack(
    open_store: OpenStore, tmp_path: Path, damage: str
) -> None:
    store = open_store()
    publish(store, FIRST)
    store.close()
    with sqlite3.connect(tmp_path / "store" / "index.sqlite") as database:
        database.executescript(damage)
    database.close()
    check_whole(open_store(), FIRST)


@pytest.mark.parametrize("consistent", [False, True])
def test_a_manifest_changed_in_the_index_is_not_believed(
    open_store: OpenStore, tmp_path: Path, consistent: bool
) -> None:
    store = open_store()
    publish(store, FIRST)
    store.close()
    with sqlite3.connect(tmp_path / "store" / "index.sqlite") as database:
        database.execute("UPDATE artifacts SET envelope = ?", (SECOND.envelope,))
        if consistent:
            database.execute("UPDATE artifacts SET pages = ?", (b"".join(SECOND.pages),))
    database.close()
    store = open_store()
    with pytest.raises(KvnetError):
        store.artifacts()
    store.rebuild(keys_of)
    check_whole(store, FIRST)
