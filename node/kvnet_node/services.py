"""What a node, or one verb, has at hand: its parts, and what is done with several of them at once."""

import secrets
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog
import trio

from kvnet.engine.client import open_engine
from kvnet.errors import KvnetError, RamOnlyError, StoreAwayError
from kvnet.exchange.fetcher import Fetched
from kvnet.exchange.flights import Flights, Shared
from kvnet.exchange.keeping import Keeper
from kvnet.exchange.lane import ThreadLane
from kvnet.exchange.node import ExchangeNode
from kvnet.exchange.publisher import Publisher
from kvnet.exchange.scrubber import Scrubbed, Scrubber, ScrubPace
from kvnet.exchange.shared_names import SharedNames
from kvnet.exchange.statements import Statements
from kvnet.exchange.tables import Tables
from kvnet.format.hashes import ArtifactHash
from kvnet.format.limits import MAX_TICKET_ADDRESSES
from kvnet.format.ticket import Ticket, format_ticket
from kvnet.network.bulk.sessions import CIPHER_NONE
from kvnet.protocol.ids import peer_text
from kvnet.store.disk import DiskStore
from kvnet.store.names import NameBook
from kvnet_node.api.front import Front
from kvnet_node.api.requests_log import RequestLog
from kvnet_node.engines import EngineShelf
from kvnet_node.guest.guest import Guest
from kvnet_node.guest.pausing import Pause
from kvnet_node.identity import NodeIdentity
from kvnet_node.membership import Memberships
from kvnet_node.model_matching import ModelMatching
from kvnet_node.neighbours import Surroundings
from kvnet_node.paths import note_private
from kvnet_node.removals import Removals
from kvnet_node.savings import Savings
from kvnet_node.speeds import Speeds
from kvnet_node.statement_store import StatementStore
from kvnet_node.writes import Writes

if TYPE_CHECKING:
    from kvnet_node.invocation import Settings
    from kvnet_node.operations.requests import PeerEntry

_log = structlog.get_logger(__name__)

CONNECT_TIMEOUT_S = 10.0
LOOK_S = 2.0
"""Seconds from one look for a store that has gone to the next."""
TIDY_S = 60.0
"""Seconds from one look at what of the store may go to the next."""


class Services:
    """The parts of a node.

    Attributes:
        config: the settings in force.
        paths: of the data directory.
        identity: own keys, namespaces, trusted publishers.
        store: artifacts; call it through ``lane``.
        names: named contexts; call it through ``lane``.
        lane: where blocking store work runs, one piece at a time.
        background: the same for what takes long and nobody waits for.
        engines: engine processes, started at first use.
        speeds: what this machine was measured to do with each model.
        savings: the ledger of what reuse has spared.
        writes: what may be written and was written today.
        publisher: turns token prefixes into artifacts.
        fetches: fetches by name under way, so that commands for the same artifact share one.
        statement_store: the file of the statements.
        statements: what publishers have said of keys, artifacts and members.
        shared_names: what publishers call what they share.
        memberships: inviting, joining, and who is in which namespace.
        removals: follows what the owner's other machines remove.
        node: this node among its peers; None when this run needs no network.
        surroundings: neighbours and members met before; only in a running node.
        matching: compares models with those of peers; None without a network.
        pause: whether the owner paused the node.
        guest: what the node does for others; only in a running node.
        tables: what members tell each other that they hold; only in a running node.
        request_log: the last requests of HTTP clients, in RAM.
        keeper: stores what is worth keeping of conversations; only in a running node.
        front: runs the requests of HTTP clients; only in a running node.
        endpoint: URLs of the HTTP endpoint, each before ``/v1``; empty when there is none.
        stop_requested: set to end a running node.
    """

    def __init__(self, settings: "Settings", store: DiskStore, identity: NodeIdentity, store_dir: Path) -> None:
        self.config = settings.config
        self.paths = settings.paths
        self.identity = identity
        self.store = store
        self.names = NameBook(settings.paths.names_dir)
        self.lane = ThreadLane()
        self.background = ThreadLane()
        self.engines = EngineShelf(settings.config, settings.paths, open_engine)
        self.speeds = Speeds(settings.paths.speeds_file, settings.paths.calibrations_file)
        # With the store in RAM, what was reused of it is nobody's business after its end either.
        ram_only = settings.config.ram_only
        self.savings = Savings(store_dir / "savings.sqlite3" if ram_only else settings.paths.savings_file)
        self.writes = Writes(settings.paths.writes_file, settings.config.write_budget_bytes_day)
        self.publisher = Publisher(store, self.lane, identity)
        self.fetches: Flights[Shared[Fetched]] = Flights(Shared[Fetched])
        self.statement_store = StatementStore(settings.paths.network_dir / "statements.sqlite3")
        self.statements = Statements(
            identity, self.statement_store, ThreadLane(), now=time.time, random=secrets.token_bytes
        )
        self.shared_names = SharedNames(identity, self.statements)
        self.memberships = Memberships(
            identity, self.statements, self.lane, changed=self.namespaces_changed, random=secrets.token_bytes
        )
        self.removals = Removals(
            identity, self.statements, store, self.names, self.lane, removed=self._removed_elsewhere
        )
        self.node: ExchangeNode | None = None
        self.surroundings: Surroundings | None = None
        self.matching: ModelMatching | None = None
        self.pause = Pause(settings.paths.pause_file)
        self.guest: Guest | None = None
        self.tables: Tables | None = None
        self.request_log = RequestLog()
        self.keeper: Keeper | None = None
        self.front: Front | None = None
        self.endpoint: list[str] = []
        self.stop_requested = trio.Event()
        self._started_s = time.monotonic()

    def addresses(self) -> list[str]:
        """Where this node can be reached, with its peer id; empty without a network."""
        return self.node.addresses() if self.node else []

    def bootstrap(self) -> tuple[str, ...]:
        """Where others are looked for at start: as configured, and where members were when this node joined them."""
        return tuple(dict.fromkeys((*self.config.bootstrap, *self.identity.swarms.addresses())))

    def ticket(self, artifact: ArtifactHash, *, serving: bool) -> str:
        """The ticket of an artifact held here; without addresses when no node is running to be asked there."""
        addresses = [text for text in self.addresses() if "/127.0.0.1/" not in text and "/ip6/::1/" not in text]
        found = (addresses or self.addresses())[:MAX_TICKET_ADDRESSES] if serving else []
        return format_ticket(Ticket(artifact, tuple(found)))

    @property
    def peer_text(self) -> str:
        """This node's peer id; "" without a network."""
        return peer_text(self.node.peer_id) if self.node else ""

    def uptime_s(self) -> float:
        """Seconds since the services were opened."""
        return time.monotonic() - self._started_s

    def require_disk(self, what: str) -> None:
        """Refuse to keep what has to outlive this node when it was told to keep nothing.

        Args:
            what: is to be kept, in words.

        Raises:
            RamOnlyError: it was told so.
        """
        if self.config.ram_only:
            raise RamOnlyError(
                f"expected a store on disk for {what}, found one in RAM (store.ram_only)",
                hint="start the node without --ram-only, or set store.ram_only = false in config.toml",
            )

    async def connect(self, address: str) -> None:
        """Connect to a peer.

        Raises:
            UsageError: not an address.
            PeerUnreachableError: nobody answers there.
        """
        if self.node is not None:
            await self.node.connect(address, timeout_s=CONNECT_TIMEOUT_S)

    def peer_entries(self) -> list["PeerEntry"]:
        """The connected peers."""
        from kvnet_node.operations.requests import PeerEntry

        known = self.node.peers() if self.node else []
        return [
            PeerEntry(peer_text(each.info.peer), list(each.info.addresses), member=each.member, chunks=each.chunks)
            for each in known
        ]

    def bulk_text(self) -> str:
        """Where bulk connections are taken, whether encrypted, and with how many peers there are none.

        "" without a network.
        """
        if self.node is None or self.node.bulk is None:
            return ""
        endpoint = self.node.bulk.endpoint
        parts = [f"port {endpoint.port}" if endpoint.port else "dialling only"]
        if endpoint.cipher == CIPHER_NONE:
            parts.append("NOT ENCRYPTED with peers that allow it")
        slower = sum(each.chunks.startswith("stream") for each in self.node.peers())
        if slower:
            parts.append(f"not with {slower} connected peer{'s' if slower > 1 else ''} (kvnet peers says why)")
        return ", ".join(parts)

    def _removed_elsewhere(self, artifact: ArtifactHash) -> None:
        if self.node is not None:
            self.node.removed(artifact)

    async def drop_live(self) -> None:
        """Have the engines forget what they keep in memory between requests."""
        for engine in self.engines.engines():
            await engine.drop_live()

    async def namespaces_changed(self) -> None:
        """Called after namespaces changed: prefixes are indexed by them, and peers are shown what this node is in."""
        await self.lane.run(self.store.index_prefixes, self.identity.keys_of)
        if self.node is not None:
            await self.node.reload()
        if self.surroundings is not None:
            self.surroundings.namespaces_changed()

    def verified_models(self) -> list[str]:
        """Models that passed the self test on this machine."""
        try:
            return sorted(msgspec.json.decode(self.paths.verified_file.read_bytes(), type=dict[str, str]))
        except (FileNotFoundError, msgspec.DecodeError):
            return []

    def scrubber(self) -> Scrubber:
        """Reads the store through; what went bad comes from peers, where there is a network."""
        repair = partial(self.node.repair, wrote=self.writes.named) if self.node is not None else None
        return Scrubber(self.store, self.lane, repair)

    async def _repair_unasked(self, artifact: ArtifactHash, indices: Sequence[int]) -> bool:
        """Fetch chunks that went bad, unless nothing is to be fetched that nobody has asked for."""
        if self.node is None or (self.guest is not None and not self.guest.conduct.replicate):
            return False
        return await self.node.repair(artifact, indices, wrote=self.writes.fetched)

    async def scrub_now_and_then(self) -> None:
        """Read the store through whenever that is due, also across restarts; until cancelled."""
        pace = ScrubPace(self.config.scrub_interval_s, float(self.config.scrub_bytes_s))
        try:
            last_s = msgspec.json.decode(self.paths.scrub_file.read_bytes(), type=float)
        except (FileNotFoundError, msgspec.DecodeError):
            last_s = time.time()
            note_private(self.paths.scrub_file, msgspec.json.encode(last_s))

        def done(found: Scrubbed) -> None:
            note_private(self.paths.scrub_file, msgspec.json.encode(time.time()))
            _log.info("store scrubbed", chunks=found.chunks, bad=found.bad, repaired=len(found.repaired))

        scrubber = Scrubber(self.store, self.lane, self._repair_unasked)
        await scrubber.run(pace, next_in_s=pace.due_in_s(last_s, time.time()), done=done)

    async def watch_store(self) -> None:
        """Use the store again when its drive is back, and announce only what is there; until cancelled."""
        was_there = True
        while True:
            await trio.sleep(LOOK_S)
            is_there = await self.background.run(self.store.look)
            if is_there and not was_there and self.node is not None:
                try:
                    await self.node.reload()
                except KvnetError as error:
                    _log.warning("store not announced", reason=str(error))
            was_there = is_there

    async def tidy_now_and_then(self) -> None:
        """Let go of what nobody uses, at start and from then on; until cancelled. No lookup waits for it."""
        unused_s = self.config.keep_days * 24 * 3600.0
        while True:
            try:
                await self.background.run(partial(self.store.tidy, unused_s=unused_s))
            except StoreAwayError:
                pass  # the store has said so
            except KvnetError as error:
                _log.warning("store not tidied", reason=str(error))
            if self.node is not None:
                for artifact in self.store.take_evicted():
                    self.node.removed(artifact)
            await trio.sleep(TIDY_S)

    def counters(self) -> dict[str, int]:
        """What this node has counted since it started."""
        if self.node is None:
            return {}
        announcing = self.node.announcing()
        return {
            **self.node.counters(),
            **(self.front.counters if self.front is not None else {}),
            **(self.keeper.counters() if self.keeper is not None else {}),
            **self.statements.counters,
            "announced": announcing.announced,
            "announcements_alone": announcing.alone,
            "announcements_failed": announcing.failed,
            "announcements_overdue": announcing.overdue,
            **(self.tables.counted() if self.tables is not None else {}),
        }
