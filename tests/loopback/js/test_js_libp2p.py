"""js-libp2p beside kvnet: it pings a node, finds a provider record of ours, and provides one that we find.

The packages are those of ``package-lock.json``, installed once into the user's cache.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import platformdirs
import pytest
import trio

from kvnet.protocol.ids import peer_text
from tests.loopback.network.conftest import StartNode, start_node

pytestmark = pytest.mark.loopback

HERE = Path(__file__).parent
FILES = ("package.json", "package-lock.json", "peer.mjs", "poly.mjs")
OLDEST_NODE_JS = 20
INSTALL_LIMIT_S = 120
OFFLINE = re.compile(r"ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ENETUNREACH|ETIMEDOUT|ERR_SOCKET_TIMEOUT|ENOTCACHED")
OURS, THEIRS = bytes(range(32)), bytes(range(100, 132))

__all__ = ["start_node"]


@pytest.fixture(scope="module")
def js() -> Path:
    """A folder with the script and its packages."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("Node.js or npm is not installed")
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.removeprefix("v").split(".")[0]) < OLDEST_NODE_JS:
        pytest.skip(f"Node.js {OLDEST_NODE_JS} or later is needed, found {version}")
    digest = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in FILES)).hexdigest()
    folder = platformdirs.user_cache_path("kvnet-tests") / f"js-{digest[:16]}"
    if not folder.is_dir():
        _install(folder)
    return folder


def _install(folder: Path) -> None:
    """Install into a folder beside it, which takes its name when all is there."""
    half = folder.with_name(f"{folder.name}.{os.getpid()}")
    half.mkdir(parents=True)
    for name in FILES:
        shutil.copy(HERE / name, half)
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline", "--fetch-retries=1"]
    try:
        ran = subprocess.run(
            command, cwd=half, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, stdin=subprocess.DEVNULL,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        shutil.rmtree(half)
        pytest.skip(f"npm did not install the packages within {INSTALL_LIMIT_S} s")
    if ran.returncode:
        shutil.rmtree(half)
        if OFFLINE.search(ran.stderr):
            pytest.skip("npm cannot reach its registry, and its cache does not have the packages")
        raise AssertionError(f"npm ci failed: {ran.stderr[-2000:]}")
    try:
        half.rename(folder)
    except OSError:
        shutil.rmtree(half)  # another test run was first


class Script:
    """The running script, and what it says."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._buffer = b""

    async def line(self) -> dict[str, Any]:
        """The next line."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        while b"\n" not in self._buffer:
            more = await self._process.stdout.receive_some()
            assert more, f"the script ended: {(await self._process.stderr.receive_some()).decode()}"
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        said: dict[str, Any] = json.loads(line)
        return said


@asynccontextmanager
async def running(folder: Path, *arguments: str) -> AsyncIterator[Script]:
    """Run the script until the block ends."""
    command = ["node", "--import", "./poly.mjs", "peer.mjs", *arguments]
    process = await trio.lowlevel.open_process(
        command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        yield Script(process)
    finally:
        process.kill()
        await process.wait()


async def test_js_libp2p_pings_finds_and_provides(js: Path, start_node: StartNode) -> None:
    server, provider, finder = [await start_node(name) for name in ("server", "provider", "finder")]
    for node in (provider, finder):
        await node.connect(server.addresses()[0], timeout_s=5)
    told = trio.Event()
    await provider.provide(OURS, report=lambda _key, _count: told.set())
    with trio.fail_after(40):
        await told.wait()
        async with running(js, server.addresses()[0], OURS.hex(), THEIRS.hex()) as script:
            started = await script.line()
            assert (await script.line())["routing"] >= 1
            assert 0 <= (await script.line())["ping_ms"] < 15_000
            found = (await script.line())["providers"]
            assert found == [{"peer": peer_text(provider.peer_id), "addresses": provider.addresses()}]
            assert await script.line() == {"provided": True}
            hints = await finder.find_providers(THEIRS)
            assert [(peer_text(hint.peer), list(hint.addresses)) for hint in hints] == [
                (started["peer"], started["addresses"])
            ]
