"""Find a longer prefix than the store has, among peers, and fetch it: in time, or not at all.

Lookups go to every connected member at once, and to the DHT at the same time. What comes back are claims; the signed
manifest, the policy and in the end the token ids decide. Every failure on the way is a miss.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import trio

from kvnet.engine.interface import ModelInfo
from kvnet.errors import KvnetError, StoreError
from kvnet.exchange.choosing import choose
from kvnet.exchange.events import FetchProgress, PrefixFetched
from kvnet.exchange.fetch_pack import ProgressCallback
from kvnet.exchange.fetcher import ArtifactFetcher, Fetched, Located, SessionsOf, TokenIds
from kvnet.exchange.flights import Flights, Shared, Watch
from kvnet.exchange.identity import Identity
from kvnet.exchange.lane import Lane
from kvnet.exchange.planning import Happened, Missing, PlanReport, Weigher, link_to, missing_chunks, rate_words
from kvnet.exchange.race import GRACE_S, PlannedRace, Race
from kvnet.exchange.reuse import Lossy, Rejected, held_tokens, judge
from kvnet.exchange.session import PeerSession
from kvnet.format.chunks import ChunkEntry
from kvnet.format.fingerprint import Fingerprint
from kvnet.format.hashes import ArtifactHash
from kvnet.format.prefix import BLOCK_TOKENS, NO_PARENT, block_keys, checkpoints, common_prefix, next_key
from kvnet.network.dialing import connect_any
from kvnet.network.interface import Network, ProviderHint
from kvnet.protocol.cost import Link, Machine, Offer
from kvnet.protocol.ids import PeerId
from kvnet.protocol.lookup import Candidate, LookupMachine, LookupQuery, build_query, check_manifest
from kvnet.protocol.messages import Lookup, LookupReply
from kvnet.store.interface import Store

_log = logging.getLogger(__name__)

MIN_LOOKUP_S = 0.25
"""Shortest lookup deadline, in seconds: a round trip to a sleepy peer."""

MAX_LOOKUP_S = 3.0
"""Longest lookup deadline in seconds, the DHT included."""

WORTH_ASKING_S = 0.02
"""Less prefill than this is done sooner than anybody is asked."""

DHT_WORTH_S = 1.0
"""Less prefill than this is done about as soon as the DHT has answered: only connected members are asked then. The next
turn of a conversation that is here otherwise is not held up by it."""

LOOKUP_SHARE = 0.5
"""Share of the estimated prefill time that a lookup may take."""

ASSUMED_PREFILL_TOKENS_S = 500.0
"""Prefill speed assumed until the engine was measured, in tokens a second; only sets a deadline."""

PATIENT_PREFILL_TOKENS_S = 100.0
"""Prefill speed assumed until the engine was measured, when a fetch is compared with it, in tokens a second: slower
than most machines, so that a first fetch is not given up too early."""

MAX_CANDIDATES = 4
"""Claims whose manifests are asked for; the best is usually the first."""

MAX_DIALS = 8
"""Providers from the DHT that are dialled for one prompt."""

OpenSession = Callable[[PeerId], Awaitable[PeerSession | None]]
"""Opens the session with a connected peer, or returns the open one; ``None`` when that fails."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """What is looked for: the model that would continue, the prompt's token ids, and how many of them are held.

    ``weigher`` knows what this machine does with the model; ``None`` when nobody measured it.
    """

    info: ModelInfo
    tokens: Sequence[int]
    held_tokens: int
    prefill_tokens_s: float
    progress: ProgressCallback | None
    weigher: Weigher | None


@dataclass(frozen=True, slots=True)
class _Share:
    """How long one claim may take to be shown: its part of what is left for all of them.

    Attributes:
        end_s: when the last claim must have been shown.
        n_claims: claims not tried yet, this one included.
    """

    end_s: float
    n_claims: int

    def ends_s(self) -> float:
        """When this claim's time is over; a silent peer leaves the others some."""
        now_s = trio.current_time()
        return min(self.end_s, now_s + max(GRACE_S, (self.end_s - now_s) / self.n_claims))


@dataclass(frozen=True, slots=True)
class _Shown:
    """A claim that was looked into: the artifact, or why it is not used.

    Attributes:
        located: its judged manifest; ``None`` when nobody shows one that may be used.
        entries: its verified chunk list.
        token_ids: all of its token ids, verified.
        rejected: that the policy or the model does not take it.
        reasons: what else was wrong.
    """

    located: Located | None = None
    entries: tuple[ChunkEntry, ...] = ()
    token_ids: TokenIds | None = None
    rejected: tuple[Rejected, ...] = ()
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Weighed:
    """That a claim is worth fetching, and what the decision was made from."""

    report: PlanReport
    offer: Offer
    missing: Missing
    n_peers: int


@dataclass(frozen=True, slots=True)
class _Checked:
    """A claim that is borne out: what to fetch for it, and how many tokens of prefill that spares."""

    located: Located
    entries: tuple[ChunkEntry, ...]
    token_ids: TokenIds
    needed: tuple[int, ...]
    spared_tokens: int
    weighed: _Weighed | None = None


@dataclass(frozen=True, slots=True)
class _Fetched:
    """What one fetch brought, and whether it was given up before it had everything."""

    result: Fetched
    given_up: bool


class _Flight:
    """One artifact that one or more prompts want at the moment: it is shown once and fetched once."""

    def __init__(self) -> None:
        self.showing: Shared[_Shown] = Shared()
        self.fetching: Shared[_Fetched] = Shared()
        self.shown: _Shown | None = None


@dataclass(slots=True)
class Search:
    """What became of one search.

    Attributes:
        fetched: the prefix that is in the store now, or ``None``.
        rejected: artifacts that fitted and may not be used.
        reasons: why nothing, or nothing better, was found.
        plan: what was weighed; ``None`` where it is not known what this machine does.
    """

    fetched: PrefixFetched | None = None
    plan: PlanReport | None = None
    rejected: list[Rejected] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


class PrefixFinder:
    """Looks prefixes up among peers and fetches the longest one.

    Args:
        store: where fetched artifacts go.
        lane: where blocking store work runs.
        identity: namespaces and policy.
        network: for the DHT and for dialling.
        fetcher: fetches what was found.
        sessions: the open sessions.
        open_session: opens one with a peer that the DHT named.
        published: told of every artifact that was fetched.
        exact_only: take only artifacts whose verdict is ``EXACT``.

    Attributes:
        lossy: when artifacts of a lossy codec are taken.
        wrote: told of the bytes that each fetch for a prompt wrote into the store.
    """

    def __init__(
        self,
        store: Store,
        lane: Lane,
        identity: Identity,
        *,
        network: Network,
        fetcher: ArtifactFetcher,
        sessions: SessionsOf,
        open_session: OpenSession,
        published: Callable[[Fetched], None],
        exact_only: bool = False,
    ) -> None:
        self._store = store
        self._lane = lane
        self._identity = identity
        self._network = network
        self._fetcher = fetcher
        self._sessions = sessions
        self._open_session = open_session
        self._published = published
        self._exact_only = exact_only
        self.lossy = Lossy.NEVER
        self._flights: Flights[_Flight] = Flights(_Flight)
        self.wrote: Callable[[int], None] = lambda _n_bytes: None

    async def search(
        self,
        info: ModelInfo,
        tokens: Sequence[int],
        held_tokens: int,
        *,
        ends: Sequence[int] = (),
        prefill_tokens_s: float = 0.0,
        machine: Machine | None = None,
        live_tokens: int = 0,
        progress: ProgressCallback | None = None,
    ) -> Search:
        """Find and fetch a prefix longer than the ``held_tokens`` that the store has; never raises for the network.

        Args:
            info: the model that would continue.
            tokens: the prompt's token ids.
            held_tokens: what the store has already.
            ends: token counts where other prompts may part from this one; those below a block are asked for too.
            prefill_tokens_s: measured prefill speed of the engine; 0 when unknown.
            machine: what this machine was measured to do with the model; nothing is weighed without it.
            live_tokens: of those held, what is in RAM and needs no restore.
            progress: told while chunks arrive.
        """
        search = Search()
        if info.fingerprint is None:
            return search
        started_s = trio.current_time()
        left_s = (len(tokens) - held_tokens) / (prefill_tokens_s or ASSUMED_PREFILL_TOKENS_S)
        weigher: Weigher | None = None
        if machine is not None:
            left_s = machine.prefill.seconds(held_tokens, len(tokens))
            weigher = Weigher(machine, len(tokens), held_tokens, live_tokens, info.kv_bytes_per_token)
        if left_s < WORTH_ASKING_S:
            return search
        deadline_s = started_s + min(MAX_LOOKUP_S, max(MIN_LOOKUP_S, LOOKUP_SHARE * left_s))
        prompt = _Prompt(info, tokens, held_tokens, prefill_tokens_s, progress, weigher)
        for query in self._queries(info.fingerprint, tokens, ends):
            candidates = await self._ask_all(query, prompt, search, deadline_s, dht=left_s >= DHT_WORTH_S)
            worth_a_block = len(tokens) - held_tokens > BLOCK_TOKENS
            if not candidates and not search.reasons and self._sessions() and worth_a_block:
                search.reasons.append("no peer offers a longer prefix")
            candidates, against = choose(candidates, self.lossy, weigher, self._link)
            search.reasons += against
            candidates = candidates[:MAX_CANDIDATES]
            for tried, candidate in enumerate(candidates):
                if prompt.weigher is not None and not self._may_win(candidate, prompt.weigher, search):
                    continue
                share = _Share(deadline_s + GRACE_S, len(candidates) - tried)
                fetched = await self._try(query, candidate, prompt, search, share)
                if fetched is not None:
                    search.fetched = replace(fetched, seconds=trio.current_time() - started_s)
                    return search
        if weigher is not None and search.plan is None:
            search.plan = weigher.alone("; ".join(dict.fromkeys(search.reasons)) or "no peer offers a prefix")
        return search

    def _queries(self, fingerprint: Fingerprint, tokens: Sequence[int], ends: Sequence[int]) -> list[LookupQuery]:
        """One per namespace. An artifact equal to the whole prompt counts, though its last token is fed again."""
        if len(tokens) < 2:
            return []
        short = sorted({end for end in ends if 0 < end < BLOCK_TOKENS})
        queries: list[LookupQuery] = []
        for namespace in self._identity.namespaces():
            root = namespace.prefix_root(fingerprint.hash)
            short_keys = [(end, next_key(root, NO_PARENT, tokens[:end])) for end in short]
            queries.append(build_query(namespace, block_keys(root, tokens), len(tokens), short_keys))
        return queries

    async def _ask_all(
        self, query: LookupQuery, prompt: _Prompt, search: Search, deadline_s: float, *, dht: bool
    ) -> list[Candidate]:
        """Everybody connected at once; then, when that brings nothing longer, whoever the DHT names.

        Nobody is asked who could have all of it and still be no sooner than computing it.
        """
        members = self._members(query, self._sessions())
        asked = members
        if prompt.weigher is not None and members:
            link = link_to((session.peer for session in members), self._fetcher.scores, trio.current_time())
            if not prompt.weigher.could_win(link):
                search.reasons.append(
                    f"peers were not asked: at {rate_words(link.bytes_s)} and {link.rtt_s * 1000:,.0f} ms of round "
                    f"trip nothing comes sooner than it is computed"
                )
                asked = []
        candidates = await self._ask(query, asked, prompt.held_tokens, deadline_s)
        if candidates or not dht or trio.current_time() >= deadline_s:
            return candidates
        found = await self._ask_dht(query, {session.peer for session in members}, deadline_s)
        return await self._ask(query, self._members(query, found), prompt.held_tokens, deadline_s)

    def _members(self, query: LookupQuery, sessions: Sequence[PeerSession]) -> list[PeerSession]:
        return [session for session in sessions if query.namespace in session.slots]

    async def _ask(
        self, query: LookupQuery, sessions: Sequence[PeerSession], held_tokens: int, deadline_s: float
    ) -> list[Candidate]:
        by_peer = {session.peer: session for session in sessions}
        machine = LookupMachine(
            query, {peer: session.slots[query.namespace] for peer, session in by_peer.items()}, deadline_s
        )

        async def ask_one(session: PeerSession, request: Lookup) -> None:
            try:
                reply = await session.ask(request)
            except KvnetError:
                machine.failed(session.peer)
            else:
                if isinstance(reply, LookupReply):
                    machine.answered(session.peer, reply)

        with trio.move_on_at(deadline_s):
            async with trio.open_nursery() as nursery:
                for peer, request in machine.requests():
                    nursery.start_soon(ask_one, by_peer[peer], request)
        return machine.candidates(longer_than_tokens=held_tokens)

    async def _ask_dht(self, query: LookupQuery, known: set[PeerId], deadline_s: float) -> list[PeerSession]:
        """Providers of the prompt's checkpoints, all asked for at once; those of the deepest are dialled first."""
        if self._network.routing_peers() == 0:
            return []
        # The first key of a depth is that of the whole block.
        depth_of = dict(zip(reversed(query.n_blocks), reversed(query.keys), strict=True))
        wanted = [depth for depth in reversed(checkpoints(query.n_tokens)) if depth in depth_of]
        hints: dict[int, list[ProviderHint]] = {}

        async def find(depth: int) -> None:
            try:
                limit_s = max(0.05, deadline_s - trio.current_time())
                hints[depth] = list(await self._network.find_providers(bytes(depth_of[depth]), timeout_s=limit_s))
            except KvnetError:
                hints[depth] = []

        sessions: list[PeerSession] = []
        with trio.move_on_at(deadline_s):
            async with trio.open_nursery() as nursery:
                for depth in wanted:
                    nursery.start_soon(find, depth)
            ordered = {hint.peer: hint for depth in wanted for hint in hints.get(depth, [])}
            fresh = [hint for peer, hint in ordered.items() if peer not in known][:MAX_DIALS]
            for peer in await connect_any(self._network, fresh, wanted=MAX_DIALS, timeout_s=2.0):
                session = await self._open_session(peer)
                if session is not None:
                    sessions.append(session)
        return sessions

    async def _try(
        self,
        query: LookupQuery,
        candidate: Candidate,
        prompt: _Prompt,
        search: Search,
        share: _Share,
    ) -> PrefixFetched | None:
        """Check one claim and fetch what the prompt needs of it; ``None`` when it does not hold, or not in time."""
        assert prompt.info.fingerprint is not None  # noqa: S101 - searched only with one
        key = (query.namespace.id, candidate.artifact, prompt.info.fingerprint.hash)
        fetch_began_s = None
        try:
            with self._flights.join(key) as flight:
                checked: _Checked | None = None
                with trio.move_on_at(share.ends_s()) as scope:
                    checked = await self._check(flight, query, candidate, prompt, search)
                if scope.cancelled_caught:
                    search.reasons.append("a peer that claimed a prefix did not show it in time")
                if checked is not None and prompt.weigher is not None:
                    checked = await self._weigh(checked, candidate, prompt.weigher, search)
                if checked is None:
                    return None
                fetch_began_s = trio.current_time()
                return await self._fetch(flight, checked, prompt, search)
        except KvnetError as error:
            search.reasons.append(str(error))
            if fetch_began_s is not None:
                _note(search, prompt.held_tokens, 0, fetch_began_s, ended_early=True)
            if isinstance(error, StoreError):
                _log.warning("a prefix was not fetched: %s", error)
            return None

    async def _check(
        self, flight: _Flight, query: LookupQuery, candidate: Candidate, prompt: _Prompt, search: Search
    ) -> _Checked | None:
        """How far a claim is borne out for this prompt."""

        async def show() -> _Shown:
            return await self._show(query, candidate, prompt.info)

        if flight.shown is None:
            got = await flight.showing.get(show)
            assert got is not None  # noqa: S101 - patience is the caller's scope
            flight.shown = got[0]
        shown = flight.shown
        search.rejected += shown.rejected
        search.reasons += shown.reasons
        if shown.located is None or shown.token_ids is None:
            return None
        shared = min(common_prefix(shown.token_ids.tokens, prompt.tokens), len(prompt.tokens) - 1)
        if shared <= prompt.held_tokens:
            search.reasons.append("a peer's artifact shares fewer tokens than it claimed")
            return None
        plan = shown.located.signed.manifest.plan()
        needed = (*plan.needed_for(shared), *plan.context_chunks)
        return _Checked(shown.located, shown.entries, shown.token_ids, needed, shared - prompt.held_tokens)

    def _may_win(self, candidate: Candidate, weigher: Weigher, search: Search) -> bool:
        """Whether a claim, were it borne out, would be worth fetching; it is not looked into otherwise."""
        report = weigher.claim(self._link(candidate, weigher), candidate)
        if report.plan.fetch is not None:
            return True
        search.plan = report
        search.reasons.append(report.words)
        return False

    def _link(self, candidate: Candidate, weigher: Weigher) -> Link:
        decode_bytes_s = weigher.decode_bytes_s(candidate.codec)
        return link_to(candidate.providers, self._fetcher.scores, trio.current_time(), decode_bytes_s)

    async def _weigh(
        self, checked: _Checked, candidate: Candidate, weigher: Weigher, search: Search
    ) -> _Checked | None:
        """The claim with what is worth fetching of it; ``None`` when that is nothing."""
        located, entries = checked.located, checked.entries
        plan = located.signed.manifest.plan()
        n_tokens = weigher.held_tokens + checked.spared_tokens
        absent = await self._lane.run(self._absent, checked)
        missing = missing_chunks(plan, entries, n_tokens, absent)
        offer = weigher.offer(self._link(candidate, weigher), n_tokens, missing)
        report = search.plan = weigher.weigh(offer)
        fetch = report.plan.fetch
        if fetch is None:
            search.reasons.append(report.words)
            return None
        return replace(
            checked,
            needed=(*plan.needed_for(fetch.n_tokens), *plan.context_chunks),
            spared_tokens=fetch.n_tokens - weigher.held_tokens,
            weighed=_Weighed(report, offer, missing, len(candidate.providers)),
        )

    def _absent(self, checked: _Checked) -> list[int]:
        """The needed chunks that are in no store here."""
        entries = checked.entries
        return [
            index
            for index in checked.needed
            if not entries[index].absent and not self._store.has_chunk(entries[index].hash)
        ]

    async def _show(self, query: LookupQuery, candidate: Candidate, info: ModelInfo) -> _Shown:
        """Signed manifest, policy, chunk list and token ids of a claim: everything but the K/V."""
        shown = await self._locate(query, candidate, info)
        if shown.located is None:
            return shown
        entries = await self._fetcher.chunk_list(shown.located)
        return replace(shown, entries=entries, token_ids=await self._fetcher.token_ids(shown.located, entries))

    async def _fetch(self, flight: _Flight, checked: _Checked, prompt: _Prompt, search: Search) -> PrefixFetched | None:
        """Fetch what this prompt needs, or wait for another prompt's fetch of it, as long as that can win."""
        began_s = trio.current_time()
        race = _race(checked, prompt)

        async def fetch() -> _Fetched:
            return await self._fetch_now(checked, race, flight.fetching.tell)

        while True:
            got = await flight.fetching.get(fetch, race)
            if got is None or got[0].given_up:
                search.reasons.append("peers were slower than computing; what had arrived is used")
            if got is None:
                _note(search, prompt.held_tokens, 0, began_s, ended_early=True)
                return None
            fetched, own = got
            if own or fetched.given_up or await self._lane.run(self._all_held, checked):
                break
        shared = prompt.held_tokens + checked.spared_tokens
        usable = await self._lane.run(held_tokens, self._store, fetched.result.record, shared)
        _note(search, usable, fetched.result.fetched_bytes if own else 0, began_s, ended_early=fetched.given_up)
        return _described(fetched.result, usable, own=own)

    async def _fetch_now(self, checked: _Checked, race: Race, tell: Watch) -> _Fetched:
        async def progress(event: FetchProgress) -> None:
            tell(event)
            await race.watch(event)

        scope = race.scope()
        fetched = await self._fetcher.fetch(
            checked.located,
            checked.entries,
            checked.needed,
            token_ids=checked.token_ids,
            progress=progress,
            scope=scope,
        )
        self.wrote(fetched.fetched_bytes)
        self._published(fetched)
        return _Fetched(fetched, given_up=scope.cancelled_caught)

    def _all_held(self, checked: _Checked) -> bool:
        return not self._absent(checked)

    async def _locate(self, query: LookupQuery, candidate: Candidate, info: ModelInfo) -> _Shown:
        """The signed manifest behind a claim, from any of the peers that made it; judged before anything is fetched."""
        assert info.fingerprint is not None  # noqa: S101 - searched only with one
        reasons: list[str] = []
        for session in self._members(query, self._sessions()):
            if session.peer not in candidate.providers:
                continue
            slot = session.slots[query.namespace]
            try:
                signed = await self._fetcher.signed_manifest(session, slot, bytes(candidate.artifact))
            except KvnetError as error:
                reasons.append(str(error))
                continue
            lie = check_manifest(query, candidate, info.fingerprint.hash, signed)
            if lie is not None:
                reasons.append(f"a peer claimed an artifact, but {lie}")
                continue
            verdict = judge(
                signed.manifest,
                signed.artifact_hash,
                info,
                self._identity,
                exact_only=self._exact_only,
                lossy=self.lossy,
            )
            if isinstance(verdict, Rejected):
                return _Shown(rejected=(verdict,), reasons=tuple(reasons))
            return _Shown(Located(signed, query.namespace, session), reasons=tuple(reasons))
        return _Shown(reasons=tuple(reasons))


def _note(search: Search, n_tokens: int, n_bytes: int, began_s: float, *, ended_early: bool) -> None:
    """What became of the plan, where there was one."""
    if search.plan is not None:
        happened = Happened(n_tokens, n_bytes, trio.current_time() - began_s, ended_early)
        search.plan = replace(search.plan, happened=happened)


def _race(checked: _Checked, prompt: _Prompt) -> Race:
    """The fetch of a claim against computing the same; by the plan where there is one."""
    if prompt.weigher is not None and checked.weighed is not None:
        weighed, n_tokens = checked.weighed, prompt.held_tokens + checked.spared_tokens
        needed = set(checked.needed)
        tiles = {index: tile for index, tile in weighed.missing.tiles.items() if index in needed}
        missing = replace(weighed.missing, tiles=tiles)
        offer = prompt.weigher.offer(weighed.offer.link, n_tokens, missing)
        race: Race = PlannedRace(prompt.weigher, offer, n_tokens, missing, weighed.n_peers, prompt.progress)
        race.begin(sum(missing.sizes().values()))
        return race
    spared_s = checked.spared_tokens / (prompt.prefill_tokens_s or PATIENT_PREFILL_TOKENS_S)
    sizes = [checked.entries[index].length_bytes for index in checked.needed]
    race = Race(spared_s, max(sizes), prompt.progress)
    race.begin(sum(sizes))
    return race


def _described(fetched: Fetched, n_tokens: int, *, own: bool) -> PrefixFetched:
    """What came for this prompt; bytes that came for another one are that one's."""
    useful = [item for item in fetched.delivered.items() if item[1].n_bytes]
    delivered = sorted(useful, key=lambda item: -item[1].n_bytes)
    return PrefixFetched(
        artifact=ArtifactHash(fetched.record.hash),
        n_tokens=n_tokens,
        peer=delivered[0][0] if delivered else PeerId(b""),
        n_bytes=fetched.fetched_bytes if own else 0,
        n_chunks=fetched.fetched_chunks if own else 0,
        seconds=fetched.seconds,
    )
