"""Look into claims: what a peer says it has of a prompt, against its signed manifest, its token ids and the plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import trio

from kvnet.engine.interface import ModelInfo
from kvnet.errors import IntegrityError, KvnetError, PeerRefusedError
from kvnet.exchange.events import PrefixFetched
from kvnet.exchange.fetch_job import TokenIds
from kvnet.exchange.fetch_pack import ProgressCallback
from kvnet.exchange.fetcher import ArtifactFetcher
from kvnet.exchange.flights import Shared
from kvnet.exchange.identity import Identity
from kvnet.exchange.lane import Lane
from kvnet.exchange.locating import Located, SessionsOf
from kvnet.exchange.planning import Missing, PlanReport, Weigher, link_to, missing_chunks
from kvnet.exchange.reuse import Lossy, Rejected, judge
from kvnet.exchange.session import PeerSession
from kvnet.format.chunks import ChunkEntry
from kvnet.format.prefix import common_prefix
from kvnet.protocol.cost import Offer
from kvnet.protocol.ids import PeerId
from kvnet.protocol.lookup import Candidate, LookupQuery, check_manifest
from kvnet.protocol.messages.refusals import RefusalReason
from kvnet.protocol.speeds import Link
from kvnet.store.interface import Store
from kvnet.trust.namespace import Namespace

Doubt = Callable[[Namespace, PeerId, bytes], None]
"""Told of a peer that did not know an artifact it had claimed for a lookup key."""


@dataclass(frozen=True, slots=True)
class Prompt:
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
class Shown:
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
class Weighed:
    """That a claim is worth fetching, and what the decision was made from."""

    report: PlanReport
    offer: Offer
    missing: Missing
    n_peers: int


@dataclass(frozen=True, slots=True)
class Checked:
    """A claim that is borne out: what to fetch for it, and how many tokens of prefill that spares."""

    located: Located
    entries: tuple[ChunkEntry, ...]
    token_ids: TokenIds
    needed: tuple[int, ...]
    spared_tokens: int
    weighed: Weighed | None = None


@dataclass(slots=True)
class Search:
    """What became of one search.

    Attributes:
        fetched: the prefix that is in the store now, or ``None``.
        rejected: artifacts that fitted and may not be used.
        reasons: why nothing, or nothing better, was found.
        plan: what was weighed; ``None`` where it is not known what this machine does.
        rounds: times that answers to lookups were waited for.
        dht_queries: keys looked for in the DHT.
    """

    fetched: PrefixFetched | None = None
    plan: PlanReport | None = None
    rejected: list[Rejected] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    rounds: int = 0
    dht_queries: int = 0


class Showing:
    """A claim that one or more prompts look into at the moment: it is shown once."""

    def __init__(self) -> None:
        self.shared: Shared[Shown] = Shared()
        self.shown: Shown | None = None


class ClaimChecks:
    """Looks into claims.

    Args:
        store: what is held already.
        lane: where blocking store work runs.
        identity: the policy.
        fetcher: gets manifests, chunk lists and token ids; remembers who lied.
        sessions: the open sessions.
        exact_only: take only artifacts whose verdict is ``EXACT``.

    Attributes:
        lossy: when artifacts of a lossy codec are taken.
        doubt: told of claims that their makers know nothing of.
    """

    def __init__(
        self,
        store: Store,
        lane: Lane,
        identity: Identity,
        fetcher: ArtifactFetcher,
        sessions: SessionsOf,
        *,
        exact_only: bool,
    ) -> None:
        self._store = store
        self._lane = lane
        self._identity = identity
        self._fetcher = fetcher
        self._sessions = sessions
        self._exact_only = exact_only
        self.lossy = Lossy.NEVER
        self.doubt: Doubt = lambda _namespace, _peer, _key: None

    async def check(
        self, showing: Showing, query: LookupQuery, candidate: Candidate, prompt: Prompt, search: Search
    ) -> Checked | None:
        """How far a claim is borne out for this prompt."""

        async def show() -> Shown:
            return await self._show(query, candidate, prompt.info)

        if showing.shown is None:
            got = await showing.shared.get(show)
            assert got is not None  # noqa: S101 - patience is the caller's scope
            showing.shown = got[0]
        shown = showing.shown
        search.rejected += shown.rejected
        search.reasons += shown.reasons
        if shown.located is None or shown.token_ids is None:
            return None
        agreeing = common_prefix(shown.token_ids.tokens, prompt.tokens)
        if agreeing < candidate.reusable_tokens:
            self._lied(candidate)
        shared = min(agreeing, len(prompt.tokens) - 1)
        if shared <= prompt.held_tokens:
            search.reasons.append("a peer's artifact shares fewer tokens than it claimed")
            return None
        plan = shown.located.signed.manifest.plan()
        needed = (*plan.needed_for(shared), *plan.context_chunks)
        return Checked(shown.located, shown.entries, shown.token_ids, needed, shared - prompt.held_tokens)

    def _lied(self, candidate: Candidate) -> None:
        """Whoever made a claim that is not borne out; those who merely hold the artifact are not to blame."""
        for peer in candidate.providers:
            self._fetcher.scores.lied(peer, trio.current_time())

    def may_win(self, candidate: Candidate, weigher: Weigher, search: Search) -> bool:
        """Whether a claim, were it borne out, would be worth fetching; it is not looked into otherwise."""
        report = weigher.claim(self.link(candidate, weigher), candidate)
        if report.plan.fetch is not None:
            return True
        search.plan = report
        search.reasons.append(report.words)
        return False

    def link(self, candidate: Candidate, weigher: Weigher) -> Link:
        """What the peers that have it may be expected to do together, its codec's decoding included."""
        decode_bytes_s = weigher.decode_bytes_s(candidate.codec)
        return link_to(candidate.peers, self._fetcher.scores, trio.current_time(), decode_bytes_s)

    async def weigh(self, checked: Checked, candidate: Candidate, weigher: Weigher, search: Search) -> Checked | None:
        """The claim with what is worth fetching of it; ``None`` when that is nothing."""
        located, entries = checked.located, checked.entries
        plan = located.signed.manifest.plan()
        n_tokens = weigher.held_tokens + checked.spared_tokens
        absent = await self._lane.run(self.absent, checked)
        missing = missing_chunks(plan, entries, n_tokens, absent)
        offer = weigher.offer(self.link(candidate, weigher), n_tokens, missing)
        report = search.plan = weigher.weigh(offer)
        fetch = report.plan.fetch
        if fetch is None:
            search.reasons.append(report.words)
            return None
        return replace(
            checked,
            needed=(*plan.needed_for(fetch.n_tokens), *plan.context_chunks),
            spared_tokens=fetch.n_tokens - weigher.held_tokens,
            weighed=Weighed(report, offer, missing, len(candidate.peers)),
        )

    def absent(self, checked: Checked) -> list[int]:
        """The needed chunks that are in no store here."""
        entries = checked.entries
        return [
            index
            for index in checked.needed
            if not entries[index].absent and not self._store.has_chunk(entries[index].hash)
        ]

    async def _show(self, query: LookupQuery, candidate: Candidate, info: ModelInfo) -> Shown:
        """Signed manifest, policy, chunk list and token ids of a claim: everything but the K/V."""
        shown = await self._locate(query, candidate, info)
        if shown.located is None:
            return shown
        entries = await self._fetcher.chunk_list(shown.located)
        try:
            token_ids = await self._fetcher.token_ids(shown.located, entries)
        except IntegrityError:
            # Whoever has looked at it once knows that these are not the tokens of its keys.
            self._lied(candidate)
            raise
        return replace(shown, entries=entries, token_ids=token_ids)

    async def _locate(self, query: LookupQuery, candidate: Candidate, info: ModelInfo) -> Shown:
        """The signed manifest behind a claim, from any of the peers that made it; judged before anything is fetched."""
        assert info.fingerprint is not None  # noqa: S101 - searched only with one
        reasons: list[str] = []
        for session in self._who_shows(query, candidate):
            slot = session.slots[query.namespace]
            try:
                signed = await self._fetcher.locator.signed_manifest(session, slot, bytes(candidate.artifact))
            except KvnetError as error:
                reasons.append(str(error))
                if isinstance(error, PeerRefusedError) and error.reason == RefusalReason.UNKNOWN:
                    self.doubt(query.namespace, session.peer, query.keys[candidate.key_index])
                continue
            lie = check_manifest(query, candidate, info.fingerprint.hash, signed)
            if lie is not None:
                reasons.append(f"a peer claimed an artifact, but {lie}")
                self._lied(candidate)
                return Shown(reasons=tuple(reasons))
            verdict = judge(
                signed.manifest,
                signed.artifact_hash,
                info,
                self._identity,
                exact_only=self._exact_only,
                lossy=self.lossy,
            )
            if isinstance(verdict, Rejected):
                return Shown(rejected=(verdict,), reasons=tuple(reasons))
            return Shown(Located(signed, query.namespace, session), reasons=tuple(reasons))
        return Shown(reasons=tuple(reasons))

    def _who_shows(self, query: LookupQuery, candidate: Candidate) -> list[PeerSession]:
        """The connected peers that may have the artifact: who claims it first, who lied of late last."""
        now = trio.current_time()
        sessions = {session.peer: session for session in self._sessions() if query.namespace in session.slots}
        peers = sorted(candidate.peers, key=lambda peer: self._fetcher.scores.liar(peer, now))
        return [sessions[peer] for peer in peers if peer in sessions]
