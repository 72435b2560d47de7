"""Results as tables: files for a spreadsheet or a script."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from simulations.results import Array, NodeResult, RequestResult, RunResult, Summary, summary

MAX_REQUEST_ROWS = 500_000
"""More rows are not written as CSV: `columns.npz` has them all."""


def write_csv(results: Sequence[RunResult], folder: Path) -> list[Path]:
    """A line for each run, each node and each request, in files of a folder.

    Returns:
        `runs.csv`, `nodes.csv`, and `requests.csv` where these are at most `MAX_REQUEST_ROWS`.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / name for name in ("runs.csv", "nodes.csv", "requests.csv")]
    summaries = [_flat(summary(result)) for result in results]
    names = list(dict.fromkeys(name for row in summaries for name in row))
    with files[0].open("w", newline="", encoding="utf-8") as out:
        table = csv.DictWriter(out, names, restval="", lineterminator="\n")
        table.writeheader()
        table.writerows(summaries)
    with files[1].open("w", newline="", encoding="utf-8") as out:
        rows = csv.writer(out, lineterminator="\n")
        rows.writerow(["policy", "seed", "node", *NodeResult._fields])
        for each in results:
            columns = [np.arange(len(each.nodes["requests"])), *(each.nodes[name] for name in NodeResult._fields)]
            _write_rows(rows, each, columns)
    if sum(each.n_requests for each in results) > MAX_REQUEST_ROWS:
        files.pop().unlink(missing_ok=True)
        return files
    with files[2].open("w", newline="", encoding="utf-8") as out:
        rows = csv.writer(out, lineterminator="\n")
        rows.writerow(["policy", "seed", "number", "node", "n_input", *RequestResult._fields])
        for each in results:
            columns = [each.number, each.node, each.n_input, *(each.requests[name] for name in RequestResult._fields)]
            _write_rows(rows, each, columns)
    return files


def _write_rows(rows: Any, result: RunResult, columns: Sequence[Array]) -> None:
    # Times to the microsecond: more says nothing, and makes the file twice as long.
    plain = [(column.round(6) if column.dtype.kind == "f" else column).tolist() for column in columns]
    for values in zip(*plain, strict=True):
        rows.writerow([result.policy, result.seed, *values])


def _flat(row: Summary) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in msgspec.structs.asdict(row).items():
        if isinstance(value, dict):
            flat.update({f"{name}.{key}": inner for key, inner in value.items()})
        else:
            flat[name] = value
    return flat
