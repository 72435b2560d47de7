from pathlib import Path

import pytest

from kvnet_node.commands.doctor import check_place, trust_finding, verified_finding


def test_a_data_directory_that_is_there_is_fine(tmp_path: Path) -> None:
    assert check_place(tmp_path).state == "ok"


def test_one_that_can_be_made_is_no_problem(tmp_path: Path) -> None:
    found = check_place(tmp_path / "a" / "b")
    assert (found.state, "does not exist yet" in found.text) == ("note", True)


@pytest.mark.parametrize("below", [".", "a", "a/b"])
def test_a_file_in_the_way_is_a_problem(tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.touch()
    found = check_place(file / below)
    assert found.state == "problem"
    assert str(file) in found.text
    assert "--data-dir" in found.hint


@pytest.mark.parametrize(("policy", "lossy", "state"), [("trusted", "never", "ok"), ("own", "always", "note")])
def test_whose_state_is_used_is_said(policy: str, lossy: str, state: str) -> None:
    finding = trust_finding(policy, lossy)
    assert (finding.state, f"policy {policy}" in finding.text, "verified" in finding.text) == (state, True, True)
    assert ("lossy" in finding.text) == (lossy != "never")


def test_reuse_without_a_selftest_is_said_with_the_next_step() -> None:
    assert verified_finding(["tiny"]).state == "ok"
    assert "kvnet selftest" in verified_finding([]).hint
