from pathlib import Path

import pytest

from kvnet.errors import UsageError
from kvnet_node.arguments import GlobalFlags, split_global_flags


@pytest.mark.parametrize(
    "arguments",
    [
        ["--json", "--data-dir", "/d", "list"],
        ["list", "--json", "--data-dir", "/d"],
        ["--data-dir=/d", "list", "--json"],
    ],
)
def test_global_flags_work_before_and_after_the_verb(arguments: list[str]) -> None:
    assert split_global_flags(arguments) == (GlobalFlags(data_dir=Path("/d"), json=True), ["list"])


def test_every_switch_is_recognised() -> None:
    flags, rest = split_global_flags(["key", "--quiet", "--verbose", "list", "--no-color"])
    assert flags == GlobalFlags(quiet=True, verbose=True, color=False)
    assert rest == ["key", "list"]


def test_everything_after_two_hyphens_belongs_to_the_verb() -> None:
    flags, rest = split_global_flags(["ask", "--json", "--", "name", "--quiet"])
    assert flags == GlobalFlags(json=True)
    assert rest == ["ask", "--", "name", "--quiet"]


def test_a_value_written_with_an_equals_sign_is_not_taken_for_a_flag() -> None:
    assert split_global_flags(["generate", "--prompt=--json"]) == (GlobalFlags(), ["generate", "--prompt=--json"])


@pytest.mark.parametrize(
    "arguments", [["--data-dir"], ["--data-dir", "", "list"], ["--data-dir", "--json"], ["list", "--data-dir="]]
)
def test_a_data_dir_without_a_value_is_a_usage_error(arguments: list[str]) -> None:
    with pytest.raises(UsageError, match="--data-dir expects a directory"):
        split_global_flags(arguments)


def test_the_last_data_dir_wins() -> None:
    flags, _ = split_global_flags(["--data-dir", "/a", "list", "--data-dir", "/b"])
    assert flags.data_dir == Path("/b")
