"""What is remembered of this machine: one speed from ordinary requests, more from a calibration."""

import stat
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from kvnet.engine.interface import ModelInfo
from kvnet.engine.toy import ToyCosts, ToyEngine
from kvnet.format.codecs import Codec
from kvnet_node.speeds import ASSUMED_RESTORE_BYTES_S, Calibration, Point, Speeds


def info(name: str = "toy") -> ModelInfo:
    return ToyEngine(Path(name), ToyCosts(), 1 << 20, 1 << 40).info


def calibration(of: ModelInfo, *, restore_bytes_s: float = 2e9) -> Calibration:
    assert of.fingerprint is not None
    return Calibration(
        of.name, of.fingerprint.hash.hex(), of.producer.device, of.producer.versions, 1_800_000_000,
        [Point(256, 400.0), Point(768, 300.0)], restore_bytes_s, 0.01,
        {"shuffle+zstd-1": 3e8, "of-a-later-kvnet": 1e9}, 256, {"raw": 1.0},
    )  # fmt: skip


def speeds(folder: Path) -> Speeds:
    return Speeds(folder / "speeds.json", folder / "calibrations.json")


def test_a_machine_that_nobody_measured_is_not_known(tmp_path: Path) -> None:
    assert speeds(tmp_path).machine(info()) is None


def test_ordinary_requests_give_one_speed(tmp_path: Path) -> None:
    known = speeds(tmp_path)
    known.note(info().path, 1000, 2.0)
    known.note(info().path, 10, 0.001)
    known.note(info().path, 1000, 0.0)
    machine = speeds(tmp_path).machine(info())
    assert machine is not None
    assert (machine.prefill.tokens_s(0), machine.prefill.tokens_s(9000)) == (500.0, 500.0)
    assert machine.restore_bytes_s == ASSUMED_RESTORE_BYTES_S
    assert not machine.calibrated
    assert known.machine(replace(info(), fingerprint=None)) is None


def test_a_calibration_counts_more_and_is_kept_for_its_owner_alone(tmp_path: Path) -> None:
    known = speeds(tmp_path)
    known.note(info().path, 1000, 2.0)
    known.calibrated(calibration(info()))
    again = speeds(tmp_path)
    machine = again.machine(info())
    assert machine is not None
    assert machine.prefill.tokens_s(768) == pytest.approx(300.0)
    assert (machine.restore_bytes_s, machine.restore_fixed_s) == (2e9, 0.01)
    assert machine.decode_bytes_s == {Codec.SHUFFLE_ZSTD1: 3e8}
    assert again.calibration(info()) == calibration(info())
    file = tmp_path / "calibrations.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_calibration_of_another_model_or_device_does_not_count(tmp_path: Path) -> None:
    known = speeds(tmp_path)
    known.calibrated(calibration(info()))
    assert known.machine(info("other")) is None
    assert known.calibration(replace(info(), fingerprint=None)) is None
    moved = replace(info(), producer=msgspec.structs.replace(info().producer, device="another machine"))
    assert known.machine(moved) is None


@pytest.mark.parametrize("content", [b"", b"[]", b'{"a": 1}', b"\xff"])
def test_a_broken_file_counts_as_empty(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "calibrations.json").write_bytes(content)
    assert speeds(tmp_path).calibration(info()) is None


def test_figures_that_nothing_measured_are_passed_over(tmp_path: Path) -> None:
    broken = calibration(info(), restore_bytes_s=0.0)
    (tmp_path / "calibrations.json").write_bytes(msgspec.json.encode({broken.fingerprint: broken}))
    known = speeds(tmp_path)
    assert known.machine(info()) is None
    known.note(info().path, 1000, 2.0)
    assert known.machine(info()) is not None
