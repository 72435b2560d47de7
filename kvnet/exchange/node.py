"""A node on the network: sessions with peers, serving, announcing, and the use cases that need peers."""

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import trio

from kvnet.errors import KvnetError, NetworkError
from kvnet.exchange.announcer import AnnounceKeeper, Announcer, announced_keys
from kvnet.exchange.bulk import BulkTransport
from kvnet.exchange.fetcher import ArtifactFetcher, Fetched
from kvnet.exchange.finder import PrefixFinder
from kvnet.exchange.identity import Identity
from kvnet.exchange.lane import Lane
from kvnet.exchange.reuse import Lossy
from kvnet.exchange.serving import ChunkServer
from kvnet.exchange.session import PeerSession
from kvnet.exchange.tables import Tables
from kvnet.exchange.transport import ChunkTransport, StreamTransport
from kvnet.format.hashes import ArtifactHash, PrefixKey
from kvnet.network.bulk.endpoint import BulkEndpoint
from kvnet.network.interface import ByteStream, Network, PeerInfo, ProviderHint, StreamKind
from kvnet.network.serving import serve_stream
from kvnet.protocol.announce import AnnounceLimits, AnnounceStatus
from kvnet.protocol.clock import clock_of, clock_word
from kvnet.protocol.fetch import FetchLimits
from kvnet.protocol.ids import PeerId
from kvnet.protocol.membership import NONCE_SIZE_BYTES, PADDING_SIZE_BYTES, PROOF_ENTRIES, Role
from kvnet.protocol.messages import (
    ArtifactRequest,
    BulkRequest,
    Capability,
    GetManifest,
    ManifestReply,
    MemberRequest,
    RefusalReason,
    Refused,
    Reply,
    Request,
)
from kvnet.protocol.pace import Purpose
from kvnet.protocol.serve import ServeLimits
from kvnet.protocol.session import ControlSession, SessionConfig
from kvnet.store.interface import ArtifactRecord, Store
from kvnet.trust.namespace import Namespace

if TYPE_CHECKING:
    from trio_typing import TaskStatus

_log = logging.getLogger(__name__)

SESSION_OPEN_S = 5.0
"""Seconds in which a session with a connected peer must be open when somebody waits for it."""

SESSION_POLL_S = 1.0
"""How often connected peers without a session are looked for."""

SESSION_RETRY_S = 30.0
"""Seconds before another session is tried with a peer whose last one failed."""

LEFT_S = 5.0
"""Seconds in which a peer whose session has ended may prove again what it had proved, as all do when a namespace
changes; then what it gets chunks over ends."""

RandomBytes = Callable[[int], bytes]
"""Fresh random bytes, from the operating system."""

Answerer = Callable[[PeerSession, Request], Reply | None]
"""Decides the reply to one kind of request; fast, and never raises. None: it comes later, by `PeerSession.reply`."""

Greeting = Callable[[PeerSession], Awaitable[None]]
"""What to do with every session that opens; cancelled when the session ends."""


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


@dataclass(frozen=True, slots=True)
class KnownPeer:
    """A connected peer.

    Attributes:
        info: who and where.
        member: it has proved to share a namespace with this node.
        agent: its program and version.
        chunks: how chunks come from it, in words; "" when none have been fetched.
    """

    info: PeerInfo
    member: bool
    agent: str
    chunks: str = ""


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
        self._random = random
        self._sessions: dict[PeerId, PeerSession] = {}
        self._by_id: dict[tuple[PeerId, bytes], PeerSession] = {}
        self._opening: dict[PeerId, trio.Event] = {}
        self._failed_until: dict[PeerId, float] = {}
        self._session_errors: dict[PeerId, KvnetError] = {}
        self._skews: dict[PeerId, int | None] = {}
        self._session_opened = trio.Event()
        self._told: dict[ArtifactHash, list[bytes]] = {}
        self._answerers: dict[type[Request], Answerer] = {}
        self._former_answerer: Answerer = _refuse_former
        self._greetings: list[Greeting] = []
        self._offered: list[Capability] = []
        self._watchers: list[Callable[[ArtifactRecord], None]] = []
        self._askable: Callable[[PeerId], bool] = lambda _: True
        self._tables: Tables | None = None
        self._nursery: trio.Nursery | None = None
        self._server = ChunkServer(store, lane, identity, self._find_session, self._options.serve)
        self._server.serving = self._options.serving
        self._announcer = Announcer(network, self._options.announce, lane=lane, keeper=announced, random=random)
        self._bulk: BulkTransport | None = None
        transport: ChunkTransport = StreamTransport(network)
        if bulk is not None:
            transport = self._bulk = BulkTransport(
                bulk, network, transport, self._sessions.get, self._server, store, random=random
            )
        self.fetcher = ArtifactFetcher(
            store,
            lane,
            identity,
            transport,
            self._asked,
            self._options.fetch,
            download_bytes_s=self._options.download_bytes_s,
        )
        self.finder = PrefixFinder(
            store,
            lane,
            identity,
            network=network,
            fetcher=self.fetcher,
            sessions=self._asked,
            open_session=self._open_to_ask,
            published=self.fetched,
            exact_only=self._options.exact_only,
        )
        self.finder.lossy = self._options.lossy

    # --- what others add ----------------------------------------------------------------------------------------------

    def answer_with(self, kind: type[Request], answerer: Answerer) -> None:
        """Say who answers requests of this kind; those for artifacts and bulk connections are answered already."""
        self._answerers[kind] = answerer

    def answer_former_with(self, answerer: Answerer) -> None:
        """Say who answers those that name a lookup secret that was replaced; nobody else ever sees their requests."""
        self._former_answerer = answerer

    def greet_with(self, greeting: Greeting) -> None:
        """Say what else is done with every session that opens; it ends with the session."""
        self._greetings.append(greeting)

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
        self._tables = tables
        self.finder.lookups.tables = tables
        self._server.name_others_with(tables.records_for)

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

    def _answer(self, session: PeerSession, request: Request) -> Reply | None:
        if isinstance(request, ArtifactRequest | BulkRequest):
            reply = self._server.answer(session, request)
            if isinstance(request, GetManifest) and isinstance(reply, ManifestReply):
                self._announcer.used([bytes(request.artifact)])
            return reply
        if isinstance(request, MemberRequest):
            proved = session.opened.namespaces.get(request.slot)
            if proved is not None and proved.former:
                return self._former_answerer(session, request)
        answerer = self._answerers.get(type(request))
        if answerer is None:
            return Refused(request_id=request.request_id, reason=RefusalReason.NOT_SERVING)
        return answerer(session, request)

    # --- life ---------------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Be on the network until cancelled.

        Raises:
            PortInUseError: a port that was asked for is taken.
        """
        self._network.set_handler(StreamKind.CONTROL, self._accept_control)
        self._network.set_handler(StreamKind.CHUNKS, self._server.serve_chunks)
        await self._server.load()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await nursery.start(self._network.run)
            if self._bulk is not None:
                await nursery.start(self._bulk.run)
            nursery.start_soon(self._keep_sessions)
            if self._options.serving:
                await self._announcer.load()
                await self._announce_all()
                await self._announcer.loaded()
                nursery.start_soon(self._announcer.run)
            task_status.started()

    async def _announce_all(self) -> None:
        """Everything held, the newest last, so that it is announced first."""
        if self._tables is not None:
            self._tables.own.begin_reload()
        held = await self._lane.run(self._store.artifacts)
        may_serve = self._identity.policy().may_serve
        records = sorted((each for each in held if may_serve(each.manifest)), key=lambda each: each.manifest.created)
        rows: dict[ArtifactHash, list[tuple[int, PrefixKey]]] = {}
        for namespace in self._identity.namespaces():
            for key, artifact, n_blocks in await self._lane.run(self._store.prefix_rows, namespace.id):
                rows.setdefault(artifact, []).append((n_blocks, key))
        keys = {record.hash: [key for _, key in sorted(rows.get(record.hash, []))] for record in records}
        for record in records:
            self._announce(record, keys[record.hash])
        if self._tables is not None:
            self._tables.own.reload((record, keys[record.hash]) for record in records if keys[record.hash])

    async def reload(self) -> None:
        """The namespaces have changed: serve and announce by them, and prove them to every peer anew."""
        await self._server.load()
        self._announcer.clear()
        self._told.clear()
        await self._announce_all()
        for session in list(self._by_id.values()):
            session.close()
        self._failed_until.clear()

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
        found: dict[PeerId, ProviderHint] = {}

        async def find(key: bytes) -> None:
            for hint in await self._network.find_providers(key, timeout_s=timeout_s):
                found.setdefault(hint.peer, hint)

        async with trio.open_nursery() as nursery:
            for namespace in self._identity.namespaces():
                nursery.start_soon(find, bytes(namespace.keyed_artifact(artifact)))
        return list(found.values())

    @property
    def peer_id(self) -> PeerId:
        """Who this node is on the network."""
        return self._network.peer_id

    def peers(self) -> list[KnownPeer]:
        """The connected peers."""
        return [self._known(info) for info in self._network.connected()]

    def _known(self, info: PeerInfo) -> KnownPeer:
        session = self._sessions.get(info.peer)
        chunks = self._bulk.way_of(info.peer) if self._bulk else ""
        return KnownPeer(info, bool(session and session.slots), session.opened.agent if session else "", chunks)

    def sessions(self) -> Sequence[PeerSession]:
        """The open sessions in which some namespace is proved."""
        return [session for session in self._sessions.values() if session.slots and not session.closed.is_set()]

    def _asked(self) -> Sequence[PeerSession]:
        """The sessions with those that serve."""
        return [session for session in self.sessions() if self._askable(session.peer)]

    async def wait_for_members(self, timeout_s: float) -> None:
        """Return as soon as a session with a member is open, at the latest after ``timeout_s`` seconds."""
        with trio.move_on_after(timeout_s):
            while not self.sessions():
                await self._session_opened.wait()

    def counters(self) -> dict[str, int]:
        """What happened so far, for people to read."""
        return dict(self._server.counters)

    def network_changed(self) -> None:
        """This machine is on another network, or awake again: say anew where it is, and try everybody again."""
        self._failed_until.clear()
        self._announcer.network_changed()
        if self._nursery is not None:
            for info in self._network.connected():
                self._nursery.start_soon(self._network.probe, info.peer)

    def session_with(self, peer: PeerId) -> PeerSession | None:
        """The open session with a peer, whether or not it has proved anything."""
        return self._sessions.get(peer)

    def session_error(self, peer: PeerId) -> KvnetError | None:
        """Why the last session this node tried with a peer did not open; None when none failed lately."""
        return self._session_errors.get(peer)

    def clock_skew_s(self, peer: PeerId) -> int | None:
        """By how many seconds a peer's clock is ahead of ours; None when it has not said."""
        return self._skews.get(peer)

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
        self._failed_until.pop(peer, None)
        return await self.open_session(peer)

    async def open_session(self, peer: PeerId) -> PeerSession | None:
        """The open session with a connected peer, opened if there is none; ``None`` when that fails."""
        session = self._sessions.get(peer)
        if session is not None and not session.closed.is_set():
            return session
        waiting = self._opening.get(peer)
        if waiting is None:
            if self._nursery is None:
                raise NetworkError("expected a node that is running, found one that is not")
            waiting = self._opening[peer] = trio.Event()
            self._nursery.start_soon(self._dial_session, peer, waiting)
        with trio.move_on_after(SESSION_OPEN_S):
            await waiting.wait()
        return self._sessions.get(peer)

    async def _open_to_ask(self, peer: PeerId) -> PeerSession | None:
        """The session with a peer that serves."""
        session = await self.open_session(peer)
        return session if self._askable(peer) else None

    async def _dial_session(self, peer: PeerId, done: trio.Event) -> None:
        """Open the session and hold it; ``done`` when it is open or has failed."""
        try:
            stream = await self._network.open_stream(peer, StreamKind.CONTROL)
            # As with a session that the peer has opened: a bug that it finds in a handler does not end the node.
            await serve_stream(partial(self._dialled_control, done), stream)
        except KvnetError as error:
            self._session_failed(peer, error)
        finally:
            done.set()
            if self._opening.get(peer) is done:
                del self._opening[peer]

    async def _dialled_control(self, opened: trio.Event, peer: PeerId, stream: ByteStream) -> None:
        try:
            await self._hold_session(stream, Role.INITIATOR, opened)
        except KvnetError as error:
            self._session_failed(peer, error)
        except Exception:
            self._failed_until[peer] = trio.current_time() + SESSION_RETRY_S
            raise

    def _session_failed(self, peer: PeerId, error: KvnetError) -> None:
        self._failed_until[peer] = trio.current_time() + SESSION_RETRY_S
        self._session_errors[peer] = error

    async def _accept_control(self, _peer: PeerId, stream: ByteStream) -> None:
        await self._hold_session(stream, Role.RESPONDER, trio.Event())

    async def _hold_session(self, stream: ByteStream, role: Role, opened: trio.Event) -> None:
        namespaces = self._proved()
        config = SessionConfig(
            role=role,
            own=self._network.peer_id,
            other=stream.peer,
            namespaces=namespaces,
            nonce=self._random(NONCE_SIZE_BYTES),
            padding=self._random(PADDING_SIZE_BYTES),
            agent=self._options.agent,
            capabilities=self._capabilities(),
        )
        machine = ControlSession(config, trio.current_time())
        session = PeerSession(stream, machine, namespaces, self._answer, self._answered)
        failure: KvnetError | None = None
        async with trio.open_nursery() as nursery:
            try:
                await nursery.start(session.run)
            except KvnetError as error:
                # Out of here it goes as itself: inside a nursery it would come out in a group, past every handler.
                failure = error
            else:
                if namespaces != self._proved():
                    # They changed during the handshake: what it has shown counts no more.
                    session.close()
                for greeting in self._greetings:
                    nursery.start_soon(_greet, greeting, session)
                await self._keep_session(session, opened)
                nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    def _proved(self) -> tuple[Namespace, ...]:
        """The namespaces that a new session proves: those of now, then former ones as far as there is room."""
        current = self._identity.namespaces()
        return (*current, *self._identity.former()[: PROOF_ENTRIES - len(current)])

    def _answered(self, peer: PeerId, seconds: float) -> None:
        self.fetcher.scores.answered(peer, seconds, trio.current_time())

    def _capabilities(self) -> tuple[str, ...]:
        serve = (Capability.SERVE, Capability.HAVE) if self._options.serving else ()
        bulk = () if self._bulk is None else (Capability.BULK, Capability.BULK_CANCEL)
        return (*serve, *bulk, *self._offered, clock_word(time.time()))

    async def _keep_session(self, session: PeerSession, opened: trio.Event) -> None:
        """Have an open session among those to use, until it ends."""
        peer = session.peer
        self._session_errors.pop(peer, None)
        if peer in self._sessions and self._nursery is not None:
            # Somebody who is there twice may have come back another way, and left a connection that is dead.
            self._nursery.start_soon(self._network.probe, peer)
        clock_s = clock_of(session.opened.capabilities)
        self._skews[peer] = None if clock_s is None else clock_s - int(time.time())
        # Two peers that dial each other have two sessions for a while; a chunk request may name either.
        key = (peer, session.opened.session_id)
        self._sessions[peer] = self._by_id[key] = session
        opened.set()
        self._session_opened.set()
        self._session_opened = trio.Event()
        if self._opening.get(peer) is opened:
            del self._opening[peer]
        await session.closed.wait()
        del self._by_id[key]
        if session.slots and self._nursery is not None:
            self._nursery.start_soon(self._end_what_is_not_proved_again, session)
        if self._sessions.get(peer) is session:
            del self._sessions[peer]
            self._skews.pop(peer, None)
            self._server.session_ended()

    async def _end_what_is_not_proved_again(self, ended: PeerSession) -> None:
        """Whoever has gone, or was removed, gets nothing more over connections that it had before."""
        await trio.sleep(LEFT_S)
        peer, had = ended.peer, {namespace.id for namespace in ended.slots}
        has = {namespace.id for (other, _), each in self._by_id.items() if other == peer for namespace in each.slots}
        if not had <= has:
            self._server.end_streams(peer)
            if self._bulk is not None:
                self._bulk.end_senders(peer)

    async def _keep_sessions(self) -> None:
        """A session with every connected peer, so that a lookup finds them ready."""
        while True:
            now_s = trio.current_time()
            self._failed_until = {peer: until_s for peer, until_s in self._failed_until.items() if until_s > now_s}
            self._session_errors = {p: error for p, error in self._session_errors.items() if p in self._failed_until}
            for info in self._network.connected():
                retry_s = self._failed_until.get(info.peer, float("-inf"))
                waiting = info.peer in self._sessions or info.peer in self._opening
                if not waiting and trio.current_time() >= retry_s and self._nursery is not None:
                    done = self._opening[info.peer] = trio.Event()
                    self._nursery.start_soon(self._dial_session, info.peer, done)
            await trio.sleep(SESSION_POLL_S)

    def _find_session(self, peer: PeerId, session_id: bytes) -> PeerSession | None:
        return self._by_id.get((peer, session_id))

    # --- artifacts ----------------------------------------------------------------------------------------------------

    def published(self, record: ArtifactRecord, keys: Sequence[PrefixKey]) -> None:
        """Serve and announce an artifact that is in the store now, and no longer what had to go for it."""
        for evicted in self._store.take_evicted():
            self.removed(evicted)
        for watch in self._watchers:
            watch(record)
        if not self._identity.policy().may_serve(record.manifest):
            return
        self._server.offer(record, keys)
        self._announce(record, keys)
        if self._tables is not None:
            self._tables.own.hold(record, keys)

    def _announce(self, record: ArtifactRecord, keys: Sequence[PrefixKey]) -> None:
        """Only what is held whole: whoever follows a record finds all of it here."""
        if record.complete and self._options.serving and len(keys) == record.manifest.n_blocks:
            told = announced_keys(self._identity, record.manifest, record.hash, list(keys))
            self._told[record.hash] = told
            self._announcer.add(told)

    def fetched(self, result: Fetched) -> None:
        """Serve on what was fetched: same hash, same signature."""
        self.published(result.record, result.keys)

    async def repair(self, artifact: ArtifactHash, indices: Sequence[int]) -> bool:
        """Fetch chunks of an artifact that went bad here; whether all of them are held again.

        Raises:
            KvnetError: nobody reachable has it, or it cannot be kept.
        """
        located = await self.fetcher.locate(artifact)
        entries = await self.fetcher.chunk_list(located)
        self.fetched(await self.fetcher.fetch(located, entries, indices, purpose=Purpose.SCRUB))
        return all([await self._lane.run(self._store.has_chunk, entries[index].hash) for index in indices])

    def used(self, artifact: ArtifactHash) -> None:
        """An artifact was reused: it is announced before those that nobody uses."""
        self._announcer.used(self._told.get(artifact, ()))

    def removed(self, artifact: ArtifactHash) -> None:
        """Serve and announce an artifact no longer; keys that others share go on being announced."""
        self._server.withdraw(artifact)
        if self._tables is not None:
            self._tables.own.drop(artifact)
        gone = self._told.pop(artifact, [])
        shared = {key for keys in self._told.values() for key in keys}
        self._announcer.remove(key for key in gone if key not in shared)


def _refuse_former(_session: PeerSession, request: Request) -> Reply:
    return Refused(request_id=request.request_id, reason=RefusalReason.UNKNOWN)


async def _greet(greeting: Greeting, session: PeerSession) -> None:
    """A greeting that fails ends with the session, or before; it never ends the session."""
    try:
        await greeting(session)
    except KvnetError as error:
        _log.debug("a greeting ended: %s", error)
