"""Codecs through the installed command, with a tiny model: what is made, shown, reused and removed."""

from pathlib import Path

import pytest

from tests.e2e.conftest import Kvnet
from tests.mlx import tinymodels

pytestmark = [pytest.mark.e2e, pytest.mark.mlx]

TEXT = "".join(f"Line {number}: wind, cloud and tide, before the lamp is lit.\n" for number in range(12))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tinymodels.write_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def document(tmp_path: Path) -> Path:
    file = tmp_path / "keeper.txt"
    file.write_text(TEXT, encoding="utf-8")
    return file


def test_two_codecs_make_two_artifacts_of_one_name(kvnet: Kvnet, document: Path, model: Path) -> None:
    # The lossless one comes first, whatever the order: the other is made of it, without computing again.
    wanted = ["add", str(document), "--name", "keeper", "--model", str(model), "--codec", "q8,raw"]
    added = kvnet.json(*wanted)
    assert (added["codec"], list(added["others"])) == ("raw", ["q8"])
    lossy = added["others"]["q8"]
    listed = {each["artifact"]: each for each in kvnet.json("list")["artifacts"]}
    assert set(listed) == {added["artifact"], lossy}
    assert all(each["names"] == ["keeper@1"] and each["pinned"] for each in listed.values())
    assert {each["codec"]: each["lossy"] for each in listed.values()} == {"raw": False, "q8": True}
    assert listed[lossy]["bytes"] < 0.4 * added["bytes"]
    assert "lossy (q8)" in kvnet("list").stdout
    assert kvnet.json("show", lossy)["lossy"]
    assert "q8 (lossy)" in kvnet("show", lossy).stdout
    assert "(lossy)" not in kvnet("show", "keeper").stdout
    again = kvnet.json(*wanted)
    assert (again["version"], again["new_bytes"], again["others"]) == (1, 0, added["others"])
    # Of the two, the exact one answers.
    answer = kvnet.json("ask", "keeper", "When?", "--max-tokens", "4")
    assert [source["artifact"] for source in answer["sources"]] == [added["artifact"]]
    kvnet.json("rm", "keeper")
    assert kvnet.json("list")["artifacts"] == []


def test_a_lossy_artifact_alone_is_used_when_the_owner_says_so(kvnet: Kvnet, document: Path, model: Path) -> None:
    ran = kvnet("add", str(document), "--name", "keeper", "--model", str(model), "--codec", "q8")
    assert ran.code == 0
    assert "reuse.lossy is never" in ran.stderr
    question = ["ask", "keeper", "When?", "--max-tokens", "4"]
    assert kvnet.json(*question)["reused_tokens"] == 0
    kvnet.environment["KVNET_REUSE_LOSSY"] = "always"
    answer = kvnet.json(*question)
    assert answer["reused_tokens"] > 0
    assert answer["verdict"] == "TOLERANT"
    kvnet.environment["KVNET_REUSE_NUMERICS"] = "exact"
    assert kvnet.json(*question)["reused_tokens"] == 0


def test_an_unknown_codec_is_a_usage_error_that_names_those_there_are(
    kvnet: Kvnet, document: Path, model: Path
) -> None:
    ran = kvnet("add", str(document), "--name", "keeper", "--model", str(model), "--codec", "raw,q9")
    assert ran.code == 2
    assert "raw or shuffle+zstd-1 or q8" in ran.stderr
