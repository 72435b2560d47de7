"""Packs that were never finished, and what was noted of them: taken in by the next opening, or gone without a trace."""

import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from kvnet.errors import MalformedError, StoreError
from kvnet.store.beginnings import VERSION, decode_note, encode_note, note_of
from kvnet.store.disk import DiskStore
from kvnet.store.interface import PackWriter, SignedBeginning
from kvnet.store.memory import MemoryStore
from kvnet.store.osfile import OsFiles
from tests.unit.store.faults import FaultyFiles
from tests.unit.store.samples import FRIEND, MINE, check_whole, fill, keys_of, publish, sample
from tests.unit.store.test_crash import DyingFiles

WHOLE = sample(range(2000), context=b"context")
SHORT = sample(range(1024))
HELD = sample(range(512))
HEAD = SHORT.manifest.plan().first_tile
"""Its chunks before this one are token ids; the tiles of both artifacts agree after it."""

QUOTA = 1 << 30


def opened(directory: Path, files: OsFiles | None = None, quota_bytes: int = QUOTA) -> DiskStore:
    return DiskStore.open(directory, quota_bytes=quota_bytes, min_free_bytes=0, files=files, keys_of=keys_of)


def noted(store: DiskStore, *, references: int = 0, **changes: object) -> PackWriter:
    """A pack for the whole in which all of the short one lies, but for some of its first tiles, and a note of it."""
    writer = store.begin_pack(len(WHOLE.chunks))
    offsets = {}
    skipped = WHOLE.manifest.plan().first_tile - HEAD
    for index in range(HEAD, len(SHORT.chunks)):
        if index >= HEAD + references:
            offsets[index] = writer.next_offset
            writer.put(index + skipped, SHORT.chunks[index])
    beginning = SignedBeginning(SHORT.envelope, SHORT.entries, dict(enumerate(SHORT.chunks[:HEAD])), offsets)
    store.note_beginning(writer, replace(beginning, **changes))  # type: ignore[arg-type]
    return writer


def killed(store: DiskStore) -> None:
    """What a process that is killed does: nothing more, and its files are closed."""
    store._parts.close()
    for writer in store._parts.space.leases:
        assert writer._handle is not None
        store._parts.files.close(writer._handle)


def left(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "tmp").iterdir())


def test_what_was_noted_is_an_artifact_once_the_store_opens_again(tmp_path: Path) -> None:
    store = opened(tmp_path)
    noted(store)
    assert store.artifacts() == []
    assert not store.has_chunk(SHORT.entries[-1].hash)
    killed(store)
    for _ in range(2):
        store = opened(tmp_path)
        check_whole(store, SHORT)
        assert [one.pinned for one in store.artifacts()] == [False]
        assert store.find_prefix(MINE.id, SHORT.keys[::-1]) == [(SHORT.hash, 4)]
        assert left(tmp_path) == []
        store.close()


@pytest.mark.parametrize("end", ["publish", "abort", "close"])
def test_the_end_of_a_pack_takes_its_note_back(tmp_path: Path, end: str) -> None:
    store = opened(tmp_path)
    writer = noted(store)
    assert len(left(tmp_path)) == 2
    if end == "abort":
        writer.abort()
    elif end == "publish":
        plan = WHOLE.manifest.plan()
        rest = [i for i in range(len(plan)) if i < plan.first_tile or i >= plan.first_tile + len(SHORT.chunks) - HEAD]
        fill(writer, WHOLE, rest)
        writer.publish(WHOLE.envelope, keys=WHOLE.keys, pinned=False)
        check_whole(store, WHOLE)
    else:
        store.close()
    assert left(tmp_path) == []
    with pytest.raises(StoreError, match="expected a"):
        store.note_beginning(writer, SignedBeginning(SHORT.envelope, SHORT.entries, {}, {}))
    store.close()


def test_a_later_note_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    store = opened(tmp_path)
    writer = noted(store)
    first = note_of(writer.path).read_bytes()
    again = SignedBeginning(HELD.envelope, HELD.entries, dict(enumerate(HELD.chunks)), {})
    store.note_beginning(writer, again)
    assert note_of(writer.path).read_bytes() != first
    killed(store)
    store = opened(tmp_path)
    assert [one.hash for one in store.artifacts()] == [HELD.hash]
    store.close()


def test_chunks_that_are_held_are_used_where_they_lie_and_what_is_replaced_goes(tmp_path: Path) -> None:
    for pinned in (False, True):
        store = opened(tmp_path / str(pinned))
        publish(store, HELD)
        noted(store, references=2, replaces=HELD.hash)
        if pinned:
            store.pin(HELD.hash)
        killed(store)
        store = opened(tmp_path / str(pinned))
        check_whole(store, SHORT)
        assert {one.hash for one in store.artifacts()} == ({HELD.hash, SHORT.hash} if pinned else {SHORT.hash})
        store.close()


def test_without_a_chunk_that_was_held_nothing_is_taken_in(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(tmp_path)
    publish(store, HELD)
    noted(store, references=2, replaces=HELD.hash)
    killed(store)
    next((tmp_path / "packs").rglob("*.kva")).unlink()
    store = opened(tmp_path)
    assert store.artifacts() == []
    assert "not held here" in caplog.text
    assert left(tmp_path) == []
    store.close()


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda note, _pack: tear(note), id="torn note"),
        pytest.param(lambda note, _pack: note.write_bytes(b""), id="empty note"),
        pytest.param(lambda note, _pack: note.write_bytes(bytes(note.stat().st_size)), id="note of zeros"),
        pytest.param(lambda note, _pack: flip(note, 100), id="flipped note"),
        pytest.param(lambda note, _pack: note.unlink(), id="no note"),
        pytest.param(lambda _note, pack: tear(pack), id="torn pack"),
        pytest.param(lambda _note, pack: pack.write_bytes(b""), id="empty pack"),
        pytest.param(lambda _note, pack: pack.unlink(), id="no pack"),
        pytest.param(lambda _note, pack: (pack.unlink(), pack.symlink_to("/etc/hostname")), id="link"),
    ],
)
def test_damage_keeps_nothing_and_the_store_opens(tmp_path: Path, damage: Callable[[Path, Path], object]) -> None:
    store = opened(tmp_path)
    publish(store, HELD)
    writer = noted(store)
    killed(store)
    damage(note_of(writer.path), writer.path)
    store = opened(tmp_path)
    assert [one.hash for one in store.artifacts()] == [HELD.hash]
    check_whole(store, HELD)
    assert left(tmp_path) == []
    store.close()


def test_every_bit_of_a_tile_counts(tmp_path: Path) -> None:
    for number, index in enumerate((HEAD, len(SHORT.chunks) - 1)):
        store = opened(tmp_path / str(number))
        writer = noted(store)
        killed(store)
        beginning = decode_note(note_of(writer.path).read_bytes())
        flip(writer.path, beginning.offsets[index] + SHORT.entries[index].length_bytes - 1)
        store = opened(tmp_path / str(number))
        assert store.artifacts() == []
        store.close()


def test_a_note_says_what_it_was_told() -> None:
    for replaces in (None, HELD.hash):
        one = SignedBeginning(SHORT.envelope, SHORT.entries, {0: b"tokens"}, {1: 77, 2: 99}, replaces)
        assert decode_note(encode_note(one)) == one


@pytest.mark.parametrize(
    "change",
    [
        lambda note: [VERSION + 1, *note[1:]],
        lambda note: note[:-1],
        lambda note: [*note, 1],
        lambda note: [note[0], note[1], "text", *note[3:]],
        lambda _note: "a note",
    ],
)
def test_notes_of_another_form_are_refused(change: Callable[[list[object]], object]) -> None:
    note = msgspec.msgpack.decode(encode_note(SignedBeginning(SHORT.envelope, SHORT.entries, {}, {})), strict=False)
    with pytest.raises(MalformedError, match="note of a beginning"):
        decode_note(msgspec.msgpack.encode(change(note)))


def test_a_chunk_list_that_was_not_signed_is_not_believed(tmp_path: Path) -> None:
    other = sample(range(1024), key=FRIEND)
    store = opened(tmp_path)
    noted(store, entries=(*SHORT.entries[:-1], other.entries[0]))
    killed(store)
    store = opened(tmp_path)
    assert store.artifacts() == []
    store.close()


def test_what_does_not_fit_is_dropped_and_nothing_else_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(tmp_path)
    publish(store, HELD, pinned=True)
    store.close()
    store = opened(tmp_path)
    quota_bytes = store.usage().held_bytes + 1000
    noted(store)
    killed(store)
    store = opened(tmp_path, quota_bytes=quota_bytes)
    assert [one.hash for one in store.artifacts()] == [HELD.hash]
    assert "expected room for" in caplog.text
    assert left(tmp_path) == []
    store.close()


@pytest.mark.parametrize("operation", ["create", "write", "rename"])
def test_a_note_that_cannot_be_written_says_so_and_leaves_the_earlier_one(tmp_path: Path, operation: str) -> None:
    files = FaultyFiles()
    store = opened(tmp_path, files)
    writer = noted(store)
    files.fail_once(operation, 28)
    with pytest.raises(StoreError):
        store.note_beginning(writer, SignedBeginning(HELD.envelope, HELD.entries, dict(enumerate(HELD.chunks)), {}))
    killed(store)
    store = opened(tmp_path)
    assert [one.hash for one in store.artifacts()] == [SHORT.hash]
    assert left(tmp_path) == []
    store.close()


def test_packs_that_somebody_is_filling_are_left_alone_when_a_drive_is_back(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    noted(store)
    (tmp_path / "store").rename(tmp_path / "unplugged")
    assert not store.look()
    (tmp_path / "unplugged").rename(tmp_path / "store")
    assert store.look()
    assert store.artifacts() == []
    assert left(tmp_path / "store") == []
    store.close()


def test_a_store_in_memory_notes_nothing() -> None:
    store = MemoryStore()
    writer = store.begin_pack(len(WHOLE.chunks))
    store.note_beginning(writer, SignedBeginning(SHORT.envelope, SHORT.entries, {}, {}))
    store.close()


VICTIM = """
import sys
from pathlib import Path
from tests.unit.store.test_beginnings import DyingFiles, opened
opened(Path(sys.argv[1]), DyingFiles(int(sys.argv[2]))).close()
print("survived", flush=True)
"""


def died_taking_in(repository_root: Path, directory: Path, step: int) -> bool:
    """Opens a store with a note in a process that dies at a step; whether the artifact is there afterwards, whole."""
    store = opened(directory)
    noted(store)
    killed(store)
    ran = subprocess.run(
        [sys.executable, "-c", VICTIM, str(directory), str(step)],
        cwd=repository_root,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    store = opened(directory)
    assert store.problems == ()
    assert left(directory) == []
    there = bool(store.artifacts())
    if there:
        check_whole(store, SHORT)
    store.close()
    return there


def steps_of_taking_in(directory: Path) -> int:
    store = opened(directory)
    noted(store)
    killed(store)
    files = DyingFiles(0)
    store = opened(directory, files)
    check_whole(store, SHORT)
    steps = files.seen
    store.close()
    return steps


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_process_that_is_killed_while_it_takes_a_beginning_in_leaves_all_of_it_or_nothing(
    repository_root: Path, tmp_path: Path, share: float
) -> None:
    steps = steps_of_taking_in(tmp_path / "counting")
    there = died_taking_in(repository_root, tmp_path / "store", 1 + round(share * (steps - 1)))
    assert there or share == 0.5


@pytest.mark.nightly
def test_wherever_it_is_killed_while_it_takes_a_beginning_in_all_of_it_is_there_or_nothing(
    repository_root: Path, tmp_path: Path
) -> None:
    steps = steps_of_taking_in(tmp_path / "counting")
    there = [died_taking_in(repository_root, tmp_path / str(step), step) for step in range(1, steps + 1)]
    # Between the removal of the note and the publishing it is lost: what is removed must not come back from a note.
    assert there.count(False) <= 15
    assert there[0]
    assert there[-1]
