"""The model of requests that name none, as a start and a status say it."""

import pytest

from tests.e2e.conftest import Kvnet
from tests.mlx.tinymodels import LLAMA, write_model

pytestmark = [pytest.mark.e2e, pytest.mark.mlx]


def test_the_only_shareable_model_is_named_by_the_status(kvnet: Kvnet) -> None:
    write_model(kvnet.data_dir / "models" / "tiny", LLAMA)
    assert kvnet.json("status")["model"] == "tiny"


def test_a_status_says_why_there_is_no_default_model(kvnet: Kvnet) -> None:
    for name in ("one", "two"):
        write_model(kvnet.data_dir / "models" / name, LLAMA)
    status = kvnet.json("status")
    assert status["model"] == ""
    assert "found 2 that can" in status["no_model"]


def test_a_node_does_not_start_with_a_model_that_is_not_here(kvnet: Kvnet) -> None:
    write_model(kvnet.data_dir / "models" / "tiny", LLAMA)
    error = kvnet("--json", "node", "start", "--listen", "127.0.0.1:0", "--api", "127.0.0.1:0", "--model", "tiyn").error
    assert (error["code"], error["hint"]) == ("unknown_model", "models here: tiny")
