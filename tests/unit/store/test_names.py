import errno
import os
import stat
from pathlib import Path

import pytest

from kvnet.errors import MalformedError, StoreError, UnknownNameError, UsageError
from kvnet.format.hashes import ArtifactHash, FingerprintHash
from kvnet.store.names import NameBook, NamedVersion
from tests.unit.store.faults import FaultyFiles

FINGERPRINT = FingerprintHash(b"f" * 32)


def artifact(number: int) -> ArtifactHash:
    return ArtifactHash(bytes([number]) * 32)


def add(book: NameBook, name: str, number: int) -> NamedVersion:
    return book.add(
        name,
        artifact=artifact(number),
        model="a model",
        fingerprint=FINGERPRINT,
        context=b'{"messages":\xff}' * number,
        file_order=("b.py", "a.py", "ä/ö.md"),
        created_s=1_800_000_000 + number,
    )


@pytest.fixture
def book(tmp_path: Path) -> NameBook:
    return NameBook(tmp_path / "names")


def test_versions_count_up_from_one(book: NameBook, tmp_path: Path) -> None:
    assert book.newest("docs") is None
    assert book.versions("docs") == []
    first, second = add(book, "docs", 1), add(book, "docs", 2)
    assert (first.version, second.version) == (1, 2)
    again = NameBook(tmp_path / "names")
    assert again.versions("docs") == [first, second]
    assert again.newest("docs") == second
    assert again.resolve("docs") == second
    assert again.resolve("docs@1") == first
    assert again.resolve("docs@2").text == "docs@2"
    assert again.names() == ["docs"]


def test_eleven_versions_are_in_the_order_of_their_numbers(book: NameBook) -> None:
    for number in range(1, 12):
        add(book, "docs", number)
    assert [version.version for version in book.versions("docs")] == list(range(1, 12))
    assert book.resolve("docs").version == 11


@pytest.mark.parametrize("name", ["a", "0", "docs", "a.b_c-d", "a" * 64, "privates", "bafyr4", "1.json"])
def test_names_that_follow_the_rule_are_taken(book: NameBook, name: str) -> None:
    assert add(book, name, 1).version == 1
    assert book.resolve(name).name == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a" * 65,
        ".a",
        "-a",
        "_a",
        "A",
        "a b",
        "a/b",
        "../a",
        "..",
        "a\0",
        "a\n",
        "ä",
        "private",
        "bafyr4i",
        "bafyr4iabcdefgh",
        "a@1",
    ],
)
def test_other_names_are_refused(book: NameBook, name: str, tmp_path: Path) -> None:
    for call in (lambda: add(book, name, 1), lambda: book.newest(name), lambda: book.remove(name)):
        with pytest.raises(UsageError):
            call()
    assert not (tmp_path / "names").exists()


def test_unknown_names_and_versions_are_said_to_be_unknown(book: NameBook) -> None:
    with pytest.raises(UnknownNameError, match="no named context docs") as caught:
        book.resolve("docs")
    assert "kvnet add" in caught.value.hint
    assert "`kvnet fetch docs`" in caught.value.hint
    add(book, "docs", 1)
    with pytest.raises(UnknownNameError, match="there are: docs"):
        book.resolve("other")
    with pytest.raises(UnknownNameError, match="no version 2 of docs; there are: 1"):
        book.resolve("docs@2")


@pytest.mark.parametrize("text", ["docs@", "docs@0", "docs@01", "docs@-1", "docs@x", "docs@1@1", "docs@9999999999"])
def test_a_malformed_version_is_a_usage_error(book: NameBook, text: str) -> None:
    add(book, "docs", 1)
    with pytest.raises(UsageError, match="expected NAME"):
        book.resolve(text)


def test_where_a_hash_may_stand_too_anything_else_is_none(book: NameBook) -> None:
    first = add(book, "docs", 1)
    assert book.find("docs") == book.find("docs@1") == first
    assert book.find("docs@2") is book.find("bafyr4iabcdefgh") is book.find("../..") is book.find("") is None


def test_a_removed_version_gives_its_number_to_nobody(book: NameBook, tmp_path: Path) -> None:
    for number in range(1, 4):
        add(book, "docs", number)
    assert book.remove("docs", 3) == ["docs@3"]
    assert book.remove("docs", 3) == []
    assert book.resolve("docs").version == 2
    assert (tmp_path / "names" / "docs" / "3.gone").read_bytes() == b""
    assert add(book, "docs", 4).version == 4
    assert book.remove("docs") == ["docs@1", "docs@2", "docs@4"]
    assert book.names() == []
    assert os.listdir(tmp_path / "names") == []
    assert add(book, "docs", 5).version == 1


def test_forgetting_an_artifact_forgets_every_name_of_it(book: NameBook) -> None:
    add(book, "docs", 1)
    add(book, "docs", 2)
    add(book, "other", 1)
    assert book.names_of(artifact(1)) == ["docs@1", "other@1"]
    assert {one: [v.text for v in versions] for one, versions in book.by_artifact().items()} == {
        artifact(1): ["docs@1", "other@1"],
        artifact(2): ["docs@2"],
    }
    assert book.forget(artifact(1)) == ["docs@1", "other@1"]
    assert book.names() == ["docs"]
    assert book.resolve("docs").version == 2
    assert book.forget(artifact(1)) == []


@pytest.mark.parametrize("operation", ["create", "write", "sync", "rename", "sync_directory"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_leaves_the_versions_as_they_were(tmp_path: Path, operation: str, code: int) -> None:
    first = add(NameBook(tmp_path / "names"), "docs", 1)
    book = NameBook(tmp_path / "names", FaultyFiles(operation, 1, code))
    with pytest.raises(StoreError, match="naming docs"):
        add(book, "docs", 2)
    versions = NameBook(tmp_path / "names").versions("docs")
    assert versions[0] == first
    # After the rename the version is there in one piece; before it, it is not there at all.
    assert [version.version for version in versions] == ([1, 2] if operation == "sync_directory" else [1])
    assert not [name for name in os.listdir(tmp_path / "names" / "docs") if name.endswith(".tmp")]


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[" * 100_000, b"\xff" * 100, b'{"format":2}', b'{"format":1,"artifact":""}']
)
def test_a_damaged_version_is_named_and_harms_no_other(book: NameBook, tmp_path: Path, content: bytes) -> None:
    first = add(book, "docs", 1)
    add(book, "docs", 2)
    add(book, "other", 3)
    (tmp_path / "names" / "docs" / "2.json").write_bytes(content)
    with pytest.raises(MalformedError, match="docs@2 is damaged"):
        book.resolve("docs")
    assert book.resolve("docs@1") == first
    assert sorted(book.by_artifact()) == [artifact(1), artifact(3)]
    assert add(book, "docs", 4).version == 3


def test_strangers_in_the_folders_mean_nothing(book: NameBook, tmp_path: Path) -> None:
    first = add(book, "docs", 1)
    names = tmp_path / "names"
    (names / "file").write_bytes(b"")
    (names / "UPPER").mkdir()
    (names / "empty").mkdir()
    (names / "linked").symlink_to(names / "docs")
    (names / "docs" / "0.json").write_bytes(b"")
    (names / "docs" / "02.json").write_bytes(b"")
    (names / "docs" / "notes").write_bytes(b"")
    (names / "docs" / "9.json").symlink_to(names / "docs" / "1.json")
    (names / "docs" / "7.json").mkdir()
    assert book.names() == ["docs"]
    assert book.versions("docs") == [first]


def test_versions_are_private_to_their_owner(book: NameBook, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        add(book, "docs", 1)
    finally:
        os.umask(old)
    for path in [tmp_path / "names", *(tmp_path / "names").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_a_version_may_mean_the_same_state_in_several_codecs(book: NameBook, tmp_path: Path) -> None:
    first = book.add(
        "docs",
        artifact=artifact(1),
        model="",
        fingerprint=FINGERPRINT,
        context=b"",
        file_order=(),
        created_s=0,
        others=[artifact(2)],
    )
    again = NameBook(tmp_path / "names")
    assert again.resolve("docs") == first
    assert (first.artifact, first.others) == (artifact(1), (artifact(2),))
    assert again.names_of(artifact(2)) == again.names_of(artifact(1)) == ["docs@1"]
    assert again.by_artifact() == {artifact(1): [first], artifact(2): [first]}


def test_what_a_killed_process_left_of_names_is_finished(book: NameBook, tmp_path: Path) -> None:
    for number in (1, 2):
        add(book, "docs", number)
    add(book, "gone", 3)
    folder, gone = tmp_path / "names" / "docs", tmp_path / "names" / "gone"
    (folder / "1.json").rename(folder / "1.gone")
    (gone / "1.json").rename(gone / "1.gone")
    (folder / ".3.tmp").write_bytes(b"half a text")
    (tmp_path / "names" / "empty").mkdir()
    (folder / "notes").write_bytes(b"a person's")
    book.tidy()
    assert sorted(path.name for path in folder.iterdir()) == ["1.gone", "2.json", "notes"]
    assert (folder / "1.gone").read_bytes() == b""
    assert [path.name for path in (tmp_path / "names").iterdir()] == ["docs"]
    assert (book.names(), add(book, "docs", 4).version) == (["docs"], 3)


def test_there_is_nothing_to_tidy_where_nothing_was_named(book: NameBook) -> None:
    book.tidy()
    assert book.names() == []
