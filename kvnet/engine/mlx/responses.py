"""Stands where mlx-lm's handler expects a ``ResponseGenerator``: prompts go through the prefill lane instead.

One per request. The handler asks for a context and an iterator of tokens; the first is given once what can be reused
is in place, the second is fed by the decode thread through a queue that never blocks it.
"""

import queue
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from mlx_lm.generate import make_stop_sequences, make_text_state_machine
from mlx_lm.server import GenerationContext

from kvnet.engine.completions import CompletionRequest
from kvnet.engine.mlx.generation import Generation, Piece
from kvnet.engine.mlx.json_schema import JsonGrammars
from kvnet.engine.mlx.requests import CancelledRequestError, Request
from kvnet.engine.mlx.running import Prefilled, Reused
from kvnet.engine.mlx.sampling import make_processors, make_sampler
from kvnet.engine.prompts import PromptKind
from kvnet.engine.wire import FailedEvent, ProgressEvent, Record
from kvnet.engine.wire_values import raised_error

CLI_ARGUMENTS = Namespace(max_tokens=512, temp=0.0, top_p=1.0, top_k=0, min_p=0.0, num_draft_tokens=3, model=None)
"""Defaults of a request, where mlx-lm's server reads them: its command line's own."""


class NotStartedError(BaseException):
    """A request failed before its answer began.

    No ``Exception``: mlx-lm's handler would answer one with a body, and the caller could not try again.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class Submit(Protocol):
    """Queues a completion for prefill; see ``Runner.complete``."""

    def __call__(
        self,
        request: Request,
        asked: CompletionRequest,
        max_tokens: int,
        *,
        started: Callable[[Reused], None],
        generation: Callable[[Prefilled], Generation],
    ) -> None:
        """Returns at once; errors reach ``request`` as an event."""
        ...


@dataclass(frozen=True, slots=True)
class _Ended:
    reason: str


class _GivenUp:
    """The caller no longer wants the answer."""


_Item = Record | Reused | Piece | _Ended | _GivenUp


class Responses:
    """One request's answer.

    Args:
        request: who asked.
        asked: what for.
        tokenizer: mlx-lm's wrapper.
        grammars: makes masks for answers that must be JSON.
        submit: where prompts go.

    Attributes:
        grammar: of the JSON that the answer must be; ``None`` for any text.
        reused: what was in place when prefill began.
        generation: what the decode thread runs, once prefill is done.
    """

    cli_args = CLI_ARGUMENTS

    def __init__(
        self,
        request: Request,
        asked: CompletionRequest,
        tokenizer: Any,
        grammars: JsonGrammars,
        submit: Submit,
    ) -> None:
        self._items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._request = request.answered_to(self._items.put)
        self._asked = asked
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._submit = submit
        self._told: list[int] = []
        self.grammar: str | None = None
        self.reused = Reused(0, 0, 0.0)
        self.generation: Generation | None = None
        request.when_cancelled(lambda: self._items.put(_GivenUp()))

    def generate(
        self, request: Any, arguments: Any, progress_callback: Callable[[int, int], None] | None = None
    ) -> tuple[Any, Iterator[Piece]]:
        """As mlx-lm's ``ResponseGenerator.generate``; the tokens are those prepared, whatever ``request`` holds.

        Raises:
            NotStartedError: with what stood in the way.
        """
        del request
        try:
            context = self._context(arguments)
            self._submit(
                self._request,
                self._asked,
                arguments.max_tokens,
                started=self._items.put,
                generation=lambda prefilled: self._generation(arguments, context, prefilled),
            )
            while not isinstance(item := self._next(), Reused):
                pass
        except Exception as error:
            raise NotStartedError(error) from error
        self.reused = item
        context.prompt_cache_count = item.live_tokens + item.restored_tokens
        return context, self._pieces(progress_callback)

    def _next(self) -> Reused | Piece | _Ended | ProgressEvent | None:
        item = self._items.get()
        if isinstance(item, _GivenUp):
            raise CancelledRequestError
        if isinstance(item, FailedEvent):
            raise raised_error(item)
        return item if isinstance(item, Reused | Piece | _Ended | ProgressEvent) else None

    def _pieces(self, progress: Callable[[int, int], None] | None) -> Iterator[Piece]:
        while not isinstance(item := self._next(), _Ended):
            if isinstance(item, Piece):
                self._told.append(item.token)
                yield item
            elif isinstance(item, ProgressEvent) and progress is not None:
                progress(item.done, item.total)

    def _context(self, arguments: Any) -> Any:
        tokenizer, tokens = self._tokenizer, list(self._asked.prompt.tokens)
        return GenerationContext(
            has_tool_calling=tokenizer.has_tool_calling,
            has_thinking=tokenizer.has_thinking,
            tool_parser=tokenizer.tool_parser,
            text_sm=make_text_state_machine(tokenizer, arguments.stop_words),
            initial_state=self._initial_state(tokens),
            prompt=tokens,
        )

    def _initial_state(self, tokens: list[int]) -> str:
        """Whether the answer begins inside reasoning, as mlx-lm's server decides it."""
        tokenizer = self._tokenizer
        if self._asked.kind != PromptKind.CHAT or not tokenizer.has_chat_template:
            return "normal"
        state = "normal"
        if tokenizer.has_thinking and tokenizer.rfind_think_start(tokens) > tokenizer.rfind_think_end(tokens):
            state = "reasoning"
        return str(tokenizer.response_initial_state or state)

    def _generation(self, arguments: Any, context: Any, prefilled: Prefilled) -> Generation:
        processors = make_processors(arguments)
        failure: Callable[[], Exception | None] = lambda: None  # noqa: E731
        if self.grammar is not None:
            reasons = context.initial_state == "reasoning"
            mask = self._grammars.mask(self.grammar, after=self._tokenizer.think_end_tokens if reasons else ())
            processors.append(mask)
            failure = mask.failure
        self.generation = Generation(
            request=self._request,
            caches=prefilled.caches,
            tokens=prefilled.tokens,
            logits=prefilled.logits,
            max_tokens=arguments.max_tokens,
            restored_tokens=prefilled.reused.live_tokens + prefilled.reused.restored_tokens,
            restore_s=prefilled.reused.restore_s,
            prefill_s=prefilled.prefill_s,
            release=prefilled.release,
            finished=prefilled.finished,
            sink=self,
            sampler=make_sampler(arguments, self._tokenizer),
            processors=processors,
            stop=make_stop_sequences(self._tokenizer, arguments.stop_words),
            stop_texts=tuple(arguments.stop_words),
            logprobs=arguments.logprobs,
            top_logprobs=arguments.top_logprobs,
            failure=failure,
        )
        return self.generation

    def met_stop(self) -> str | None:
        """The stop text that ended the answer; ``None`` when it ended otherwise."""
        if self.generation is None:
            return None
        text = self._tokenizer.decode(self._told)
        ends = [(place + len(stop), stop) for stop in self.generation.stop_texts if (place := text.find(stop)) >= 0]
        return min(ends)[1] if ends else None

    def first(self, ttft_s: float) -> None:
        """See ``Sink.first``; the time is read from the generation at the end."""

    def told(self, piece: Piece) -> None:
        """See ``Sink.told``."""
        self._items.put(piece)

    def ended(self, generation: Generation, reason: str) -> None:
        """See ``Sink.ended``."""
        del generation
        self._items.put(_Ended(reason))
