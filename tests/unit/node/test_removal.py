from pathlib import Path

import pytest

from kvnet.errors import NotInStoreError, StoreError
from kvnet.format.hashes import ChunkHash, artifact_text, short_text
from kvnet.store.memory import MemoryStore
from kvnet.store.names import NameBook, NamedVersion
from kvnet_node.commands.artifacts import render_removed
from kvnet_node.operations.removing import remove_meant, what_stays
from kvnet_node.operations.requests import RemoveResult
from tests.unit.store.faults import FaultyFiles
from tests.unit.store.samples import Sample, publish, sample

OLD, NEW = sample(range(300)), sample(range(600))


@pytest.fixture
def names(tmp_path: Path) -> NameBook:
    return NameBook(tmp_path / "names")


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    for artifact in (OLD, NEW):
        publish(store, artifact, pinned=True)
    return store


def name(names: NameBook, text: str, artifact: Sample, *others: Sample) -> NamedVersion:
    return names.add(
        text,
        artifact=artifact.hash,
        model="",
        fingerprint=artifact.manifest.fingerprint.hash,
        context=b"",
        file_order=(),
        created_s=0,
        others=[other.hash for other in others],
    )


def test_removing_a_name_removes_its_newest_version_and_names_what_remains(store: MemoryStore, names: NameBook) -> None:
    name(names, "docs", OLD)
    result = remove_meant(store, names, name(names, "docs", NEW))
    assert (result.names, result.removed, result.remaining) == (["docs@2"], True, ["docs@1"])
    assert store.get(NEW.hash) is None
    assert store.get(OLD.hash) is not None
    assert names.resolve("docs").version == 1
    assert "docs@1 remains" in render_removed(result)


def test_an_artifact_stays_while_another_name_means_it(store: MemoryStore, names: NameBook) -> None:
    mine, theirs = name(names, "mine", NEW), name(names, "theirs", NEW)
    result = remove_meant(store, names, mine)
    assert (result.names, result.removed, result.kept_by, result.freed_bytes) == (["mine@1"], False, ["theirs@1"], 0)
    assert render_removed(result) == "removed the name mine@1; its artifact stays, as theirs@1"
    assert store.get(NEW.hash) is not None
    assert remove_meant(store, names, theirs).removed
    assert store.get(NEW.hash) is None


def test_a_hash_removes_the_artifact_and_all_its_names(store: MemoryStore, names: NameBook) -> None:
    name(names, "mine", NEW), name(names, "theirs", NEW), name(names, "docs", OLD)
    result = remove_meant(store, names, NEW.hash)
    assert (sorted(result.names), result.removed) == (["mine@1", "theirs@1"], True)
    assert names.names() == ["docs"]
    assert artifact_text(NEW.hash) in render_removed(result)


def test_a_name_whose_artifact_is_gone_can_be_removed(store: MemoryStore, names: NameBook) -> None:
    version = name(names, "docs", NEW)
    store.remove(NEW.hash)
    result = remove_meant(store, names, version)
    assert (result.names, result.removed) == (["docs@1"], False)
    assert "not here any more" in render_removed(result)


def test_a_hash_of_nothing_held_is_not_in_the_store(store: MemoryStore, names: NameBook) -> None:
    store.remove(NEW.hash)
    with pytest.raises(NotInStoreError):
        remove_meant(store, names, NEW.hash)


def test_a_name_takes_the_same_state_in_other_codecs_with_it(store: MemoryStore, names: NameBook) -> None:
    mine = name(names, "mine", OLD, NEW)
    theirs = name(names, "theirs", NEW)
    remove_meant(store, names, mine)
    assert store.get(OLD.hash) is None
    assert store.get(NEW.hash) is not None
    remove_meant(store, names, theirs)
    publish(store, OLD, pinned=True)
    publish(store, NEW, pinned=True)
    result = remove_meant(store, names, name(names, "both", OLD, NEW))
    assert store.artifacts() == []
    assert result.freed_bytes > OLD.manifest.total_size_bytes


def test_a_removal_that_ends_half_way_is_finished_by_saying_it_again(store: MemoryStore, tmp_path: Path) -> None:
    names = NameBook(tmp_path / "names", FaultyFiles("rename", 2))
    version = name(names, "docs", OLD, NEW)
    with pytest.raises(StoreError):
        remove_meant(store, names, version)
    assert remove_meant(store, names, names.resolve("docs")).names == ["docs@1"]
    assert (names.names(), store.artifacts()) == ([], [])


def chunks_of(artifact: Sample) -> dict[ChunkHash, int]:
    return {entry.hash: entry.length_bytes for entry in artifact.entries}


def test_what_others_need_of_it_stays_and_they_are_named(store: MemoryStore, names: NameBook) -> None:
    team = bytes(NEW.manifest.namespace)
    stays = remove_meant(store, names, OLD.hash), what_stays(store, names, chunks_of(OLD), {team: "team"})
    shared = [each for each in chunks_of(OLD) if each in chunks_of(NEW)]
    assert stays[1] == (sum(chunks_of(OLD)[each] for each in shared), [f"{short_text(NEW.hash)} in team"])
    assert 0 < stays[1][0] < sum(chunks_of(OLD).values())
    name(names, "docs", NEW)
    assert what_stays(store, names, chunks_of(OLD), {team: "mine"})[1] == ["docs@1"]
    remove_meant(store, names, NEW.hash)
    assert what_stays(store, names, chunks_of(OLD), {}) == (0, [])


def test_why_something_stays_is_said_beside_what_was_freed() -> None:
    def said(stays_bytes: int, *needed_by: str) -> str:
        return render_removed(
            RemoveResult("bafyr4ia", ["docs@1"], 0, stays_bytes=stays_bytes, needed_by=list(needed_by))
        )

    assert said(0) == "removed docs@1 and its artifact bafyr4ia, freed 0 B"
    assert said(617_000, "notes@2", "bafyr4ib in team").endswith(
        "freed 0 B; 617 kB of it stay, as part of notes@2; bafyr4ib in team"
    )
    assert said(617_000, *"abcde").endswith("as part of a; b; c and 2 others")
    assert said(617_000).endswith("617 kB of it stay while something reads them")
