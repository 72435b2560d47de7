from pathlib import Path

import pytest

from kvnet.errors import UsageError
from kvnet_node.commands.containers import check_output


def test_a_new_file_in_a_folder_is_fine(tmp_path: Path) -> None:
    check_output(tmp_path / "x.kva")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_does_not_exist_is_named_with_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the folder .* does not exist") as raised:
        check_output(tmp_path / "no such" / "x.kva")
    assert raised.value.hint == f"mkdir -p '{tmp_path}/no such'"


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "x.kva"
    file.write_bytes(b"theirs")
    with pytest.raises(UsageError, match="does not exist yet") as raised:
        check_output(file)
    assert raised.value.hint
    assert file.read_bytes() == b"theirs"
