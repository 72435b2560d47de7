"""Announce: tell the DHT, at the pace the announce machine sets, what this node has."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import trio

from kvnet.errors import NetworkError
from kvnet.exchange.identity import Identity
from kvnet.format.hashes import ArtifactHash, LookupKey, PrefixKey
from kvnet.format.manifest import Manifest
from kvnet.format.prefix import checkpoints
from kvnet.network.interface import Network
from kvnet.protocol.announce import AnnounceLimits, AnnounceMachine, AnnounceStatus

if TYPE_CHECKING:
    from trio_typing import TaskStatus

CHECK_TIMEOUT_S = 10.0
"""Seconds a check may take; it runs behind everything else."""

ROUTING_POLL_S = 2.0
"""How often an empty routing table is looked at for the first peer."""


def announced_keys(
    identity: Identity, manifest: Manifest, artifact: ArtifactHash, keys: list[PrefixKey]
) -> list[bytes]:
    """What an artifact is announced under, the most useful last: its checkpoints, its end, its own hash.

    Everything is under the lookup secret of its namespace; an artifact of another namespace has none.
    """
    for namespace in identity.namespaces():
        if namespace.id == manifest.namespace:
            blocks = checkpoints(manifest.n_tokens)
            found: list[LookupKey] = [namespace.lookup_key(keys[block - 1]) for block in blocks]
            return [*(bytes(key) for key in found), bytes(namespace.keyed_artifact(artifact))]
    return []


class Announcer:
    """Drives the announce machine.

    Args:
        network: where to announce.
        limits: the pace.
    """

    def __init__(self, network: Network, limits: AnnounceLimits | None = None) -> None:
        self._network = network
        self._limits = limits
        self._machine = AnnounceMachine(limits)
        self._changed = trio.Event()
        self._connected = False

    def add(self, keys: Iterable[bytes]) -> None:
        """Announce these too; the last is the newest."""
        self._machine.add(keys, trio.current_time())
        self._wake()

    def remove(self, keys: Iterable[bytes]) -> None:
        """Announce these no longer."""
        self._machine.remove(keys)

    def clear(self) -> None:
        """Announce nothing of what was added so far; records told already age out by themselves."""
        self._machine = AnnounceMachine(self._limits)

    def status(self) -> AnnounceStatus:
        """How announcing goes."""
        return self._machine.status(trio.current_time())

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Announce until cancelled."""
        task_status.started()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_network)
            while True:
                deadline = self._machine.next_deadline()
                changed = self._changed
                with trio.move_on_at(deadline if deadline is not None else float("inf")) as scope:
                    await changed.wait()
                if not scope.cancelled_caught:
                    continue
                # The machine's clock may say "now" while nothing can be sent yet: at least one turn of the loop passes.
                await trio.lowlevel.checkpoint()
                if self._network.routing_peers() == 0:
                    # Nobody to tell is no failure: what is due waits for the first peer.
                    await trio.sleep(ROUTING_POLL_S)
                    continue
                now = trio.current_time()
                key = self._machine.next_key(now)
                if key is not None:
                    await self._announce(key)
                checked = self._machine.next_check(now)
                if checked is not None:
                    nursery.start_soon(self._check, checked)

    async def _announce(self, key: bytes) -> None:
        def report(reported: bytes, n_peers: int) -> None:
            self._machine.announced(reported, n_peers, trio.current_time())
            self._wake()

        try:
            await self._network.provide(key, report=report)
        except NetworkError:
            report(key, 0)

    async def _check(self, key: bytes) -> None:
        """Would others find us? The lookup goes past the cache; it never finds ourselves, so servers are asked."""
        found = await self._network.is_announced(key, timeout_s=CHECK_TIMEOUT_S)
        if found is not None:
            self._machine.checked(key, found=found, now=trio.current_time())
            self._wake()

    async def _watch_network(self) -> None:
        """After there was nobody to tell, everything is due at once."""
        while True:
            connected = self._network.routing_peers() > 0
            if connected and not self._connected:
                self._machine.reconnected(trio.current_time())
                self._wake()
            self._connected = connected
            await trio.sleep(ROUTING_POLL_S)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
