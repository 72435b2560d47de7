"""A node on the network: what it answers, serves and announces, and the use cases that need peers."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from kvnet.errors import KvnetError
from kvnet.exchange.announcer import AnnounceKeeper, Announcer
from kvnet.exchange.answering import Answerers
from kvnet.exchange.bulk import BulkTransport
from kvnet.exchange.fetcher import ArtifactFetcher, Fetched
from kvnet.exchange.finder import PrefixFinder
from kvnet.exchange.identity import Identity
from kvnet.exchange.known_peers import KnownPeer, connected_peers, providers_in_dht
from kvnet.exchange.lane import Lane
from kvnet.exchange.offering import Offering
from kvnet.exchange.peer_sessions import Greeting, PeerSessions, RandomBytes, SessionUses
from kvnet.exchange.reuse import Lossy
from kvnet.exchange.serving import ChunkServer
from kvnet.exchange.session import Answer, PeerSession
from kvnet.exchange.tables import Tables
from kvnet.exchange.transport import ChunkTransport, StreamTransport
from kvnet.format.hashes import ArtifactHash, PrefixKey
from kvnet.network.bulk.endpoint import BulkEndpoint
from kvnet.network.interface import Network, ProviderHint, StreamKind
from kvnet.protocol.announce import AnnounceLimits, AnnounceStatus
from kvnet.protocol.clock import clock_word
from kvnet.protocol.fetch import FetchLimits
from kvnet.protocol.ids import PeerId
from kvnet.protocol.messages.artifacts import GetManifest, ManifestReply
from kvnet.protocol.messages.control import ArtifactRequest, BulkRequest, Reply, Request
from kvnet.protocol.messages.handshake import Capability
from kvnet.protocol.pace import Purpose
from kvnet.protocol.serve import ServeLimits
from kvnet.store.interface import ArtifactRecord, Store

if TYPE_CHECKING:
    from trio_typing import TaskStatus


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """How a node behaves.

    Attributes:
        agent: program and version told to peers.
        serving: answer lookups and serve chunks; otherwise the node only asks.
        exact_only: reuse only artifacts whose verdict is ``EXACT``.
        lossy: when artifacts of a lossy codec are reused.
        announce: pace of announcements.
        serve: what one peer may ask for.
        fetch: patience and appetite when fetching.
        download_bytes_s: what may arrive a second; 0 for no limit.
    """

    agent: str = "kvnet"
    serving: bool = True
    exact_only: bool = False
    lossy: Lossy = Lossy.NEVER
    announce: AnnounceLimits | None = None
    serve: ServeLimits | None = None
    fetch: FetchLimits | None = None
    download_bytes_s: float = 0.0


class ExchangeNode:
    """One node among its peers.

    Args:
        network: not running yet; its handlers are set here.
        store: what this node holds.
        lane: where blocking store work runs.
        identity: namespaces, policy and signing key.
        random: source of nonces.
        options: how it behaves.
        bulk: its end of connections for chunks, not running yet; without one chunks go over the network's streams.
        announced: where it is kept what was announced, over restarts.
    """

    def __init__(
        self,
        network: Network,
        store: Store,
        lane: Lane,
        identity: Identity,
        *,
        random: RandomBytes,
        options: NodeOptions | None = None,
        bulk: BulkEndpoint | None = None,
        announced: AnnounceKeeper | None = None,
    ) -> None:
        self._options = options or NodeOptions()
        self._network = network
        self._store = store
        self._lane = lane
        self._identity = identity
        self._answerers = Answerers(self._answer_artifacts)
        self._offered: list[Capability] = []
        self._watchers: list[Callable[[ArtifactRecord], None]] = []
        self._askable: Callable[[PeerId], bool] = lambda _: True
        self._nursery: trio.Nursery | None = None
        self._sessions = PeerSessions(
            network,
            identity,
            SessionUses(self._answerers.answer, self._answered, self._session_ended, self._peer_left),
            random=random,
            agent=self._options.agent,
            capabilities=self._capabilities,
        )
        self._server = ChunkServer(store, lane, identity, self._sessions.find, self._options.serve)
        self._server.serving = self._options.serving
        self._announcer = Announcer(network, self._options.announce, lane=lane, keeper=announced, random=random)
        self._offering = Offering(store, lane, identity, self._server, self._announcer, announces=self._options.serving)
        streams = StreamTransport(network)
        self._bulk = None if bulk is None else self._bulk_transport(bulk, streams, random)
        self.fetcher = ArtifactFetcher(
            store,
            lane,
            identity,
            streams if self._bulk is None else self._bulk,
            self._asked,
            self._options.fetch,
            download_bytes_s=self._options.download_bytes_s,
        )
        self._sessions.greet_with(self._met)
        self.finder = self._prefix_finder()

    def _prefix_finder(self) -> PrefixFinder:
        finder = PrefixFinder(
            self._store,
            self._lane,
            self._identity,
            network=self._network,
            fetcher=self.fetcher,
            sessions=self._asked,
            open_session=self._open_to_ask,
            published=self.fetched,
            exact_only=self._options.exact_only,
        )
        finder.lossy = self._options.lossy
        return finder

    def _bulk_transport(self, bulk: BulkEndpoint, streams: ChunkTransport, random: RandomBytes) -> BulkTransport:
        sessions, server = self._sessions.with_peer, self._server
        return BulkTransport(bulk, self._network, streams, sessions, server, self._store, random=random)

    # --- what others add ----------------------------------------------------------------------------------------------

    def answer_with(self, kind: type[Request], answerer: Answer) -> None:
        """Say who answers requests of this kind; those for artifacts and bulk connections are answered already."""
        self._answerers.add(kind, answerer)

    def answer_former_with(self, answerer: Answer) -> None:
        """Say who answers those that name a lookup secret that was replaced; nobody else ever sees their requests."""
        self._answerers.add_former(answerer)

    def greet_with(self, greeting: Greeting) -> None:
        """Say what else is done with every session that opens; it ends with the session."""
        self._sessions.greet_with(greeting)

    def watch_published(self, watch: Callable[[ArtifactRecord], None]) -> None:
        """Say who is told of every artifact that comes into the store; fast, and never raises."""
        self._watchers.append(watch)

    def stop_sharing(self, artifacts: frozenset[ArtifactHash]) -> None:
        """Serve and announce these no more, in the middle of a request too; end fetches that trust no longer allows.

        Args:
            artifacts: all that are revoked, those of before included.
        """
        for artifact in artifacts - self._server.revoked:
            self.removed(artifact)
        self._server.revoked = artifacts
        self.fetcher.judge_again()

    def offer_capability(self, capability: Capability) -> None:
        """Tell peers, from the next session on, that this node can do this."""
        self._offered.append(capability)

    def use_tables(self, tables: Tables) -> None:
        """Look prefixes up in what members have told, and tell them what is held here; before `run`."""
        self._offering.tables = tables
        self.finder.lookups.tables = tables
        self._server.name_others_with(tables.records_for)
        self.fetcher.tells = tables.tells

    def ask_only(self, askable: Callable[[PeerId], bool]) -> None:
        """Say which members are asked for artifacts; the others are there, and serve nothing now."""
        self._askable = askable

    @property
    def serving(self) -> bool:
        """Whether peers get anything from this node, and others are told what it has."""
        return self._server.serving

    @serving.setter
    def serving(self, serving: bool) -> None:
        self._server.serving = serving and self._options.serving
        self._announcer.quiet = not serving

    @property
    def uploading(self) -> bool:
        """Whether chunks are on their way to a peer."""
        return self._server.uploading

    def _answer_artifacts(self, session: PeerSession, request: Request) -> Reply | None:
        assert isinstance(request, ArtifactRequest | BulkRequest)  # noqa: S101 - the answerers hand out by kind
        reply = self._server.answer(session, request)
        if isinstance(request, GetManifest) and isinstance(reply, ManifestReply):
            self._announcer.used([bytes(request.artifact)])
        return reply

    # --- life ---------------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Be on the network until cancelled.

        Raises:
            PortInUseError: a port that was asked for is taken.
        """
        self._network.set_handler(StreamKind.CONTROL, self._sessions.accept)
        self._network.set_handler(StreamKind.CHUNKS, self._server.serve_chunks)
        await self._server.load()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await nursery.start(self._network.run)
            await nursery.start(self._sessions.run)
            if self._bulk is not None:
                await nursery.start(self._bulk.run)
            if self._options.serving:
                await self._offering.begin()
                nursery.start_soon(self._announcer.run)
            task_status.started()

    async def reload(self) -> None:
        """The namespaces have changed: serve and announce by them, and prove them to every peer anew."""
        await self._offering.reload()
        self._sessions.close_all()
        self._sessions.try_again()

    # --- peers --------------------------------------------------------------------------------------------------------

    def addresses(self) -> list[str]:
        """Where this node can be reached."""
        return self._network.addresses()

    @property
    def bulk(self) -> BulkTransport | None:
        """Its connections for chunks; None when it uses the network's streams."""
        return self._bulk

    @property
    def identity(self) -> Identity:
        """Namespaces, policy and signing key."""
        return self._identity

    @property
    def network(self) -> Network:
        """The network this node is on."""
        return self._network

    async def providers_of(self, artifact: ArtifactHash, *, timeout_s: float) -> list[ProviderHint]:
        """Whoever the DHT names for an artifact, in any of this node's namespaces; hints, each peer once."""
        return await providers_in_dht(self._network, self._identity.namespaces(), artifact, timeout_s=timeout_s)

    @property
    def peer_id(self) -> PeerId:
        """Who this node is on the network."""
        return self._network.peer_id

    def peers(self) -> list[KnownPeer]:
        """The connected peers."""
        return connected_peers(self._network, self._sessions, self._bulk)

    def sessions(self) -> Sequence[PeerSession]:
        """The open sessions in which some namespace is proved."""
        return self._sessions.members()

    def _asked(self) -> Sequence[PeerSession]:
        """The sessions with those that serve."""
        return [session for session in self.sessions() if self._askable(session.peer)]

    async def wait_for_members(self, timeout_s: float) -> None:
        """Return as soon as a session with a member is open, at the latest after ``timeout_s`` seconds."""
        await self._sessions.wait_for_members(timeout_s)

    def counters(self) -> dict[str, int]:
        """What happened so far, for people to read."""
        return dict(self._server.counters)

    def network_changed(self) -> None:
        """This machine is on another network, or awake again: say anew where it is, and try everybody again."""
        self._sessions.try_again()
        self._announcer.network_changed()
        if self._nursery is not None:
            for info in self._network.connected():
                self._nursery.start_soon(self._network.probe, info.peer)

    def session_with(self, peer: PeerId) -> PeerSession | None:
        """The open session with a peer, whether or not it has proved anything."""
        return self._sessions.with_peer(peer)

    def session_error(self, peer: PeerId) -> KvnetError | None:
        """Why the last session this node tried with a peer did not open; None when none failed lately."""
        return self._sessions.error(peer)

    def clock_skew_s(self, peer: PeerId) -> int | None:
        """By how many seconds a peer's clock is ahead of ours; None when it has not said."""
        return self._sessions.clock_skew_s(peer)

    def announcing(self) -> AnnounceStatus:
        """How announcing goes."""
        return self._announcer.status()

    async def connect(self, address: str, *, timeout_s: float = 10.0) -> PeerSession | None:
        """Connect to an address and open the session with whoever is there.

        Raises:
            UsageError: not an address with a peer id.
            PeerUnreachableError: nobody answers there.
        """
        peer = await self._network.connect(address, timeout_s=timeout_s)
        self._sessions.try_again(peer)
        return await self._sessions.open(peer)

    async def open_session(self, peer: PeerId) -> PeerSession | None:
        """The open session with a connected peer, opened if there is none; ``None`` when that fails."""
        return await self._sessions.open(peer)

    async def _open_to_ask(self, peer: PeerId) -> PeerSession | None:
        """The session with a peer that serves."""
        session = await self._sessions.open(peer)
        return session if self._askable(peer) else None

    async def _met(self, _session: PeerSession) -> None:
        self.fetcher.session_opened()

    def _answered(self, peer: PeerId, seconds: float) -> None:
        self.fetcher.scores.answered(peer, seconds, trio.current_time())

    def _session_ended(self) -> None:
        self._server.session_ended()

    def _peer_left(self, peer: PeerId) -> None:
        self._server.end_streams(peer)
        if self._bulk is not None:
            self._bulk.end_senders(peer)

    def _capabilities(self) -> tuple[str, ...]:
        serve = (Capability.SERVE, Capability.HAVE) if self._options.serving else ()
        bulk = () if self._bulk is None else (Capability.BULK, Capability.BULK_CANCEL)
        return (*serve, *bulk, *self._offered, clock_word(time.time()))

    # --- artifacts ----------------------------------------------------------------------------------------------------

    def published(self, record: ArtifactRecord, keys: Sequence[PrefixKey]) -> None:
        """Serve and announce an artifact that is in the store now, and no longer what had to go for it."""
        for evicted in self._store.take_evicted():
            self.removed(evicted)
        for watch in self._watchers:
            watch(record)
        self._offering.hold(record, keys)

    def fetched(self, result: Fetched) -> None:
        """Serve on what was fetched: same hash, same signature."""
        self.published(result.record, result.keys)

    async def repair(
        self, artifact: ArtifactHash, indices: Sequence[int], *, wrote: Callable[[int], None] = lambda _n_bytes: None
    ) -> bool:
        """Fetch chunks of an artifact that went bad here; whether all of them are held again.

        Args:
            artifact: the artifact.
            indices: of the chunks.
            wrote: told of the bytes that this wrote into the store.

        Raises:
            KvnetError: nobody reachable has it, or it cannot be kept.
        """
        located = await self.fetcher.locate(artifact)
        entries = await self.fetcher.chunk_list(located)
        result = await self.fetcher.fetch(located, entries, indices, purpose=Purpose.SCRUB)
        wrote(result.fetched_bytes)
        self.fetched(result)
        return all([await self._lane.run(self._store.has_chunk, entries[index].hash) for index in indices])

    def used(self, artifact: ArtifactHash) -> None:
        """An artifact was reused: it is announced before those that nobody uses."""
        self._offering.used(artifact)

    def removed(self, artifact: ArtifactHash) -> None:
        """Serve and announce an artifact no longer; keys that others share go on being announced."""
        self._offering.drop(artifact)
