"""Any order of publishing, removing, damaging, reopening and rebuilding keeps what a store promises."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvnet.errors import StoreError, StoreFullError
from kvnet.store.disk import DiskStore
from tests.unit.store.faults import FaultyFiles
from tests.unit.store.samples import MINE, Sample, check_whole, fill, keys_of, publish, sample

# They share the first two blocks, the first one, or nothing.
ARTIFACTS = [
    sample(range(300)),
    sample(range(600)),
    sample(range(800), context=b"context"),
    sample([*range(520), *range(9000, 9100)]),
    sample([*range(256), *range(5000, 5010)]),
    sample(range(40_000, 40_600)),
]
one_of = st.sampled_from(ARTIFACTS)


class StoreMachine(RuleBasedStateMachine):
    """A store beside a model of it: which artifacts are listed, which are pinned, what is held of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kvnet-test-"))
        self.listed: dict[int, set[int]] = {}
        self.pinned: set[int] = set()
        self.open()

    def open(self, files: FaultyFiles | None = None) -> None:
        self.store = DiskStore.open(
            self.folder / "store", quota_bytes=1 << 30, min_free_bytes=0, files=files, keys_of=keys_of
        )

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    @rule(artifact=one_of, pinned=st.booleans())
    def publish_whole(self, artifact: Sample, pinned: bool) -> None:
        publish(self.store, artifact, pinned=pinned)
        number = ARTIFACTS.index(artifact)
        self.listed[number] = set(range(len(artifact.chunks)))
        if pinned:
            self.pinned.add(number)

    @rule(artifact=one_of, data=st.data())
    def publish_part(self, artifact: Sample, data: st.DataObject) -> None:
        indices = data.draw(st.sets(st.integers(0, len(artifact.chunks) - 1)))
        publish(self.store, artifact, sorted(indices))
        self.listed.setdefault(ARTIFACTS.index(artifact), set()).update(indices)

    @rule(artifact=one_of)
    def abort(self, artifact: Sample) -> None:
        writer = self.store.begin_pack(len(artifact.chunks))
        fill(writer, artifact, [0])
        writer.abort()

    @rule(artifact=one_of, other=one_of)
    def remove_while_another_is_being_written(self, artifact: Sample, other: Sample) -> None:
        writer = self.store.begin_pack(len(artifact.chunks))
        fill(writer, artifact)
        if self.store.get(other.hash) is not None:
            self.store.remove(other.hash)
            self.listed.pop(ARTIFACTS.index(other))
            self.pinned.discard(ARTIFACTS.index(other))
        writer.publish(artifact.envelope, keys=artifact.keys, pinned=False)
        self.listed[ARTIFACTS.index(artifact)] = set(range(len(artifact.chunks)))

    @precondition(lambda self: self.listed)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.listed)))
        self.store.remove(ARTIFACTS[number].hash)
        del self.listed[number]
        self.pinned.discard(number)

    @precondition(lambda self: self.listed)
    @rule(data=st.data(), pinned=st.booleans())
    def pin_or_unpin(self, data: st.DataObject, pinned: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.listed)))
        if pinned:
            self.store.pin(ARTIFACTS[number].hash)
            self.pinned.add(number)
        else:
            self.store.unpin(ARTIFACTS[number].hash)
            self.pinned.discard(number)

    @rule()
    def collect_everything(self) -> None:
        self.store.collect_garbage(everything=True)
        self.listed = {number: held for number, held in self.listed.items() if number in self.pinned}

    @rule()
    def collect(self) -> None:
        assert self.store.collect_garbage().removed == ()

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.open()
        assert self.store.problems == ()

    @rule(lose_index=st.booleans())
    def rebuild(self, lose_index: bool) -> None:
        if lose_index:
            self.store.close()
            for path in (self.folder / "store").glob("index.sqlite*"):
                path.unlink()
            self.open()
        else:
            self.store.rebuild(keys_of, verify_chunks=True)

    @rule(
        artifact=one_of,
        operation=st.sampled_from(["create", "write", "truncate", "sync", "sync_directory", "rename"]),
        number=st.integers(1, 8),
    )
    def fail_to_publish(self, artifact: Sample, operation: str, number: int) -> None:
        self.store.close()
        self.open(FaultyFiles(operation, number))
        try:
            publish(self.store, artifact, pinned=True)
        except StoreFullError:
            raise
        except StoreError:
            pass
        else:
            self.listed[ARTIFACTS.index(artifact)] = set(range(len(artifact.chunks)))
            self.pinned.add(ARTIFACTS.index(artifact))
        self.store.close()
        self.open()

    @invariant()
    def what_is_listed_is_what_was_published(self) -> None:
        records = {record.hash: record for record in self.store.artifacts()}
        assert set(records) == {ARTIFACTS[number].hash for number in self.listed}
        for number, held in self.listed.items():
            artifact = ARTIFACTS[number]
            record = records[artifact.hash]
            assert record.pinned == (number in self.pinned)
            if len(held) == len(artifact.chunks):
                assert record.complete
            for index in held:
                assert self.store.read_chunk(artifact.entries[index].hash) == artifact.chunks[index]

    @invariant()
    def complete_artifacts_read_back_whole(self) -> None:
        by_hash = {artifact.hash: artifact for artifact in ARTIFACTS}
        for record in self.store.artifacts():
            if record.complete:
                check_whole(self.store, by_hash[record.hash])
                keys = by_hash[record.hash].keys
                assert (record.hash, len(keys)) in self.store.find_prefix(MINE.id, keys[::-1])

    @invariant()
    def nothing_else_is_held(self) -> None:
        used = {entry.hash for number in self.listed for entry in ARTIFACTS[number].entries}
        for artifact in ARTIFACTS:
            for entry in artifact.entries:
                assert entry.hash in used or not self.store.has_chunk(entry.hash)
        assert not any((self.folder / "store" / "tmp").iterdir())
        if not self.listed:
            assert not list((self.folder / "store").rglob("*.kva"))
            assert not any((self.folder / "store" / "removed").iterdir())


StoreMachine.TestCase.settings = settings(settings.default, max_examples=25, stateful_step_count=20)
TestStore = StoreMachine.TestCase
