"""``kvnet bench calibrate`` with a tiny model: what it finds is kept, and the running node plans with it."""

import stat

import httpx
import pytest

from tests.e2e.conftest import TIMEOUT_S, Kvnet
from tests.mlx.tinymodels import write_model

pytestmark = [pytest.mark.e2e, pytest.mark.mlx]


def test_a_calibration_is_shown_and_kept_for_its_owner_alone(kvnet: Kvnet) -> None:
    write_model(kvnet.data_dir / "models" / "tiny")
    ran = kvnet("bench", "calibrate", "--model", "tiny")
    assert ran.code == 0, ran.stderr
    for words in ("PREFILL TOKENS/S", "restore", "shuffle+zstd-1", "FETCHING PAYS FROM"):
        assert words in ran.stdout
    (file,) = kvnet.data_dir.glob("calibrations.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not list((kvnet.data_dir / "engine").glob("calibrate-*"))


@pytest.mark.loopback
def test_a_running_node_measures_for_the_command_and_explains_by_what_was_found(kvnet: Kvnet) -> None:
    write_model(kvnet.data_dir / "models" / "tiny")
    kvnet.start("--model", "tiny")
    found = kvnet.json("bench", "calibrate")
    assert found["type"] == "bench calibrate"
    assert all(point["tokens_s"] > 0 for point in found["prefill"])
    assert found["restore_bytes_s"] > 0
    assert {each["codec"] for each in found["codecs"]} >= {"raw", "shuffle+zstd-1"}
    assert {each["position"] for each in found["break_even"]} >= {0}
    (url,) = kvnet.json("node", "status")["endpoint"]
    body = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "Of cats. " * 60}]}
    with httpx.Client(timeout=TIMEOUT_S) as client:
        assert client.post(f"{url.removesuffix('/v1')}/v1/chat/completions", json=body).status_code == 200
    link = kvnet.json("explain", "--section", "link")["sections"]["link"]
    assert link["basis"].startswith("calibrated 20")
    assert link["peers"] == []
    assert {each["codec"] for each in link["break_even"]} >= {"raw", "shuffle+zstd-1"}
    assert "words" in kvnet.json("explain", "--section", "plan")["sections"]["plan"]
