"""What would some machines like mine save on this trace? A scenario from a few flags and a calibration."""

from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from kvnet.errors import MalformedError, UsageError
from simulations.scenario import Scenario
from simulations.scenario_files import parse
from simulations.workload.traces import find
from simulations.world.building import build

ESTIMATED: Final = ("none", "own", "swarm", "central")
"""Policies that are shown beside each other."""
BUSY_SHARE: Final = 0.3
MAX_CALIBRATION_BYTES: Final = 1 << 20


class _Point(Struct, frozen=True):
    position: int
    tokens_s: float


class _Calibration(Struct, frozen=True):
    """What is needed of a calibration as a node keeps it, or as `kvnet bench calibrate --json` prints it."""

    model: str
    prefill: list[_Point]
    restore_bytes_s: float
    kv_bytes_per_token: int
    restore_fixed_s: float = 0.0
    decode_bytes_s: dict[str, float] = {}


def scenario_of(
    trace: str,
    *,
    machines: int,
    chip: str,
    model: str,
    link: str,
    calibration: str = "",
    requests: int = 0,
    stretch: float = 0.0,
) -> Scenario:
    """Some machines that are alike, and a trace.

    Args:
        trace: a path, or the name of an excerpt.
        machines: how many.
        chip: as the tables have it; with a calibration it only says how fast answers are.
        model: as the tables have it; the same.
        link: as the tables have it.
        calibration: a file; none if empty.
        requests: at most so many of the trace; 0 for all.
        stretch: all times are multiplied by it; 0 for what leaves the machines `BUSY_SHARE` busy without any reuse,
            since a trace of a data centre would drown them.

    Raises:
        UsageError: no such trace or file.
        MalformedError: the file holds no calibration.
        ConfigError: a value that cannot be.
    """
    group, like = _alike(machines, chip, model, link, calibration)
    stretched_by = partial(_scenario, find(trace), group, like, model, requests)
    return stretched_by(stretch or max(1e-6, _leisurely(stretched_by(1.0))))


def _alike(machines: int, chip: str, model: str, link: str, calibration: str) -> tuple[dict[str, Any], str]:
    """The group of machines as a scenario has it, and what they are like, in words."""
    group: dict[str, Any] = {"count": machines, "chip": chip, "link": link}
    if not calibration:
        return group, f"{chip}, {model}"
    measured = _read(Path(calibration))
    group["measured"] = {
        "prefill": [[point.position, point.tokens_s] for point in measured.prefill],
        "restore_bytes_s": measured.restore_bytes_s,
        "restore_fixed_s": measured.restore_fixed_s,
        "decode_bytes_s": {name: rate for name, rate in measured.decode_bytes_s.items() if rate > 0},
        "kv_bytes_per_token": measured.kv_bytes_per_token,
    }
    return group, f"calibrated with {measured.model}"


def _scenario(path: Path, group: dict[str, Any], like: str, model: str, requests: int, stretch: float) -> Scenario:
    slowed = ""
    if stretch != 1.0:
        slowed = f", {stretch:.3g} times as slow" if stretch > 1 else f", {1 / stretch:.3g} times as fast"
    return parse(
        {
            "name": "estimate",
            "title": f"{group['count']:,} machines ({like}) on {group['link']}: {path.name}{slowed}",
            "model": model,
            "machines": [group],
            "workload": {"kind": "trace", "file": str(path), "requests": requests, "stretch": stretch},
        },
        where="estimate",
    )


def _leisurely(scenario: Scenario) -> float:
    """The stretch at which the machines are `BUSY_SHARE` busy with prefill when nothing is reused."""
    setup = build(scenario, 0)
    machine = setup.nodes[0].machine
    busy_s = sum(machine.prefill.seconds(0, n_input) for n_input in setup.stream.n_input.tolist())
    return float(busy_s / len(setup.nodes) / BUSY_SHARE / max(1.0, setup.stream.duration_s))


def _read(path: Path) -> _Calibration:
    try:
        if path.stat().st_size > MAX_CALIBRATION_BYTES:
            raise MalformedError(f"{path}: expected at most {MAX_CALIBRATION_BYTES:,} bytes of a calibration")
        # `--json` prints one object a line, and the result last.
        last = path.read_bytes().strip().splitlines()[-1:]
        return msgspec.json.decode(last[0] if last else b"", type=_Calibration)
    except OSError as error:
        raise UsageError(f"expected a calibration in {path}, found: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise MalformedError(
            f"{path}: expected a calibration, found: {error}", hint="kvnet bench calibrate --json > FILE writes one."
        ) from error
