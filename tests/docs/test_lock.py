"""The lock names versions and hashes, and nothing of the machine or registry it was made with."""

from pathlib import Path

import pytest

from scripts import check_lock

HASH = "--hash=sha256:" + "ab" * 32


def test_the_committed_lock_meets_every_requirement(repository_root: Path) -> None:
    assert check_lock.check_files(repository_root) == []


@pytest.mark.parametrize(
    "line",
    [
        "--index" + "-url https://registry.invalid/simple",
        "--find-links wheels",
        "blake3==1.0.11",
        "blake3>=1.0 " + HASH,
        "blake3 @ https://registry.invalid/blake3.whl " + HASH,
        "./vendored/blake3.whl " + HASH,
        "-e . " + HASH,
        "blake3==1.0.11 --hash=sha256:abcd",
        "blake3==1.0.11 --hash=md5:" + "ab" * 16,
    ],
)
def test_a_line_that_is_not_a_hashed_pin_is_refused(line: str) -> None:
    pins, problems = check_lock.parse_lock(f"# a comment\n{line}\n", "some.txt")
    assert pins == []
    assert len(problems) == 1
    assert problems[0].startswith("some.txt:2: expected name==version with hashes only")


def test_a_pin_may_have_a_marker_and_run_over_lines() -> None:
    pins, problems = check_lock.parse_lock(
        f"mlx-cpu==0.32.4 ; sys_platform == 'linux' \\\n    {HASH} \\\n    {HASH}\n", "x"
    )
    assert problems == []
    assert pins == [check_lock.Pin("mlx-cpu", "0.32.4", "sys_platform == 'linux'")]


def test_a_requirement_without_a_pin_is_named_for_each_platform() -> None:
    problems = check_lock.unmet(["trio>=0.31"], [], "some.txt")
    assert len(problems) == len(check_lock.PLATFORMS) * len(check_lock.PYTHONS)
    assert "macOS 14 arm64, Python 3.11, found none" in problems[0]


def test_a_pin_that_covers_only_one_platform_is_not_enough() -> None:
    pin = check_lock.Pin("trio", "0.33.0", "sys_platform == 'linux'")
    problems = check_lock.unmet(["trio>=0.31"], [pin], "some.txt")
    assert [problem for problem in problems if "macOS" in problem] == problems
    assert len(problems) == 2


def test_a_pin_below_the_required_version_is_refused() -> None:
    problems = check_lock.unmet(["cbor2>=6"], [check_lock.Pin("cbor2", "5.8.0", "")], "some.txt")
    assert "found ['5.8.0']" in problems[0]


def test_runtime_and_development_locks_must_agree() -> None:
    runtime = [check_lock.Pin("trio", "0.33.0", "")]
    assert check_lock.disagreements(runtime, [check_lock.Pin("trio", "0.34.0", "")])
    assert check_lock.disagreements(runtime, runtime) == []


def test_only_packages_without_any_wheel_may_come_as_source_on_a_mac() -> None:
    (mac,) = [platform for platform in check_lock.PLATFORMS if platform.sys_platform == "darwin"]
    assert mac.sources == ("varint", "python-baseconv")
    assert mac.environment == {"MACOSX_DEPLOYMENT_TARGET": "14.0"}


def test_cbor2_is_held_at_a_version_with_a_depth_limit(repository_root: Path) -> None:
    """Deep nesting crashed decoders before 5.9; the package metadata must not allow them."""
    text = (repository_root / "pyproject.toml").read_text()
    assert '"cbor2>=6"' in text
