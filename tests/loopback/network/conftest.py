"""Nodes on 127.0.0.1: in this process, and in processes that can be killed."""

import hashlib
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio

from kvnet.network.libp2p.host import LibP2PNetwork

PATIENCE_S = 60.0
"""Seconds that what has to happen may take; nothing here depends on how fast the machine is."""
PEER_PROCESS = Path(__file__).with_name("peer_process.py")


@dataclass
class PeerProcess:
    """A node in another process."""

    process: subprocess.Popen[str]
    address: str

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)


SpawnPeer = Callable[..., PeerProcess]
StartNode = Callable[..., Awaitable[LibP2PNetwork]]


@pytest.fixture
def spawn_peer(repository_root: Path) -> Iterator[SpawnPeer]:
    """Starts node processes, and kills those that are left."""
    spawned: list[subprocess.Popen[str]] = []

    def spawn(name: str = "peer", *, listen: str = "127.0.0.1:0", bootstrap: tuple[str, ...] = ()) -> PeerProcess:
        process = subprocess.Popen(
            [sys.executable, str(PEER_PROCESS), name, listen, *bootstrap],
            stdout=subprocess.PIPE,
            text=True,
            cwd=repository_root,
            env={"PYTHONPATH": str(repository_root)},
        )
        spawned.append(process)
        assert process.stdout is not None
        return PeerProcess(process, process.stdout.readline().strip())

    yield spawn
    for process in spawned:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def start_node(nursery: trio.Nursery) -> StartNode:
    """Starts nodes in this process; they end with the test."""

    async def start(
        name: str = "node", *, listen: str = "127.0.0.1:0", bootstrap: tuple[str, ...] = ()
    ) -> LibP2PNetwork:
        seed = hashlib.sha256(name.encode()).digest()
        network = LibP2PNetwork(seed, listen=[listen], bootstrap=bootstrap, rebootstrap_interval_s=1.0)
        await nursery.start(network.run)
        return network

    return start
