import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvnet.errors import MalformedError, UsageError
from simulations.results import NodeResult, Recorder, RequestResult, RunResult, fairness, later, summary
from simulations.saved import COLUMNS_FILE, RESULTS_FILE, read, save
from simulations.tables import write_csv
from tests.simulations.examples import result


def test_the_same_run_has_the_same_digest_however_long_it_took() -> None:
    assert result("swarm").digest == replace(result("swarm"), seconds=99.0).digest


@pytest.mark.parametrize(
    "change",
    [
        {"policy": "own"},
        {"scenario": "other"},
        {"seed": 1},
        {"asked": 41},
        {"duration_s": 7200.001},
        {"checks": {}},
        {"counts": {"fetches": 4}},
    ],
)
def test_whatever_is_otherwise_changes_the_digest(change: dict[str, Any]) -> None:
    assert replace(result("swarm"), **change).digest != result("swarm").digest


@pytest.mark.parametrize("column", [*RequestResult._fields, *NodeResult._fields])
def test_a_single_figure_changes_the_digest(column: str) -> None:
    run = result("swarm")
    table = run.requests if column in run.requests else run.nodes
    table[column][2] += 1e-6 if table[column].dtype.kind == "f" else 1
    assert run.digest != result("swarm").digest


def test_a_request_is_told_once_and_those_without_an_answer_are_left_out() -> None:
    recorder = Recorder(np.array([10, 20, 30]), np.array([0, 1, 0]), 2)
    recorder.request(1, RequestResult(own_ram_tokens=5))
    with pytest.raises(ValueError, match="found a second"):
        recorder.request(1, RequestResult())
    run = recorder.finish("s", "p", 0, duration_s=1.0, checks={}, counts={}, seconds=0.0)
    assert run.n_requests == 1
    assert (run.asked, run.number.tolist(), run.n_input.tolist()) == (3, [1], [20])
    assert summary(run).unanswered == 2
    assert run.hit_tokens.tolist() == [5]


def test_a_summary_tells_shares_of_tokens_and_of_seconds() -> None:
    run = summary(result("swarm", speed=4.0))
    assert run.hit_token_fraction == pytest.approx(0.75, abs=1e-3)
    assert run.own_ram_fraction + run.own_disk_fraction + run.peer_fraction == pytest.approx(run.hit_token_fraction)
    assert run.prefill_saved_fraction == pytest.approx(0.75)
    assert run.ttft_s["p50"] <= run.ttft_s["p90"] <= run.ttft_s["p99"]
    assert run.slower_fraction == 0
    assert run.busiest_share == 0.5
    assert run.announce_messages == 200


def test_a_run_without_requests_has_a_summary_too() -> None:
    empty = Recorder(np.zeros(0, np.int64), np.zeros(0, np.int64), 1)
    run = summary(empty.finish("s", "p", 0, duration_s=0.0, checks={}, counts={}, seconds=0.0))
    assert run.requests == 0
    assert run.hit_token_fraction == 0
    assert run.ttft_s["p50"] == 0


def test_fairness_is_one_when_even_and_one_of_n_when_one_bears_all() -> None:
    assert fairness(np.array([3, 3, 3])) == pytest.approx(1.0)
    assert fairness(np.array([9, 0, 0])) == pytest.approx(1 / 3)
    assert fairness(np.zeros(4)) == 1.0


def test_later_means_by_more_than_two_per_cent_and_twenty_milliseconds() -> None:
    ours, theirs = np.array([0.119, 0.121, 10.1, 10.3]), np.array([0.1, 0.1, 10.0, 10.0])
    assert later(ours, theirs).tolist() == [False, True, False, True]


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    runs = [result("own"), result("swarm", speed=3.0)]
    save(runs, "a title", tmp_path / "out")
    saved = read(tmp_path / "out")
    assert saved.title == "a title"
    assert [run.digest for run in saved.runs] == [run.digest for run in runs]
    assert read(tmp_path / "out" / RESULTS_FILE).runs[1].policy == "swarm"


def test_a_result_that_was_changed_is_not_believed(tmp_path: Path) -> None:
    save([result("own")], "t", tmp_path)
    file = tmp_path / RESULTS_FILE
    content = json.loads(file.read_text())
    content["runs"][0]["seed"] = 5
    file.write_text(json.dumps(content))
    with pytest.raises(MalformedError, match="policy own: expected digest"):
        read(tmp_path)


def test_a_damaged_result_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="found none"):
        read(tmp_path)
    save([result("own")], "t", tmp_path)
    (tmp_path / COLUMNS_FILE).write_bytes(b"PK nothing")
    with pytest.raises(MalformedError, match="expected the result of a run"):
        read(tmp_path)
    (tmp_path / RESULTS_FILE).write_text('{"version": 9, "title": "", "runs": []}')
    with pytest.raises(MalformedError, match="expected version 1, found 9"):
        read(tmp_path)


def test_tables_hold_a_line_for_each_run_node_and_request(tmp_path: Path) -> None:
    runs = [result("own"), result("swarm", speed=2.0)]
    files = {file.name: list(csv.DictReader(file.read_text().splitlines())) for file in write_csv(runs, tmp_path)}
    assert {name: len(rows) for name, rows in files.items()} == {"runs.csv": 2, "nodes.csv": 8, "requests.csv": 80}
    assert [row["digest"] for row in files["runs.csv"]] == [run.digest for run in runs]
    assert sum(int(row["own_ram_tokens"]) for row in files["requests.csv"]) == _ram(runs)


def _ram(runs: list[RunResult]) -> int:
    return sum(int(run.requests["own_ram_tokens"].sum()) for run in runs)
