"""Text of the repository: nothing of one machine in it, and no link that leads nowhere."""

from pathlib import Path

import pytest

from scripts import check_text


def test_the_text_of_every_tracked_file_is_clean(repository_root: Path) -> None:
    assert check_text.check(repository_root) == []


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("see /" + "home/carol/models", "a path of one machine"),
        ("see /" + "Users/carol/models", "a path of one machine"),
        ("pip install --index" + "-url x", "a setting for a package registry"),
        ("a line \nanother", "white space"),
        ("<" * 7 + " HEAD", "a merge conflict"),
    ],
)
def test_forbidden_text_is_named_with_its_line(text: str, meaning: str) -> None:
    (problem,) = check_text.forbidden_text("first\n" + text, "a.md")
    assert problem.startswith("a.md:2: ")
    assert meaning in problem


@pytest.mark.parametrize("text", ["~/.lmstudio/models", "$HOME/work/x", "/usr/lib", "/ip4/127.0.0.1/tcp/5864"])
def test_ordinary_paths_are_allowed(text: str) -> None:
    assert list(check_text.forbidden_text(text, "a.md")) == []


def test_links_are_followed_to_files_and_headings(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A `code` heading, twice\n")
    page = tmp_path / "page.md"
    page.write_text("# Page\n")
    good = "[a](other.md) [b](other.md#a-code-heading-twice) [c](#page) [d](https://example.org/x)"
    assert list(check_text.broken_links(page, good, tmp_path)) == []
    assert list(check_text.broken_links(page, "[a](gone.md)", tmp_path)) == [
        "page.md: the link gone.md leads to no file"
    ]
    assert list(check_text.broken_links(page, "[a](other.md#gone)", tmp_path)) == [
        "page.md: the link other.md#gone leads to no heading"
    ]


def test_links_inside_code_are_not_links(tmp_path: Path) -> None:
    assert list(check_text.broken_links(tmp_path / "p.md", "```\n[a](gone.md)\n```\n", tmp_path)) == []
