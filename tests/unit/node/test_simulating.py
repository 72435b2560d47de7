import json
from pathlib import Path
from typing import Any

import pytest

from kvnet.errors import UsageError
from kvnet_node import simulating
from kvnet_node.paths import DataPaths
from kvnet_node.simulating import calibration_of, checkout, chip_named


def calibration(model: str, measured: int) -> dict[str, Any]:
    return {
        "model": model, "fingerprint": model, "device": "Apple M4", "versions": "", "measured": measured,
        "prefill": [{"position": 0, "tokens_s": 100.0}], "restore_bytes_s": 1e9, "restore_fixed_s": 0.0,
        "decode_bytes_s": {}, "kv_bytes_per_token": 1000,
    }  # fmt: skip


def test_these_sources_are_in_a_checkout() -> None:
    assert checkout() == Path(simulating.__file__).parents[2]


def test_an_installed_program_says_that_it_takes_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is in the working directory is not run: it may be anybody's.
    (tmp_path / "simulations").mkdir()
    (tmp_path / "simulations" / "__main__.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="expects to run from a checkout") as caught:
        checkout(tmp_path / "lib" / "site-packages" / "kvnet_node" / "simulating.py")
    assert "make install" in caught.value.hint


@pytest.mark.parametrize(
    ("device", "chip"),
    [("Apple M1", "m1"), ("Apple M4 Pro", "m4-pro"), ("Apple M3 Max", "m3-max"), ("AMD EPYC", ""), ("", "")],
)
def test_a_device_is_called_as_the_tables_call_it(device: str, chip: str) -> None:
    assert chip_named(device) == chip


def test_the_last_calibration_is_used_or_that_of_the_model_named(tmp_path: Path) -> None:
    paths = DataPaths(tmp_path)
    assert calibration_of(paths, None) is None
    known = [calibration("org/old", 1), calibration("org/new", 2)]
    paths.calibrations_file.write_text(json.dumps({each["fingerprint"]: each for each in known}))
    newest, named = calibration_of(paths, None), calibration_of(paths, "old")
    assert newest is not None
    assert newest.model == "org/new"
    assert named is not None
    assert named.model == "org/old"
    assert calibration_of(paths, "other") is None
