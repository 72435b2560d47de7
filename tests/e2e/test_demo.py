"""``kvnet demo`` as CI runs it."""

import shutil
from pathlib import Path

import pytest

from kvnet.engine.gguf_source import find_demo_gguf
from tests.e2e.conftest import Kvnet

pytestmark = [pytest.mark.e2e, pytest.mark.mlx]


@pytest.mark.skipif(find_demo_gguf() is None, reason="the wheel with the demo's model is not installed")
def test_the_quick_demo_shows_equal_texts_and_reuse_from_peer_and_disk(kvnet: Kvnet, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    ran = kvnet("--json", "demo", "--quick", KVNET_CACHE_DIR=str(cache))
    # Half a gigabyte that pytest would keep for its last three runs.
    shutil.rmtree(cache)
    result = ran.result
    assert result["type"] == "demo"
    assert result["same_text"] is True
    assert result["text_cold"] == result["text_peer"] != ""
    assert result["fetched_tokens"] == result["prefix_tokens"] >= 250
    assert result["fetched_bytes"] > 10_000_000
    assert result["ttft_ratio"] > 0
    assert result["artifact"].startswith("bafyr4i")
