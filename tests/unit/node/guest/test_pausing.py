import math
from pathlib import Path

from kvnet_node.guest.pausing import Pause


def test_a_pause_lasts_until_its_end_and_over_a_restart(tmp_path: Path) -> None:
    pause = Pause(tmp_path / "paused.json")
    pause.load()
    assert pause.left_s(0.0) == 0.0
    pause.begin(100.0)
    again = Pause(tmp_path / "paused.json")
    again.load()
    assert again.left_s(40.0) == 60.0
    assert again.left_s(100.0) == 0.0


def test_a_pause_without_an_end_lasts_until_it_is_ended(tmp_path: Path) -> None:
    pause = Pause(tmp_path / "paused.json")
    pause.begin()
    again = Pause(tmp_path / "paused.json")
    again.load()
    assert again.left_s(1e12) == math.inf
    assert again.end()
    assert not again.end()
    again.load()
    assert again.left_s(0.0) == 0.0


def test_a_damaged_file_is_a_pause_and_not_a_reason_to_serve(tmp_path: Path) -> None:
    (tmp_path / "paused.json").write_text("{")
    pause = Pause(tmp_path / "paused.json")
    pause.load()
    assert pause.left_s(0.0) == math.inf
