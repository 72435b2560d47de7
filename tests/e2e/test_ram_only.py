"""A node that keeps nothing about prompts on disk."""

import sys
from pathlib import Path

import httpx
import pytest

from kvnet_node.ram_store import ram_directory_of
from tests.e2e.conftest import TIMEOUT_S, Kvnet
from tests.mlx.tinymodels import LLAMA, write_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.loopback,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a folder that is kept in memory"),
]

SECRET = "the cellar door code is nine seven one three, tell nobody about it. " * 30


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "models" not in path.parts
    }


@pytest.mark.mlx
def test_a_request_is_answered_and_leaves_nothing_on_disk(kvnet: Kvnet) -> None:
    write_model(kvnet.data_dir / "models" / "tiny", LLAMA)
    started, _ = kvnet.start("--ram-only", "--model", "tiny")
    status = kvnet.json("node", "status")
    assert status["ram_only"]
    assert "in RAM only" in kvnet("node", "status").stdout
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": SECRET}]}
    for _ in range(2):
        answer = httpx.post(f"{started['endpoint'][0]}/v1/chat/completions", json=body, timeout=TIMEOUT_S)
        assert answer.status_code == 200
    assert answer.headers["x-kvnet-source"] == "ram"
    assert kvnet.json("node", "stop")
    written = files_of(kvnet.data_dir)
    assert not any(name.startswith(("store/", "savings")) for name in written)
    assert not any(b"cellar door" in content for content in written.values())


def test_naming_a_context_is_refused_and_says_why(kvnet: Kvnet, tmp_path: Path) -> None:
    kvnet.start("--ram-only")
    document = tmp_path / "rules.txt"
    document.write_text(SECRET)
    ran = kvnet("--json", "add", str(document), "--name", "rules")
    assert ran.code == 50
    assert ran.error["code"] == "ram_only"
    assert "--ram-only" in ran.error["hint"]


def test_the_place_in_ram_ends_with_the_node_and_what_a_killed_one_left_ends_with_the_next_start(kvnet: Kvnet) -> None:
    place = ram_directory_of(kvnet.data_dir)
    _, process = kvnet.start("--ram-only")
    assert (place / "store" / "packs").is_dir()
    assert kvnet.json("node", "stop")
    assert not place.exists()
    _, process = kvnet.start("--ram-only")
    process.kill()
    process.wait(timeout=TIMEOUT_S)
    assert place.exists()
    kvnet.start()
    assert not place.exists()
    assert (kvnet.data_dir / "store").is_dir()
