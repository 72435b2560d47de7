"""Whether the machine runs on battery. The macOS part goes by recorded output of its tool, and has not run on a Mac."""

import subprocess
import sys
from pathlib import Path

SYSFS = Path("/sys/class/power_supply")
MAX_TEXT_BYTES = 64 * 1024
COMMAND_S = 5.0
"""Seconds a tool of the system gets."""


def on_battery(root: Path = SYSFS) -> bool | None:
    """Whether the machine runs on battery; None when nobody can say. Reads files or runs a tool: not for the loop."""
    if sys.platform == "darwin":
        return parse_pmset(run_tool(["/usr/bin/pmset", "-g", "batt"]))
    return linux_on_battery(root)


def linux_on_battery(root: Path) -> bool | None:
    """As the kernel says: no mains is online, and a battery of the machine itself is discharging.

    A mouse or a headset has a battery too; its scope is ``Device``.

    Args:
        root: a folder like ``/sys/class/power_supply``.
    """
    try:
        supplies = sorted(root.iterdir())
    except OSError:
        return None
    mains: list[bool] = []
    discharging: list[bool] = []
    for supply in supplies:
        kind = _read(supply / "type")
        if _read(supply / "scope") == "Device":
            continue
        if kind in {"Mains", "USB"} and (online := _read(supply / "online")):
            mains.append(online == "1")
        elif kind == "Battery" and (status := _read(supply / "status")):
            discharging.append(status == "Discharging")
    if any(mains):
        return False
    if discharging:
        # A full battery of a machine whose mains are not listed is not discharging.
        return any(discharging)
    return None


def parse_pmset(text: str) -> bool | None:
    """What ``pmset -g batt`` says: its first line names the source that is drawn from."""
    first = text.partition("\n")[0]
    if "Battery Power" in first or "UPS Power" in first:
        return True
    return False if "AC Power" in first else None


def run_tool(command: list[str]) -> str:
    """What a tool of the system prints; empty when it is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=COMMAND_S, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout[:MAX_TEXT_BYTES].decode("utf-8", "replace")


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(256).decode("ascii", "replace").strip()
    except OSError:
        return ""
