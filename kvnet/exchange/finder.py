"""Find a longer prefix than the store has, among peers, and fetch it: in time, or not at all.

`lookups` says who has what, `claims` what is true of it: the signed manifest, the policy and in the end the token ids
decide. Every failure on the way is a miss.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import trio

from kvnet.engine.interface import ModelInfo
from kvnet.errors import KvnetError, StoreError
from kvnet.exchange.choosing import choose
from kvnet.exchange.claims import Checked, ClaimChecks, Prompt, Search, Showing
from kvnet.exchange.events import FetchProgress, PrefixFetched
from kvnet.exchange.fetch_pack import ProgressCallback
from kvnet.exchange.fetcher import ArtifactFetcher, Fetched
from kvnet.exchange.flights import Flights, Shared, Watch
from kvnet.exchange.identity import Identity
from kvnet.exchange.lane import Lane
from kvnet.exchange.locating import SessionsOf
from kvnet.exchange.lookups import Lookups, OpenSession
from kvnet.exchange.planning import Happened, Weigher, link_to, rate_words
from kvnet.exchange.race import GRACE_S, PlannedRace, Race
from kvnet.exchange.reuse import Lossy, held_tokens
from kvnet.exchange.turns import turn_key
from kvnet.format.fingerprint import Fingerprint
from kvnet.format.hashes import ArtifactHash
from kvnet.format.prefix import BLOCK_TOKENS, NO_PARENT, block_keys, next_key
from kvnet.network.interface import Network
from kvnet.protocol.ids import PeerId
from kvnet.protocol.lookup import Candidate, LookupQuery, build_query
from kvnet.protocol.speeds import Machine
from kvnet.store.interface import Store
from kvnet.trust.namespace import Namespace

_log = logging.getLogger(__name__)

MIN_LOOKUP_S = 0.25
"""Shortest lookup deadline, in seconds: a round trip to a sleepy peer."""

MAX_LOOKUP_S = 3.0
"""Longest lookup deadline in seconds, the DHT included."""

WORTH_ASKING_S = 0.02
"""Less prefill than this is done sooner than anybody is asked."""

DHT_WORTH_S = 3.0
"""Less prefill than this is done about as soon as the DHT has answered: only connected members are asked then. The next
turn of a conversation that is here otherwise is not held up by it. A walk among a thousand nodes takes 0.9 s, which is
all that the DHT has of the lookup of such a prompt; simulated against 1 s and 10 s (decision 99)."""

LOOKUP_SHARE = 0.5
"""Share of the estimated prefill time that a lookup may take."""

ASSUMED_PREFILL_TOKENS_S = 500.0
"""Prefill speed assumed until the engine was measured, in tokens a second; only sets a deadline."""

PATIENT_PREFILL_TOKENS_S = 100.0
"""Prefill speed assumed until the engine was measured, when a fetch is compared with it, in tokens a second: slower
than most machines, so that a first fetch is not given up too early."""

MAX_CANDIDATES = 4
"""Claims whose manifests are asked for; the best is usually the first."""


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
class _Fetched:
    """What one fetch brought, and whether it was given up before it had everything."""

    result: Fetched
    given_up: bool


class _Flight:
    """One artifact that one or more prompts want at the moment: it is shown once and fetched once."""

    def __init__(self) -> None:
        self.showing = Showing()
        self.fetching: Shared[_Fetched] = Shared()


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
        lookups: asks members and the DHT.
        claims: looks into what they say.
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
        self._fetcher = fetcher
        self._sessions = sessions
        self._published = published
        self.lookups = Lookups(network, sessions, open_session, fetcher.scores)
        self.claims = ClaimChecks(store, lane, identity, fetcher, sessions, exact_only=exact_only)
        self.claims.doubt = self._doubt
        self._flights: Flights[_Flight] = Flights(_Flight)
        self.wrote: Callable[[int], None] = lambda _n_bytes: None

    @property
    def lossy(self) -> Lossy:
        """When artifacts of a lossy codec are taken."""
        return self.claims.lossy

    @lossy.setter
    def lossy(self, lossy: Lossy) -> None:
        self.claims.lossy = lossy

    def _doubt(self, namespace: Namespace, peer: PeerId, key: bytes) -> None:
        if self.lookups.tables is not None:
            self.lookups.tables.doubt(namespace, peer, key)

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
        prompt = Prompt(info, tokens, held_tokens, prefill_tokens_s, progress, weigher)
        for query in self.queries(info.fingerprint, tokens, ends):
            candidates = await self._look_up(query, prompt, search, deadline_s, dht=left_s >= DHT_WORTH_S)
            worth_a_block = len(tokens) - held_tokens > BLOCK_TOKENS
            if not candidates and not search.reasons and self._sessions() and worth_a_block:
                search.reasons.append("no peer offers a longer prefix")
            candidates, against = choose(candidates, self.lossy, weigher, self.claims.link)
            search.reasons += against
            candidates = candidates[:MAX_CANDIDATES]
            for tried, candidate in enumerate(candidates):
                if prompt.weigher is not None and not self.claims.may_win(candidate, prompt.weigher, search):
                    continue
                share = _Share(deadline_s + GRACE_S, len(candidates) - tried)
                fetched = await self._try(query, candidate, prompt, search, share)
                if fetched is not None:
                    search.fetched = replace(fetched, seconds=trio.current_time() - started_s)
                    return search
        if weigher is not None and search.plan is None:
            search.plan = weigher.alone("; ".join(dict.fromkeys(search.reasons)) or "no peer offers a prefix")
        return search

    def queries(self, fingerprint: Fingerprint, tokens: Sequence[int], ends: Sequence[int]) -> list[LookupQuery]:
        """One per namespace. An artifact equal to the whole prompt counts, though its last token is fed again."""
        if len(tokens) < 2:
            return []
        short = sorted({end for end in ends if 0 < end < BLOCK_TOKENS})
        queries: list[LookupQuery] = []
        # What of a prompt is public its request would have to say; none does.
        for namespace in [each for each in self._identity.namespaces() if not each.is_public]:
            root = namespace.prefix_root(fingerprint.hash)
            short_keys = [(end, next_key(root, NO_PARENT, tokens[:end])) for end in short]
            queries.append(build_query(namespace, block_keys(root, tokens), len(tokens), short_keys))
        return queries

    async def _look_up(
        self, query: LookupQuery, prompt: Prompt, search: Search, deadline_s: float, *, dht: bool
    ) -> list[Candidate]:
        """What peers have, the best first.

        Nobody is asked who could have all of it and still be no sooner than computing it.
        """

        def worth_asking(peers: Sequence[PeerId]) -> bool:
            if prompt.weigher is None:
                return True
            link = link_to(peers, self._fetcher.scores, trio.current_time())
            if prompt.weigher.could_win(link):
                return True
            search.reasons.append(
                f"peers were not asked: at {rate_words(link.bytes_s)} and {link.rtt_s * 1000:,.0f} ms of round "
                f"trip nothing comes sooner than it is computed"
            )
            return False

        found = await self.lookups.find(query, prompt.held_tokens, deadline_s, dht=dht, worth_asking=worth_asking)
        search.rounds += found.rounds
        search.dht_queries += found.dht_queries
        return found.candidates

    async def _try(
        self,
        query: LookupQuery,
        candidate: Candidate,
        prompt: Prompt,
        search: Search,
        share: _Share,
    ) -> PrefixFetched | None:
        """Check one claim and fetch what the prompt needs of it; ``None`` when it does not hold, or not in time."""
        assert prompt.info.fingerprint is not None  # noqa: S101 - searched only with one
        key = (query.namespace.id, candidate.artifact, prompt.info.fingerprint.hash)
        turn = turn_key(query.namespace.id, bytes(candidate.artifact))
        fetch_began_s = None
        try:
            with self._flights.join(key) as flight, self._fetcher.turns.first(turn) as clear:
                checked: Checked | None = None
                with trio.move_on_at(share.ends_s()) as scope:
                    await clear()
                    checked = await self.claims.check(flight.showing, query, candidate, prompt, search)
                if scope.cancelled_caught:
                    search.reasons.append("a peer that claimed a prefix did not show it in time")
                if checked is not None and prompt.weigher is not None:
                    checked = await self.claims.weigh(checked, candidate, prompt.weigher, search)
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

    async def _fetch(self, flight: _Flight, checked: Checked, prompt: Prompt, search: Search) -> PrefixFetched | None:
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

    async def _fetch_now(self, checked: Checked, race: Race, tell: Watch) -> _Fetched:
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

    def _all_held(self, checked: Checked) -> bool:
        return not self.claims.absent(checked)


def _note(search: Search, n_tokens: int, n_bytes: int, began_s: float, *, ended_early: bool) -> None:
    """What became of the plan, where there was one."""
    if search.plan is not None:
        happened = Happened(n_tokens, n_bytes, trio.current_time() - began_s, ended_early)
        search.plan = replace(search.plan, happened=happened)


def _race(checked: Checked, prompt: Prompt) -> Race:
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
