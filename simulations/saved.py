"""Results in a folder: written once, read again for plots.

`results.json` says which runs there are, `columns.npz` holds their columns; both are ours, neither can hold code.
"""

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import Struct

from kvnet.errors import MalformedError, UsageError
from simulations.results import Array, NodeResult, RequestResult, RunResult

RESULTS_FILE: Final = "results.json"
COLUMNS_FILE: Final = "columns.npz"
VERSION: Final = 1
MAX_RESULTS_BYTES: Final = 1 << 24


class _Run(Struct, frozen=True, forbid_unknown_fields=True):
    scenario: str
    policy: str
    seed: int
    asked: int
    duration_s: float
    checks: dict[str, int]
    counts: dict[str, int]
    seconds: float
    digest: str


class _Saved(Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    title: str
    runs: list[_Run]


class Saved(Struct, frozen=True):
    """What was read: the scenario's title and its runs."""

    title: str
    runs: tuple[RunResult, ...]


def save(results: Sequence[RunResult], title: str, folder: Path) -> list[Path]:
    """Write runs of one scenario; files of an earlier result are replaced.

    Raises:
        UsageError: the folder cannot be written.
    """
    runs = [
        _Run(
            each.scenario,
            each.policy,
            each.seed,
            each.asked,
            each.duration_s,
            dict(each.checks),
            dict(each.counts),
            each.seconds,
            each.digest,
        )
        for each in results
    ]
    columns: dict[str, Any] = {}
    for place, each in enumerate(results):
        columns.update({f"{place}.{name}": column for name, column in _columns(each).items()})
    files = [folder / RESULTS_FILE, folder / COLUMNS_FILE]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files[0].write_bytes(msgspec.json.format(msgspec.json.encode(_Saved(VERSION, title, runs))) + b"\n")
        np.savez_compressed(files[1], **columns)
    except OSError as error:
        raise UsageError(f"{folder}: expected a folder that can be written, found: {error}") from error
    return files


def _columns(result: RunResult) -> dict[str, Array]:
    return {
        "number": result.number,
        "n_input": result.n_input,
        "node": result.node,
        **{f"requests.{name}": result.requests[name] for name in RequestResult._fields},
        **{f"nodes.{name}": result.nodes[name] for name in NodeResult._fields},
    }


def read(folder: Path) -> Saved:
    """Read runs again; each must have the digest it was saved with.

    Raises:
        UsageError: there is no result in the folder.
        MalformedError: it is damaged, or of another version.
    """
    file = folder / RESULTS_FILE if folder.is_dir() else folder
    if not file.is_file():
        raise UsageError(
            f"expected a folder with {RESULTS_FILE}, found {'none in' if folder.is_dir() else 'no folder'} {folder}",
            hint="python -m simulations compare SCENARIO --out FOLDER writes one.",
        )
    folder = file.parent
    if file.stat().st_size > MAX_RESULTS_BYTES:
        raise MalformedError(f"{file}: expected at most {MAX_RESULTS_BYTES:,} bytes")
    try:
        saved = msgspec.json.decode(file.read_bytes(), type=_Saved)
        if saved.version != VERSION:
            raise MalformedError(f"{file}: expected version {VERSION}, found {saved.version}")
        with np.load(folder / COLUMNS_FILE, allow_pickle=False) as columns:
            runs = tuple(_run(place, run, columns) for place, run in enumerate(saved.runs))
    except (msgspec.DecodeError, OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise MalformedError(f"{folder}: expected the result of a run, found: {error}") from error
    for run, result in zip(saved.runs, runs, strict=True):
        if result.digest != run.digest:
            raise MalformedError(f"{folder}: policy {run.policy}: expected digest {run.digest}, found {result.digest}")
    return Saved(saved.title, runs)


def _run(place: int, run: _Run, columns: Any) -> RunResult:
    def column(name: str) -> Array:
        found: Array = columns[f"{place}.{name}"]
        return found

    return RunResult(
        run.scenario,
        run.policy,
        run.seed,
        run.asked,
        column("number"),
        column("n_input"),
        column("node"),
        {name: column(f"requests.{name}") for name in RequestResult._fields},
        {name: column(f"nodes.{name}") for name in NodeResult._fields},
        run.duration_s,
        run.checks,
        run.counts,
        run.seconds,
    )
