"""The layout of documents: which files, in which order, and what stays in place when they change."""

import os
import subprocess
from pathlib import Path

import pytest

from kvnet.errors import UsageError
from kvnet.exchange import source
from kvnet.exchange.source import Layout, lay_out
from kvnet.exchange.source_rules import secret_text_reason


def git(folder: Path, *arguments: str) -> None:
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@example.org",
        "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@example.org",
    }  # fmt: skip
    subprocess.run(["git", "-C", str(folder), *arguments], check=True, env=environment, capture_output=True)


def write(folder: Path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def commit(folder: Path, files: dict[str, str | bytes]) -> None:
    write(folder, files)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "-m", "change")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    git(folder, "init", "--quiet")
    return folder


def reasons(layout: Layout) -> dict[str, str]:
    return {skipped.path: skipped.reason for skipped in layout.skipped}


def common_prefix(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_one_file_is_one_section_with_its_name(tmp_path: Path) -> None:
    write(tmp_path, {"notes.md": "hello"})
    layout = lay_out([tmp_path / "notes.md"])
    assert layout.text == "=== notes.md ===\nhello\n\n"
    assert [(file.path, file.size_bytes) for file in layout.files] == [("notes.md", 5)]
    assert layout.order == ("notes.md",)


def test_a_directory_without_git_is_laid_out_by_path(tmp_path: Path) -> None:
    write(tmp_path, {"b.txt": "b\n", "a/z.txt": "z\n", "a/y.txt": "y\n", "c.txt": ""})
    layout = lay_out([tmp_path])
    assert layout.order == ("a/y.txt", "a/z.txt", "b.txt", "c.txt")
    assert layout.text == ("=== a/y.txt ===\ny\n\n=== a/z.txt ===\nz\n\n=== b.txt ===\nb\n\n=== c.txt ===\n\n")


def test_the_same_files_elsewhere_give_the_same_text(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {"src/a.py": "a\n", "README.md": "r\n"}
    write(tmp_path / "one", files)
    write(tmp_path / "two", dict(reversed(files.items())))
    assert lay_out([tmp_path / "one"]).text == lay_out([tmp_path / "two"]).text


def test_files_that_fewest_commits_touched_come_first_and_ties_go_by_path(repository: Path) -> None:
    commit(repository, {"hot.py": "1\n", "warm.py": "1\n", "cold_b.py": "1\n", "cold_a.py": "1\n"})
    commit(repository, {"hot.py": "2\n", "warm.py": "2\n"})
    commit(repository, {"hot.py": "3\n"})
    assert lay_out([repository]).order == ("cold_a.py", "cold_b.py", "warm.py", "hot.py")


def test_order_is_kept_when_added_again_with_new_files_last_and_gone_ones_dropped(repository: Path) -> None:
    commit(repository, {"a.py": "a\n", "b.py": "b\n", "c.py": "c\n"})
    first = lay_out([repository]).order
    assert first == ("a.py", "b.py", "c.py")
    for round_ in range(3):
        commit(repository, {"a.py": f"{round_}\n", "z_new.py": f"{round_}\n", "new.py": "n\n"})
    (repository / "b.py").unlink()
    git(repository, "rm", "--quiet", "--cached", "b.py")
    assert lay_out([repository], previous_order=first).order == ("a.py", "c.py", "new.py", "z_new.py")


def test_editing_the_most_often_changed_of_thirty_files_keeps_three_quarters_of_the_text(repository: Path) -> None:
    commit(repository, {f"src/file_{i:02}.py": f"value = {i}\n" * 20 for i in range(30)})
    for round_ in range(5):
        commit(repository, {"src/file_03.py": f"value = {round_}\n" * 20})
    before = lay_out([repository])
    commit(repository, {"src/file_03.py": "edited = True\n" * 25})
    after = lay_out([repository], previous_order=before.order)
    assert before.order[-1] == "src/file_03.py"
    assert common_prefix(before.text, after.text) >= 0.75 * len(after.text)


def test_untracked_files_are_no_part_of_a_repository(repository: Path) -> None:
    commit(repository, {"kept.py": "k\n"})
    write(repository, {"scratch.py": "s\n"})
    assert lay_out([repository]).order == ("kept.py",)


def test_edits_that_are_not_committed_are_laid_out_as_they_stand_on_disk(repository: Path) -> None:
    commit(repository, {"kept.py": "old\n"})
    write(repository, {"kept.py": "new\n"})
    assert "new" in lay_out([repository]).text


def test_a_tracked_file_that_is_not_on_disk_is_listed(repository: Path) -> None:
    commit(repository, {"kept.py": "k\n", "gone.py": "g\n"})
    (repository / "gone.py").unlink()
    assert reasons(lay_out([repository])) == {"gone.py": "tracked, but not on disk"}


def test_a_folder_inside_a_repository_gives_its_own_tracked_files(repository: Path) -> None:
    commit(repository, {"docs/b.md": "b\n", "docs/a.md": "a\n", "src/x.py": "x\n"})
    commit(repository, {"docs/a.md": "a2\n"})
    assert lay_out([repository / "docs"]).order == ("b.md", "a.md")


def test_an_untracked_folder_inside_a_repository_follows_the_ignore_rules(repository: Path) -> None:
    commit(repository, {"x.py": "x\n"})
    write(repository, {"scratch/a.md": "a\n"})
    assert lay_out([repository / "scratch"]).order == ("a.md",)


def test_a_repository_without_a_commit_is_laid_out_by_path(repository: Path) -> None:
    write(repository, {"b.py": "b\n", "a.py": "a\n"})
    git(repository, "add", "--all")
    assert lay_out([repository]).order == ("a.py", "b.py")


def test_names_with_spaces_quotes_and_accents_survive_git(repository: Path) -> None:
    commit(repository, {'d é/a "b".txt': "a\n", "-dash.txt": "d\n", "[x].txt": "x\n"})
    commit(repository, {'d é/a "b".txt': "a2\n", "[x].txt": "x2\n"})
    commit(repository, {'d é/a "b".txt': "a3\n"})
    assert lay_out([repository]).order == ("-dash.txt", "[x].txt", 'd é/a "b".txt')


def test_git_variables_of_a_hook_do_not_redirect_us(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(repository, {"a.py": "a\n"})
    monkeypatch.setenv("GIT_DIR", "/nonexistent")
    assert lay_out([repository]).order == ("a.py",)


def test_settings_of_a_repository_run_no_program(repository: Path, tmp_path: Path) -> None:
    commit(repository, {"a.py": "a\n", "b.py": "b\n"})
    witness = tmp_path / "witness"
    script = tmp_path / "spy.sh"
    script.write_text(f"#!/bin/sh\ntouch {witness}\n")
    script.chmod(0o755)
    for key in ("core.fsmonitor", "core.pager", "gpg.program", "diff.external"):
        git(repository, "config", key, str(script))
    git(repository, "config", "log.showSignature", "true")
    assert lay_out([repository]).order == ("a.py", "b.py")
    assert not witness.exists()


def test_one_git_process_counts_the_commits_of_all_files(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(repository, {f"f{i}.py": "x\n" for i in range(40)})
    calls = tmp_path / "calls"
    wrapper = tmp_path / "bin" / "git"
    wrapper.parent.mkdir()
    real = subprocess.run(["which", "git"], capture_output=True, text=True, check=True).stdout.strip()
    wrapper.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    lay_out([repository])
    assert len([line for line in calls.read_text().splitlines() if " log " in line]) == 1
    assert len(calls.read_text().splitlines()) <= 4


def test_ignore_rules_apply_where_there_is_no_git(tmp_path: Path) -> None:
    write(tmp_path, {
        ".gitignore": "*.log\n/out/\n", "a.txt": "a\n", "x.log": "l\n", "out/o.txt": "o\n",
        "sub/.gitignore": "!keep.log\n", "sub/keep.log": "k\n", "sub/other.log": "l\n",
        "node_modules/m.js": "m\n", "p/__pycache__/c.py": "c\n",
        "p/m.pyc": "c\n",
    })  # fmt: skip
    layout = lay_out([tmp_path])
    assert layout.order == (".gitignore", "a.txt", "sub/.gitignore", "sub/keep.log")
    assert reasons(layout) == {
        "x.log": "ignored by .gitignore", "out/": "ignored by .gitignore", "sub/other.log": "ignored by .gitignore",
        "node_modules/": "ignored: a node_modules folder", "p/__pycache__/": "ignored: a __pycache__ folder",
        "p/m.pyc": "ignored: a file that a tool wrote",
    }  # fmt: skip


def test_binary_files_are_skipped_and_listed(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "a\n", "latin1.txt": b"caf\xe9\n", "nul.txt": b"a\0b", "i.png": b"\x89PNG\r\n\x1a\n"})
    layout = lay_out([tmp_path])
    assert layout.order == ("a.txt",)
    assert reasons(layout) == {
        "latin1.txt": "binary, or text that is not UTF-8",
        "nul.txt": "binary",
        "i.png": "binary, or text that is not UTF-8",
    }


BEGIN = "-----BEGIN " + "OPENSSH PRIVATE KEY-----"
KEY = BEGIN + "\n" + "b3BlbnNzaC1rZXktdjE" * 3 + "\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (".env", "A=1\n"),
        (".env.production", "A=1\n"),
        ("deploy/id_ed25519", "x\n"),
        ("tls/server.key", "x\n"),
        ("tls/server.pem", KEY),
        ("tls/old.pem", BEGIN + "\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,00\n\n" + "QUJD" * 10 + "\n"),
        ("cloud.json", '{"k": "' + KEY.replace("\n", "\\n") + '"}\n'),
        (".netrc", "machine x\n"),
        ("home/.aws/credentials", "x\n"),
        ("credentials.json", "{}\n"),
        ("Secrets.yaml", "a: b\n"),
        ("infra/x.tfstate", "{}\n"),
        ("notes.txt", f"hello\n{KEY}"),
        ("ci.yml", "token: ghp_" + "a1B2" * 9 + "\n"),
        ("aws.ini", "id = AKIA" + "ABCDEFGH12345678" + "\n"),
        ("hf.py", "T = 'hf_" + "aB3d" * 9 + "'\n"),
        ("llm.py", "K = 'sk-proj-" + "aB3d" * 10 + "'\n"),
    ],
)
def test_likely_secrets_are_skipped_and_never_repeated(tmp_path: Path, name: str, content: str) -> None:
    write(tmp_path, {"a.txt": "a\n", name: content})
    layout = lay_out([tmp_path])
    assert layout.order == ("a.txt",)
    (skipped,) = layout.skipped
    assert skipped.path == name
    assert skipped.reason.startswith("likely secret: ")
    assert content.strip() not in skipped.reason


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (".env.example", "A=\n"),
        ("id_ed25519.pub", "ssh-ed25519 AAAA\n"),
        ("secrets.py", "import secrets\n"),
        ("token.rs", "struct Token;\n"),
        ("keys.md", "Keep your sk-key and ghp_ token secret; AKIAIOSFODNN7EXAMPLE is AWS's own example.\n"),
        ("environment.txt", "a\n"),
        ("style.css", ".sk-a-name-in-the-long-kebab-case-of-style-sheets-2 {}\n"),
        ("reader.py", f'HEAD = b"{BEGIN}"\nTAIL = b"x"\n'),
        ("roots.pem", "-----BEGIN CERTIFICATE-----\n" + "QUJD" * 10 + "\n"),
    ],
)
def test_files_that_only_talk_about_secrets_stay(tmp_path: Path, name: str, content: str) -> None:
    write(tmp_path, {name: content})
    assert lay_out([tmp_path]).order == (name,)


@pytest.mark.parametrize(
    "run", ["sk-", "sk-a", "-----BEGIN A ", BEGIN + "a: b\n", BEGIN + "\\n", "xox-", "hf_", "AKIA"]
)
def test_the_search_for_secrets_takes_time_in_proportion_to_the_text(run: str) -> None:
    # Were it quadratic, this would take minutes.
    assert secret_text_reason(run * (300_000 // len(run))) is None


def test_a_secret_is_named_with_its_line(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "a\n", "b.txt": "one\ntwo\n" + KEY})
    assert reasons(lay_out([tmp_path])) == {"b.txt": "likely secret: private key in line 3"}


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    write(tmp_path, {"outside/secret.txt": "s\n", "tree/a.txt": "a\n"})
    (tmp_path / "tree" / "out.txt").symlink_to(tmp_path / "outside" / "secret.txt")
    (tmp_path / "tree" / "folder").symlink_to(tmp_path / "outside")
    (tmp_path / "tree" / "loop").symlink_to(tmp_path / "tree")
    layout = lay_out([tmp_path / "tree"])
    assert layout.order == ("a.txt",)
    assert set(reasons(layout)) == {"out.txt", "folder", "loop"}


def test_a_tracked_symbolic_link_is_not_followed(repository: Path, tmp_path: Path) -> None:
    write(tmp_path, {"outside.txt": "s\n"})
    (repository / "link.txt").symlink_to(tmp_path / "outside.txt")
    commit(repository, {"a.txt": "a\n"})
    assert reasons(lay_out([repository])) == {"link.txt": "a symbolic link"}


def test_a_path_given_by_name_may_be_a_link(tmp_path: Path) -> None:
    write(tmp_path, {"tree/a.txt": "a\n"})
    (tmp_path / "link").symlink_to(tmp_path / "tree")
    assert lay_out([tmp_path / "link"]).order == ("a.txt",)


def test_a_pipe_is_skipped_without_waiting_for_it(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "a\n"})
    os.mkfifo(tmp_path / "pipe")
    assert reasons(lay_out([tmp_path])) == {"pipe": "not a regular file"}


def test_names_that_cannot_be_printed_are_skipped(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "a\n", "evil\x1b[2J\n.txt": "e\n"})
    layout = lay_out([tmp_path])
    assert layout.order == ("a.txt",)
    assert all(skipped.path.isprintable() for skipped in layout.skipped)


def test_several_paths_are_told_apart_by_their_names_whatever_their_order(tmp_path: Path) -> None:
    write(tmp_path, {"docs/a.md": "a\n", "src/a.py": "p\n", "README.md": "r\n"})
    paths = [tmp_path / "src", tmp_path / "README.md", tmp_path / "docs"]
    layout = lay_out(paths)
    assert layout.order == ("README.md", "docs/a.md", "src/a.py")
    assert lay_out(paths[::-1]).text == layout.text


def test_paths_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    write(tmp_path, {"one/docs/a.md": "1\n", "two/docs/a.md": "2\n"})
    assert lay_out([tmp_path / "one/docs", tmp_path / "two/docs"]).order == ("one/docs/a.md", "two/docs/a.md")


def test_several_paths_of_one_repository_are_ordered_by_commits(repository: Path) -> None:
    commit(repository, {"docs/a.md": "a\n", "src/x.py": "x\n", "top.md": "t\n"})
    commit(repository, {"docs/a.md": "a2\n", "top.md": "t2\n"})
    commit(repository, {"top.md": "t3\n"})
    layout = lay_out([repository / "top.md", repository / "docs", repository / "src"])
    assert layout.order == ("src/x.py", "docs/a.md", "top.md")


def test_a_file_given_twice_is_laid_out_once(tmp_path: Path) -> None:
    write(tmp_path, {"docs/a.md": "a\n"})
    layout = lay_out([tmp_path / "docs", tmp_path / "docs/a.md", tmp_path / "docs"])
    assert len(layout.files) == 1


def test_nothing_left_to_add_says_what_was_left_out(tmp_path: Path) -> None:
    write(tmp_path, {"a.bin": b"\0"})
    with pytest.raises(UsageError, match=r"a\.bin \(binary\)"):
        lay_out([tmp_path])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="found no file"):
        lay_out([tmp_path / "empty"])


def test_a_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="missing"):
        lay_out([tmp_path / "missing"])
    with pytest.raises(UsageError, match="at least one"):
        lay_out([])


def test_a_large_file_is_listed_in_a_folder_and_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "MAX_FILE_SIZE_BYTES", 100)
    write(tmp_path, {"a.txt": "a\n", "big.txt": "x" * 101})
    assert reasons(lay_out([tmp_path])) == {"big.txt": "too large: 101 bytes"}
    with pytest.raises(UsageError, match=r"at most 100 bytes, found big\.txt"):
        lay_out([tmp_path / "big.txt"])


def test_too_much_text_or_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {f"{i}.txt": "x" * 10 for i in range(5)})
    monkeypatch.setattr(source, "MAX_TEXT_SIZE_BYTES", 49)
    with pytest.raises(UsageError, match="at most 49 bytes"):
        lay_out([tmp_path])
    monkeypatch.setattr(source, "MAX_TEXT_SIZE_BYTES", 50)
    monkeypatch.setattr(source, "MAX_FILES", 4)
    with pytest.raises(UsageError, match="at most 4 files"):
        lay_out([tmp_path])


def test_a_machine_without_git_lays_out_by_path(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(repository, {"b.py": "b\n", "a.py": "a\n"})
    commit(repository, {"a.py": "a2\n"})
    monkeypatch.setenv("PATH", "/nonexistent")
    layout = lay_out([repository])
    assert layout.order == ("a.py", "b.py")
    assert reasons(layout) == {".git/": "ignored: a .git folder"}
