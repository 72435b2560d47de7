"""A real ``mlx_lm.server`` in a process of its own: what answers are compared with."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.ports import free_port

READY_S = 300.0


@contextmanager
def mlx_lm_server(model: Path, *options: str) -> Iterator[str]:
    """Runs the server for a model folder; gives its address."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_lm", "server", "--model", str(model), "--port", str(port), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    address = f"http://127.0.0.1:{port}"
    try:
        _wait(address, process)
        yield address
    finally:
        process.kill()
        process.wait()


def _wait(address: str, process: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + READY_S
    while True:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=60):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise
            # The server opens its port before the model is there, and tells nobody when.
            time.sleep(0.05)


def ask_server(address: str, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    """Status and body of an answer."""
    request = urllib.request.Request(
        address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=READY_S) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
