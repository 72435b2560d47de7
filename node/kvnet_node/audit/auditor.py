"""Adding up what was sent, how much of it had been sent before, and what kept it from being reused."""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Literal

from kvnet_node.audit.causes import MENDABLE, Cause, Parting, parting
from kvnet_node.audit.prompt import Step, digest, estimated_tokens
from kvnet_node.audit.seen import SeenPlaces

Scope = Literal["all", "session"]

MISS_TOKENS = 256
"""Fewer tokens than a block are no miss: servers reuse whole blocks."""
IDLE_S = 300.0
"""The shortest time for which the large services keep a prompt that nobody asks for."""
MAX_BEFORE = 16
"""Of a session's requests so many are compared with: agents run several conversations at once."""
MAX_SESSIONS = 256
MAX_KNOWN_REQUESTS = 200_000

_HISTORY = frozenset({Cause.REWRITTEN, Cause.COMPACTED})
"""With no message in common it is another conversation, not another history."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One request, as a log shows it.

    Attributes:
        agent: whose log it is: "claude-code", "codex", "gemini-cli" or "requests".
        session: what the log calls the conversation.
        model: the model's name; "" when the log does not say.
        prompt: what the log shows of the prompt.
        tokens: tokens of the prompt; None when no usage says.
        cached: of these, served from a cache; None when no usage says.
        at_s: when, in seconds since 1970; None when the log does not say.
        hidden: the log shows neither tools nor system prompt.
        head: what prompts of this kind share before anything the log shows: agent, version, model, project.
        compacted: the history was replaced by a summary before it.
        key: tells this request from all others; "" when nothing does.
    """

    agent: str
    session: str
    model: str
    prompt: Step
    tokens: int | None = None
    cached: int | None = None
    at_s: float | None = None
    hidden: bool = False
    head: tuple[str, ...] = ()
    compacted: bool = False
    key: str = ""


@dataclass(slots=True)
class Missed:
    """Misses of one cause: how many, and the tokens that were computed again because of them."""

    misses: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Tally:
    """What one session, or everything, adds up to. All numbers are tokens, but for the counts of requests.

    Attributes:
        sent: of all prompts.
        repeated: of these, the beginning of an earlier request in scope.
        cached: of these, served from a cache, as usage says.
        avoidable: repeated, and beyond what was cached.
        behind_changes: had been sent before too, behind a change that means nothing to the model.
        requests: how many.
        estimated: requests whose tokens are estimated.
        without_cache_usage: requests of which no usage says what was cached; they count as not cached.
        causes: the first cause of each miss.
    """

    sent: int = 0
    repeated: int = 0
    cached: int = 0
    avoidable: int = 0
    behind_changes: int = 0
    requests: int = 0
    estimated: int = 0
    without_cache_usage: int = 0
    causes: dict[Cause, Missed] = field(default_factory=dict)

    def add(self, other: "Tally") -> None:
        """Add another tally to this one."""
        self.sent += other.sent
        self.repeated += other.repeated
        self.cached += other.cached
        self.avoidable += other.avoidable
        self.behind_changes += other.behind_changes
        self.requests += other.requests
        self.estimated += other.estimated
        self.without_cache_usage += other.without_cache_usage
        for cause, missed in other.causes.items():
            self.miss(cause, missed.tokens, missed.misses)

    def miss(self, cause: Cause, tokens: int, misses: int = 1) -> None:
        """Count misses."""
        known = self.causes.setdefault(cause, Missed())
        known.misses += misses
        known.tokens += tokens


@dataclass(frozen=True, slots=True)
class _Before:
    """A request sent before in the same session."""

    prompt: Step
    model: str
    tokens: int
    at_s: float | None


@dataclass(frozen=True, slots=True)
class _Part:
    """What one request adds."""

    tokens: int
    repeated: int
    mended: int
    cached: int


class Auditor:
    """Takes the requests of any number of logs, each log from its beginning on.

    Args:
        scope: "all": what any earlier request began with counts as repeated; "session": those of the same session.
    """

    def __init__(self, scope: Scope = "all") -> None:
        self._scope = scope
        self._seen = SeenPlaces()
        self._heads: dict[tuple[str, ...], int] = {}
        self._keys: OrderedDict[str, None] = OrderedDict()
        self._before: OrderedDict[tuple[str, str], deque[_Before]] = OrderedDict()
        self.sessions: dict[tuple[str, str], Tally] = {}

    @property
    def forgotten(self) -> int:
        """Places in prompts that were let go of because there were too many."""
        return self._seen.forgotten

    def scope_of(self, agent: str, session: str) -> tuple[str, ...]:
        """What prompts must have in common to share anything: names for ``prompt.root``."""
        return () if self._scope == "all" else (agent, session)

    def take(self, sent: Sent) -> None:
        """Count a request, unless it has been counted before: resumed sessions repeat their beginnings."""
        if sent.key:
            if sent.key in self._keys:
                return
            self._keys[sent.key] = None
            if len(self._keys) > MAX_KNOWN_REQUESTS:
                self._keys.popitem(last=False)
        name = (sent.agent, sent.session)
        part = self._measure(sent)
        tally = self.sessions.setdefault(name, Tally())
        avoidable = max(0, part.repeated - part.cached)
        one = Tally(part.tokens, part.repeated, part.cached, avoidable, max(0, part.mended - part.repeated), 1)
        one.estimated = int(sent.tokens is None)
        one.without_cache_usage = int(sent.cached is None)
        before = self._before.setdefault(name, deque(maxlen=MAX_BEFORE))
        self._before.move_to_end(name)
        if len(self._before) > MAX_SESSIONS:
            self._before.popitem(last=False)
        if (missed := self._missed(sent, part, before)) is not None:
            one.miss(*missed)
        before.append(_Before(sent.prompt, sent.model, part.tokens, sent.at_s))
        tally.add(one)

    def _measure(self, sent: Sent) -> _Part:
        visible = estimated_tokens(sent.prompt.sent[-1].characters)
        tokens = visible if sent.tokens is None else sent.tokens
        begin = sent.prompt.path()[0]
        salt = digest(sent.model)
        fresh = sent.hidden and not self._seen.knows(begin, salt)
        if fresh:
            self._seen.begin(begin, max(0, tokens - visible), salt)
        matched = self._seen.match(sent.prompt, tokens, salt)
        cached = min(sent.cached or 0, tokens)
        # Before the first request of a conversation nothing is known to have been sent, unless a cache had it.
        repeated = 0 if fresh else matched.sent
        mended = 0 if fresh else matched.mended
        if fresh and sent.head:
            shared = max(self._heads.get(sent.head, 0), cached)
            self._heads[sent.head] = shared
            repeated = min(tokens, shared)
        repeated = max(repeated, cached)
        return _Part(tokens, repeated, max(mended, repeated), cached)

    def _missed(self, sent: Sent, part: _Part, befores: "deque[_Before]") -> tuple[Cause, int] | None:
        """The first cause why not all of an earlier request was reused, and the tokens that cost."""
        before, parted = _nearest(sent, befores)
        behind = part.mended - part.repeated
        if parted is not None and parted.cause is Cause.MODEL:
            lost = part.tokens - part.repeated
            return (Cause.MODEL, lost) if lost >= MISS_TOKENS else None
        if behind >= MISS_TOKENS and parted is not None and parted.cause in MENDABLE:
            return parted.cause, behind + max(0, part.repeated - part.cached)
        avoidable = part.repeated - part.cached
        if avoidable >= MISS_TOKENS and sent.cached is not None:
            return _cache_cause(sent, before), avoidable
        if sent.compacted:
            return Cause.COMPACTED, part.tokens - part.repeated
        if before is None or parted is None or (parted.cause in _HISTORY and not parted.messages):
            return None
        lost = min(before.tokens, part.tokens) - part.repeated
        return (parted.cause, lost) if lost >= MISS_TOKENS else None


def _nearest(sent: Sent, befores: "deque[_Before]") -> tuple[_Before | None, Parting | None]:
    """The earlier request that has most in common with this one, and where they part.

    Nothing when none has anything in common with it: then it begins another conversation.
    """
    best: tuple[_Before, Parting | None] | None = None
    most = (False, 0)
    for before in reversed(befores):
        parted = parting(before.prompt, sent.prompt)
        same = before.model == sent.model
        if parted is None and same:
            return before, None
        common = parted.mended_parts if parted is not None else before.prompt.n_parts
        if common and (same, common) > most:
            best, most = (before, parted if same else Parting(Cause.MODEL, 0, 0, 0)), (same, common)
    return best or (None, None)


def _cache_cause(sent: Sent, before: _Before | None) -> Cause:
    if before is None:
        return Cause.NEW_CONVERSATION
    if sent.at_s is not None and before.at_s is not None and sent.at_s - before.at_s > IDLE_S:
        return Cause.IDLE
    return Cause.NOT_CACHED
