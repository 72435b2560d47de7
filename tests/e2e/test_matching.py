"""Two machines say which models they have in common, how those compare, and what each does for the other."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Kvnet
from tests.e2e.test_main_job import pair
from tests.mlx.tinymodels import write_model

pytestmark = pytest.mark.mlx


def by_name(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {model["name"]: model for model in result["models"]}


def test_two_machines_say_what_they_have_in_common_and_when_one_of_them_pauses(
    kvnet: Kvnet, other: Kvnet, tmp_path: Path
) -> None:
    pair(kvnet, other, tmp_path)
    for node in (kvnet, other):
        write_model(node.data_dir / "models" / "tiny-both")
    write_model(kvnet.data_dir / "models" / "tiny-half-f32", seed=5)
    write_model(other.data_dir / "models" / "tiny-half-bf16", seed=5, dtype="bfloat16")
    started, _ = kvnet.start()
    beside, _ = other.start("--bootstrap", started["addresses"][0])
    other.json("peers", started["addresses"][0])
    # Nothing was loaded on either side: the first one to ask learns that, and makes its own models known.
    first = other.json("model", "match")
    assert (first["members"], first["silent"]) == (1, [started["peer"]])
    result = kvnet.json("model", "match")
    assert result["silent"] == []
    models = by_name(result)
    (both,) = models["tiny-both"]["peers"]
    assert both["peer"] == beside["peer"]
    assert (both["model"]["verdict"], both["model"]["measured"], both["model"]["difference"]) == ("exact", True, 0.0)
    (half,) = models["tiny-half-f32"]["peers"]
    assert (half["model"]["relation"], half["model"]["verdict"]) == ("near", "incompatible")
    assert half["model"]["reasons"] == ["float32 here, bfloat16 there"]
    assert half["model"]["advice"]
    shown = kvnet("peers", "--models")
    assert shown.code == 0, shown.stderr
    assert "exact, measured" in shown.stdout
    assert "tiny-half-bf16: float32 here, bfloat16 there" in shown.stdout

    assert "members are told" in kvnet("node", "pause", "--for", "1h").stdout
    status = kvnet.json("status")
    assert status["not_serving"] == "paused"
    assert 3000 < status["pause_left_s"] <= 3600
    seen = other.until(
        lambda seen: {model["name"] for model in seen["peers"][0]["models"]} == {"tiny-both", "tiny-half-f32"}, "peers"
    )
    (peer,) = seen["peers"]
    assert (peer["state"], peer["scopes"], peer["member"]) == ("paused", ["mine"], True)

    # Both outlive a restart: the pause, and what is known of the models without loading one.
    assert kvnet("node", "stop").code == 0
    kvnet.start("--bootstrap", beside["addresses"][0])
    assert "nothing, paused" in kvnet("status").stdout
    again = by_name(kvnet.json("model", "match", "tiny-both", "--no-load"))
    assert again["tiny-both"]["unknown"] == ""
    resumed = kvnet.json("node", "resume")
    assert (resumed["was_paused"], resumed["why_not"]) == (True, "")
    status = kvnet.json("status")
    assert (status["not_serving"], status["engines"]) == ("", [])
