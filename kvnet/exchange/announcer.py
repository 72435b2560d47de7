"""Announce: tell the DHT, at the pace the announce machine sets, what this node has."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import trio

from kvnet.errors import NetworkError
from kvnet.exchange.identity import Identity
from kvnet.exchange.lane import Lane
from kvnet.format.hashes import ArtifactHash, LookupKey, PrefixKey
from kvnet.format.manifest import Manifest
from kvnet.format.prefix import checkpoints
from kvnet.network.interface import Network
from kvnet.network.news import News
from kvnet.protocol.announce import AnnouncedKey, AnnounceLimits, AnnounceMachine, AnnounceStatus
from kvnet.protocol.ids import PeerId

if TYPE_CHECKING:
    from trio_typing import TaskStatus

_log = logging.getLogger(__name__)

CHECK_TIMEOUT_S = 10.0
"""Seconds a check may take; it runs behind everything else."""

ROUTING_POLL_S = 2.0
"""How often the peers and an empty routing table are looked at."""

KEEP_INTERVAL_S = 5.0
"""How often what changed is written down; what a crash loses is announced once more than needed."""

COMPLAINT_INTERVAL_S = 60.0
"""Least seconds between two log lines that say the same of announcing."""


@dataclass(frozen=True, slots=True)
class KeptKey:
    """A key as it is kept between two runs.

    Attributes:
        key, order, uses: as in `AnnouncedKey`.
        announced_s: when it was last announced with success, in seconds since 1970; None: never.
    """

    key: bytes
    order: int
    uses: int
    announced_s: float | None


class AnnounceKeeper(Protocol):
    """Where keys outlive a run. Its calls block, and raise nothing: a record lost is announced again."""

    def load(self) -> Sequence[KeptKey]:
        """Everything kept."""

    def save(self, changed: Sequence[KeptKey], removed: Sequence[bytes]) -> None:
        """Keep some, and keep others no longer."""


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
        lane: where the keeper is called.
        keeper: what outlives this run; None: nothing does.
        random: fresh random bytes.
        wall_s: seconds since 1970, which what is kept is dated by.
    """

    def __init__(
        self,
        network: Network,
        limits: AnnounceLimits | None = None,
        *,
        lane: Lane,
        keeper: AnnounceKeeper | None = None,
        random: Callable[[int], bytes],
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._network = network
        self._machine = AnnounceMachine(limits)
        self._lane = lane
        self._keeper = keeper
        self._random = random
        self._wall_s = wall_s
        self._changed = News()
        self._alone = False
        self._quiet = False
        self._here: frozenset[PeerId] = frozenset()
        self._complained: dict[str, float] = {}

    async def load(self) -> None:
        """Take up what was kept of an earlier run; before anything is added."""
        if self._keeper is None:
            return
        wall_s = self._wall_s()
        # A clock that was set back must not make a key look announced in the future.
        kept = [
            AnnouncedKey(
                each.key,
                each.order,
                each.uses,
                None if each.announced_s is None else max(0.0, wall_s - each.announced_s),
            )
            for each in await self._lane.run(self._keeper.load)
        ]
        self._machine.restore(kept, trio.current_time())

    async def loaded(self) -> None:
        """Everything held has been added: what was kept of anything else is forgotten."""
        gone = self._machine.forget_unused_history()
        if gone and self._keeper is not None:
            await self._lane.run(self._keeper.save, [], gone)

    def add(self, keys: Iterable[bytes]) -> None:
        """Announce these too; the last is the newest."""
        self._machine.add(keys, trio.current_time())
        self._changed.tell()

    def used(self, keys: Iterable[bytes]) -> None:
        """What these name was reused: they are announced sooner."""
        self._machine.used(keys)

    def remove(self, keys: Iterable[bytes]) -> None:
        """Announce these no longer."""
        self._machine.remove(keys)

    def clear(self) -> None:
        """Announce nothing of what was added so far; records told already age out by themselves."""
        self._machine.clear(trio.current_time())

    def network_changed(self) -> None:
        """This node is reached in another way than before: everything is announced again."""
        self._machine.reconnected(trio.current_time())
        self._changed.tell()

    @property
    def quiet(self) -> bool:
        """Whether nothing is announced for now; what was told before ages out by itself."""
        return self._quiet

    @quiet.setter
    def quiet(self, quiet: bool) -> None:
        self._quiet = quiet
        self._changed.tell()

    def status(self) -> AnnounceStatus:
        """How announcing goes."""
        return self._machine.status(trio.current_time())

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Announce until cancelled."""
        task_status.started()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_network)
            nursery.start_soon(self._keep)
            while True:
                deadline = None if self._quiet else self._machine.next_deadline()
                with trio.move_on_at(deadline if deadline is not None else float("inf")) as scope:
                    await self._changed.wait()
                if not scope.cancelled_caught:
                    continue
                # The machine's clock may say "now" while nothing can be sent yet: at least one turn of the loop passes.
                await trio.lowlevel.checkpoint()
                if self._network.routing_peers() == 0:
                    self._nobody_there()
                    await trio.sleep(ROUTING_POLL_S)
                    continue
                self._alone = False
                now = trio.current_time()
                key = self._machine.next_key(now)
                if key is not None:
                    await self._announce(key)
                checked = self._machine.next_check(now)
                if checked is not None:
                    nursery.start_soon(self._check, checked)

    def _nobody_there(self) -> None:
        """What is due waits for the first peer, which is told at once; that it waits is counted and said."""
        if not self._alone:
            self._alone = True
            self._machine.found_nobody()
            self._complain("nobody to announce to: %d keys wait for the first peer", self.status().keys)

    async def _announce(self, key: bytes) -> None:
        def report(reported: bytes, n_peers: int) -> None:
            jitter = self._random(1)[0] / 255
            self._machine.announced(reported, n_peers, trio.current_time(), jitter=jitter)
            if n_peers == 0:
                self._complain("an announcement reached nobody; %d did so far", self.status().failed)
            self._changed.tell()

        try:
            await self._network.provide(key, report=report)
        except NetworkError:
            report(key, 0)

    async def _check(self, key: bytes) -> None:
        """Would others find us? The lookup goes past the cache; it never finds ourselves, so servers are asked."""
        found = await self._network.is_announced(key, timeout_s=CHECK_TIMEOUT_S)
        if found is not None:
            self._machine.checked(key, found=found, now=trio.current_time())
            if not found:
                self._complain("announced, and not found by a lookup; %d were not so far", self.status().not_found)
            self._changed.tell()

    async def _watch_network(self) -> None:
        """After there was nobody to tell, or when a peer has come, everything is due."""
        was_routed = False
        while True:
            is_routed = self._network.routing_peers() > 0
            here = frozenset(info.peer for info in self._network.connected())
            if is_routed and not was_routed:
                self._machine.reconnected(trio.current_time())
                self._changed.tell()
            elif here - self._here:
                # A server that restarted has lost its records, and nothing tells it from one that is new.
                self._machine.peers_came(trio.current_time())
                self._changed.tell()
            was_routed, self._here = is_routed, here
            status = self.status()
            if status.falling_behind and is_routed:
                self._complain(
                    "announcing falls behind: %d of %d keys are overdue, by %.0f s of work",
                    status.overdue,
                    status.keys,
                    status.behind_s,
                )
            await trio.sleep(ROUTING_POLL_S)

    async def _keep(self) -> None:
        """Write down what changed, now and then and at the end."""
        if self._keeper is None:
            return
        try:
            while True:
                await trio.sleep(KEEP_INTERVAL_S)
                await self._save()
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
                await self._save()

    async def _save(self) -> None:
        changed, removed = self._machine.take_changes(trio.current_time())
        if self._keeper is None or not (changed or removed):
            return
        wall_s = self._wall_s()
        kept = [
            KeptKey(each.key, each.order, each.uses, None if each.age_s is None else wall_s - each.age_s)
            for each in changed
        ]
        await self._lane.run(self._keeper.save, kept, removed)

    def _complain(self, text: str, *figures: float) -> None:
        """Say something is wrong, but not over and over."""
        now = trio.current_time()
        if now >= self._complained.get(text, float("-inf")) + COMPLAINT_INTERVAL_S:
            self._complained[text] = now
            _log.warning(text, *figures)
