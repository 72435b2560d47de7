import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvnet.errors import MalformedError, UsageError
from simulations.cli import main
from simulations.estimating import scenario_of

ROOT = Path(__file__).parents[2]
CALIBRATION = {
    "model": "tiny", "fingerprint": "00", "device": "Apple M9", "versions": "", "measured": 1,
    "prefill": [{"position": 0, "tokens_s": 5000.0}], "restore_bytes_s": 1e9, "restore_fixed_s": 0.01,
    "decode_bytes_s": {"q8": 4e8}, "kv_bytes_per_token": 4096,
}  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[Any], str]:
    """Exit code, the objects on stdout, and stderr."""
    code = main([*arguments, "--json"])
    captured = capsys.readouterr()
    return code, [json.loads(line) for line in captured.out.splitlines()], captured.err


def test_the_last_line_of_a_replay_is_what_the_issue_says(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, _ = run(capsys, "replay", "synthetic_excerpt.jsonl")
    last = lines[-1]
    assert code == 0
    assert list(last)[:6] == ["type", "requests", "hit_token_fraction", "hit_block_fraction", "seconds", "digest"]
    assert last["type"] == "replay"
    assert last["requests"] == 400


def test_a_run_gives_one_digest_for_a_seed_and_another_for_another(capsys: pytest.CaptureFixture[str]) -> None:
    digests = [run(capsys, "run", "small", "--seed", seed)[1][-1]["digest"] for seed in ("3", "3", "4")]
    assert digests[0] == digests[1] != digests[2]


def test_a_comparison_is_written_and_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = str(tmp_path / "result")
    code, lines, said = run(capsys, "compare", "small", "--policies", "own,swarm", "--out", folder)
    assert code == 0
    assert [line["type"] for line in lines] == ["run", "run", "compare"]
    assert [each["policy"] for each in lines[-1]["runs"]] == ["own", "swarm"]
    assert f"python -m simulations plot {folder}" in said
    code, lines, _ = run(capsys, "plot", folder)
    assert code == 0
    files = [Path(file) for file in lines[-1]["files"]]
    assert {file.stem for file in files} == {
        "hit_rate", "ttft", "prefill_saved", "bytes_moved", "ssd_writes", "announcing", "load", "where_it_loses",
    }  # fmt: skip
    assert {file.suffix for file in files} == {".png", ".svg"}
    drawn = (tmp_path / "result" / "hit_rate.svg").read_text()
    assert "The swarm reuses" in drawn
    assert "prompt tokens not computed, % of all" in drawn


def test_people_get_tables(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["compare", "small"], ["run", "small"], ["scenarios"], ["replay", "synthetic_excerpt.jsonl"]):
        assert main(arguments) == 0
    said = capsys.readouterr().out
    for words in ("TOKENS HIT", "swarm", "central", "prefill saved", "an infinite store at one node hits 5.4 %"):
        assert words in said


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 2, "COMMAND"),
        (["run"], 2, "SCENARIO"),
        (["run", "nowhere"], 2, "expected a scenario, found no file nowhere"),
        (["run", "small", "--policy", "best"], 2, "unknown policy 'best'"),
        (["compare", "small", "--policies", "own,best"], 2, "unknown policy 'best'"),
        (["run", "small", "--seed", "-1"], 2, "--seed"),
        (["run", "small", "--sede", "1"], 2, "--sede"),
        (["replay", "nowhere"], 2, "expected a trace, found no file nowhere"),
        (["plot", "nowhere"], 2, "expected a folder with results.json"),
        (["estimate", "synthetic_excerpt.jsonl", "--machines", "0"], 2, "--machines expects a whole number"),
        (["estimate", "synthetic_excerpt.jsonl", "--chip", "m0"], 2, "unknown chip 'm0'"),
    ],
)
def test_a_wrong_command_line_says_what_was_expected(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, says: str
) -> None:
    found, lines, said = run(capsys, *arguments)
    error = json.loads(said.splitlines()[-1])
    assert (found, lines) == (code, [])
    assert error["type"] == "error"
    assert error["exit_code"] == code
    assert says in error["message"]


def test_a_broken_trace_ends_with_the_code_of_malformed_bytes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [0]}\n{"timestamp": 0}\n')
    assert main(["replay", str(file)]) == 10
    assert f"error: {file}:2: " in capsys.readouterr().err
    file.write_bytes(b"\xff\x00")
    assert main(["replay", str(file)]) == 10
    assert f"error: {file}:1: JSON is malformed" in capsys.readouterr().err


def test_machines_like_one_that_was_calibrated(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps(CALIBRATION))
    scenario = scenario_of(
        "synthetic_excerpt.jsonl", machines=5, chip="m4", model="qwen3-8b", link="wifi", calibration=str(file)
    )
    measured = scenario.machines[0].measured
    assert scenario.n_nodes == 5
    assert "calibrated with tiny" in scenario.title
    assert measured is not None
    assert measured.prefill == ((0, 5000.0),)
    file.write_text("{}")
    with pytest.raises(MalformedError, match="expected a calibration, found"):
        scenario_of("synthetic_excerpt.jsonl", machines=1, chip="m4", model="m", link="wifi", calibration=str(file))
    with pytest.raises(UsageError, match="expected a calibration in"):
        scenario_of("synthetic_excerpt.jsonl", machines=1, chip="m4", model="m", link="wifi", calibration="nowhere")


def test_a_trace_is_stretched_until_the_machines_can_follow() -> None:
    five, fifty = (
        scenario_of("synthetic_excerpt.jsonl", machines=count, chip="m4", model="qwen3-8b", link="wifi")
        for count in (5, 50)
    )
    assert five.workload.stretch == pytest.approx(10 * fifty.workload.stretch)  # type: ignore[union-attr]


def test_the_simulator_runs_as_a_module_from_anywhere(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "simulations", "replay", "synthetic_excerpt.jsonl", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1])["type"] == "replay"


def test_kvnet_simulate_asks_the_simulator(tmp_path: Path) -> None:
    kvnet = str(Path(sys.executable).with_name("kvnet"))
    (tmp_path / "calibrations.json").write_text(json.dumps({"00": CALIBRATION}))
    command = [kvnet, "simulate", "synthetic_excerpt.jsonl", "--requests", "20", "--data-dir", str(tmp_path), "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["type"] == "compare"
    assert [each["policy"] for each in last["runs"]] == ["none", "own", "swarm", "central"]
    assert "as measured here with tiny" in done.stderr
    wrong = subprocess.run([kvnet, "simulate", "nowhere"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "found no file nowhere" in wrong.stderr
