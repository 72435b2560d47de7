"""Generate: reuse the longest verified prefix, compute the rest, decode.

The network may only make this faster. Whatever goes wrong with reuse - nothing found, a chunk that does not match its
hash, state the model does not take - ends in plain local prefill, and the answer says so.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import trio

from kvnet.engine.generations import FirstToken, Generated, GenerateEvent, GenerateRequest, TextDelta
from kvnet.engine.interface import Engine
from kvnet.engine.kv_state import PrefillProgress
from kvnet.exchange.identity import Identity
from kvnet.exchange.prefix_reuse import Prefix, PrefixReuse, Source, Wanted
from kvnet.exchange.reuse import Rejected
from kvnet.format.fingerprint import Verdict


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished generation and how it came about.

    Attributes:
        text: what was generated.
        tokens: token ids generated, without the end token.
        finish_reason: ``"stop"`` or ``"length"``.
        prompt_tokens: tokens of the prompt.
        reused_tokens: of these, restored instead of computed.
        prefilled_tokens: of these, computed.
        sources: where the reused ones came from.
        ttft_s: seconds from the request to the first token, looking up and fetching included.
        prefill_s: seconds of prefill.
        restore_s: seconds of restore.
        decode_s: seconds from the first token to the end.
        verdict: how exact the reuse is; ``None`` when nothing was reused.
        policy: the trust policy in force.
        rejected: artifacts that fitted and were not used, with the reason.
        lookup_s: seconds spent looking, fetching included.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    reused_tokens: int
    prefilled_tokens: int
    sources: tuple[Source, ...]
    ttft_s: float
    prefill_s: float
    restore_s: float
    decode_s: float
    verdict: Verdict | None
    policy: str
    rejected: tuple[Rejected, ...] = ()
    lookup_s: float = 0.0

    @property
    def waited_s(self) -> float:
        """About how long it waited for its turn: what neither reuse nor prefill took until the first token."""
        return max(0.0, self.ttft_s - self.lookup_s - self.restore_s - self.prefill_s)


AnswerEvent = PrefillProgress | TextDelta | Answer


class Generator:
    """Answers prompts with one engine, reusing what this node or its peers hold.

    Args:
        reuse: finds what to continue from.
        identity: whose policy an answer names.
    """

    def __init__(self, reuse: PrefixReuse, identity: Identity) -> None:
        self._identity = identity
        self._reuse = reuse

    async def generate(
        self, engine: Engine, tokens: Sequence[int], *, max_tokens: int, reuse: bool
    ) -> AsyncGenerator[AnswerEvent, None]:
        """Decode greedily after ``tokens``; the last event is the ``Answer``.

        Args:
            engine: of the model to use.
            tokens: the whole prompt's token ids, from one tokenization.
            max_tokens: most tokens to generate.
            reuse: look for stored and fetched prefixes; otherwise nothing is looked up.

        Raises:
            EngineError: the engine cannot answer, with or without reuse.
        """
        clock = _Clock(trio.current_time())
        wanted = Wanted(tokens)
        found = await self._reuse.find(engine, wanted) if reuse else Prefix()
        answered = self._reuse.attempts(
            engine,
            wanted,
            found,
            lambda prefix: self._run(engine, tokens, prefix, max_tokens, clock),
            has_begun=lambda event: isinstance(event, TextDelta),
        )
        async with aclosing(answered) as events:
            async for event in events:
                yield event

    async def _run(
        self, engine: Engine, tokens: Sequence[int], found: Prefix, max_tokens: int, clock: "_Clock"
    ) -> AsyncGenerator[AnswerEvent, None]:
        request = GenerateRequest(tokens=tokens, restore=found.plan, max_tokens=max_tokens)
        events: AsyncGenerator[GenerateEvent, None] = engine.generate(request)
        async with aclosing(events):
            async for event in events:
                if isinstance(event, FirstToken):
                    clock.first_token()
                elif isinstance(event, Generated):
                    yield self._answer(tokens, found, event, clock)
                else:
                    yield event

    def _answer(self, tokens: Sequence[int], found: Prefix, done: Generated, clock: "_Clock") -> Answer:
        reused = found.hit if done.restored_tokens else None
        return Answer(
            text=done.text,
            tokens=done.tokens,
            finish_reason=done.finish_reason,
            prompt_tokens=len(tokens),
            reused_tokens=done.restored_tokens,
            prefilled_tokens=done.prefilled_tokens,
            sources=found.sources(done.restored_tokens, done.restore_s),
            ttft_s=clock.ttft_s,
            prefill_s=done.prefill_s,
            restore_s=done.restore_s,
            decode_s=clock.since_first_token_s(),
            verdict=reused.comparison.verdict if reused is not None else None,
            policy=self._identity.policy().name,
            rejected=found.rejected,
            lookup_s=found.lookup_s,
        )


class _Clock:
    """Seconds of one request: to the first token, and from there to the end."""

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._first_s: float | None = None

    def first_token(self) -> None:
        if self._first_s is None:
            self._first_s = trio.current_time()

    @property
    def ttft_s(self) -> float:
        return (self._first_s if self._first_s is not None else trio.current_time()) - self._started_s

    def since_first_token_s(self) -> float:
        return trio.current_time() - self._first_s if self._first_s is not None else 0.0
