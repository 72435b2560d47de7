"""What is read off the machine: battery, link, sleep."""

import sys
from pathlib import Path

import pytest

from kvnet_node.guest.metered import metered, parse_busctl
from kvnet_node.guest.power import linux_on_battery, on_battery, parse_pmset, run_tool
from kvnet_node.guest.sleep import ASLEEP_S, SleepWatch, asleep_s

# As `pmset -g batt` is documented to print it.
ON_MAINS = """Now drawing from 'AC Power'
 -InternalBattery-0 (id=4653155)	100%; charged; 0:00 remaining present: true
"""
ON_BATTERY = """Now drawing from 'Battery Power'
 -InternalBattery-0 (id=4653155)	87%; discharging; 5:21 remaining present: true
"""
ON_UPS = "Now drawing from 'UPS Power'\n"
NO_BATTERY = "Now drawing from 'AC Power'\n"


def supply(root: Path, name: str, **files: str) -> None:
    (root / name).mkdir(parents=True)
    for file, text in files.items():
        (root / name / file).write_text(text + "\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [(ON_MAINS, False), (ON_BATTERY, True), (ON_UPS, True), (NO_BATTERY, False), ("", None), ("Battery Power?", True)],
)
def test_macos_says_what_it_draws_from_in_the_first_line(text: str, expected: bool | None) -> None:
    assert parse_pmset(text) is expected


def test_a_laptop_that_is_unplugged_runs_on_battery(tmp_path: Path) -> None:
    supply(tmp_path, "AC", type="Mains", online="0")
    supply(tmp_path, "BAT0", type="Battery", status="Discharging")
    assert linux_on_battery(tmp_path) is True


@pytest.mark.parametrize("status", ["Charging", "Full", "Not charging", "Discharging"])
def test_a_laptop_on_mains_does_not_whatever_its_battery_does(tmp_path: Path, status: str) -> None:
    supply(tmp_path, "AC", type="Mains", online="1")
    supply(tmp_path, "BAT0", type="Battery", status=status)
    assert linux_on_battery(tmp_path) is False


def test_a_usb_charger_is_mains_too(tmp_path: Path) -> None:
    supply(tmp_path, "AC", type="Mains", online="0")
    supply(tmp_path, "ucsi", type="USB", online="1")
    supply(tmp_path, "BAT0", type="Battery", status="Charging")
    assert linux_on_battery(tmp_path) is False


def test_the_battery_of_a_mouse_says_nothing_of_the_machine(tmp_path: Path) -> None:
    supply(tmp_path, "hidpp_battery_0", type="Battery", status="Discharging", scope="Device")
    assert linux_on_battery(tmp_path) is None


def test_two_batteries_of_which_one_is_used_are_battery(tmp_path: Path) -> None:
    supply(tmp_path, "BAT0", type="Battery", status="Full")
    supply(tmp_path, "BAT1", type="Battery", status="Discharging")
    assert linux_on_battery(tmp_path) is True
    supply(tmp_path / "other", "BAT0", type="Battery", status="Full")
    assert linux_on_battery(tmp_path / "other") is False


def test_a_machine_without_either_cannot_say(tmp_path: Path) -> None:
    assert linux_on_battery(tmp_path) is None
    assert linux_on_battery(tmp_path / "missing") is None
    supply(tmp_path, "odd", type="Wireless")
    supply(tmp_path, "BAT0", type="Battery")
    assert linux_on_battery(tmp_path) is None


def test_this_machine_is_asked_without_failing() -> None:
    assert on_battery() in {True, False, None}
    assert metered("auto") in {True, False, None}
    assert asleep_s() >= 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [("v u 1\n", True), ("v u 3\n", True), ("v u 2\n", False), ("v u 4\n", False), ("v u 0\n", None), ("", None)],
)
def test_networkmanager_says_whether_the_link_is_metered(text: str, expected: bool | None) -> None:
    assert parse_busctl(text) is expected


def test_what_the_owner_says_of_the_link_counts() -> None:
    assert metered("yes") is True
    assert metered("no") is False


def test_a_tool_that_is_missing_or_fails_says_nothing() -> None:
    assert run_tool(["/nonexistent/tool"]) == ""
    assert run_tool([sys.executable, "-c", "print('u 1'); raise SystemExit(3)"]) == ""
    assert run_tool([sys.executable, "-c", "print('u 1')"]).strip() == "u 1"


def test_a_sleep_is_noticed_once_and_the_time_between_two_readings_is_none() -> None:
    watch = SleepWatch(100.0)
    assert watch.look(100.001) == 0.0
    assert watch.look(100.0 + ASLEEP_S) == ASLEEP_S
    assert watch.look(100.0 + ASLEEP_S + 0.5) == 0.0
    # Sleeps too short to matter alone add up to one that does.
    assert watch.look(100.0 + 2 * ASLEEP_S + 0.5) == ASLEEP_S + 0.5
