from pathlib import Path

import pytest

from kvnet_node.commands.doctor import check_place


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
