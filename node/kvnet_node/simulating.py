"""Runs the simulator of a checkout in a process of its own; it is no part of an installed kvnet."""

import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from kvnet.errors import CompatibilityError, UsageError
from kvnet_node.paths import DataPaths
from kvnet_node.speeds import Calibration, read_calibrations

DEFAULT_CHIP = "m4"
DEFAULT_MODEL = "qwen3-8b"
"""Of the simulator's tables, where nothing was measured here."""
_CHIP = re.compile(r"Apple (M\d+)(?: (Pro|Max|Ultra))?")


def checkout(module: Path = Path(__file__)) -> Path:
    """The checkout that this program runs from. The working directory does not count: it may be anybody's.

    Args:
        module: this file.

    Raises:
        UsageError: it runs from no checkout.
    """
    folder = module.resolve().parents[2]
    if not (folder / "simulations" / "__main__.py").is_file():
        raise UsageError(
            f"kvnet simulate expects to run from a checkout of kvnet, found none in {folder}",
            hint="clone the repository, run `make install` there, and use its .venv/bin/kvnet",
        )
    return folder


def chip_named(device: str) -> str:
    """A device's chip as the simulator's tables call it; the empty text for one that is no Mac's."""
    matched = _CHIP.match(device)
    return "-".join(part.lower() for part in matched.groups() if part) if matched else ""


def this_chip() -> str:
    """The chip of this machine, as above."""
    if platform.system() != "Darwin":
        return ""
    asked = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False)
    return chip_named(asked.stdout)


def calibration_of(paths: DataPaths, model: str | None) -> Calibration | None:
    """What was measured last on this machine, of a model where one is named."""
    found: Iterable[Calibration] = read_calibrations(paths.calibrations_file).values()
    if model is not None:
        found = [each for each in found if model in {each.model, each.model.rpartition("/")[2]}]
    return max(found, key=lambda each: each.measured, default=None)


def simulate(arguments: Sequence[str], calibration: Calibration | None) -> int:
    """Run the simulator and return its exit code; it writes to this process's stdout and stderr.

    Args:
        arguments: of `python -m simulations`.
        calibration: to be used, if any.

    Raises:
        UsageError: there is no checkout.
        CompatibilityError: what the simulator needs is not installed.
    """
    folder = checkout()
    _check_needs()
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    # -P: a folder of that name in the working directory is not meant.
    command = [sys.executable, "-P", "-m", "simulations", *arguments]
    with tempfile.TemporaryDirectory(prefix="kvnet-simulate-") as work:
        if calibration is not None:
            file = Path(work) / "calibration.json"
            file.write_bytes(msgspec.json.encode(calibration))
            command += ["--calibration", str(file)]
        return subprocess.run(command, env=environment, check=False).returncode


def _check_needs() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("simpy", "matplotlib") if find_spec(name) is None]
    if missing:
        raise CompatibilityError(
            f"kvnet simulate expects {' and '.join(missing)}, found none installed",
            hint="run `make install` in the checkout first",
        )
