"""From a parsed request to the events of its answer: what it comes to, what is run, and who may run now.

Both styles of client end here; what differs between them is in their own modules.
"""

import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from kvnet.engine.interface import Engine
from kvnet.engine.model_folder import ModelEntry
from kvnet.engine.prompts import PreparedPrompt, PromptKind
from kvnet.errors import BusyError, WindowError
from kvnet.exchange.answers import Asked, Body, Finished, Started
from kvnet.exchange.contexts import decode_context
from kvnet.exchange.lane import Lane
from kvnet.network.news import News
from kvnet.store.names import NameBook
from kvnet_node.api.aliases import Alias
from kvnet_node.api.bodies import encode_object
from kvnet_node.api.failures import RETRY_AFTER_S, SERVER, failure_of, invalid, refused
from kvnet_node.api.headers import is_private, may_be_private, wants_reuse
from kvnet_node.api.merging import with_context
from kvnet_node.api.model_names import names_private
from kvnet_node.api.model_naming import ModelNaming
from kvnet_node.api.parameters import cache_key_of, clean_parameters, max_tokens_of
from kvnet_node.api.requests_log import LoggedRequest, RequestLog
from kvnet_node.engines import EngineShelf
from kvnet_node.prompts.normalise import Removed, Rules, normalise

PRIVATE_FAILURE = "a private request: what was at fault was told to the client alone"


class Completes(Protocol):
    """What answers prepared requests; see :class:`kvnet.exchange.completion.Completer`."""

    async def prepare(self, engine: Engine, asked: Asked) -> PreparedPrompt:
        """Tokenize a request's prompt."""
        ...

    def complete(self, engine: Engine, asked: Asked) -> AsyncGenerator[Started | Body | Finished, None]:
        """Answer a request."""
        ...


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """How the front behaves.

    Attributes:
        max_tokens: generated at most when a request does not say.
        queue_requests: requests at one engine, running ones included.
        rules: what is taken out of prompts.
        aliases: what names mean that are no models here.
        clock_s: seconds since 1970, for the request log.
    """

    max_tokens: int = 4096
    queue_requests: int = 32
    rules: Rules = field(default_factory=Rules)
    aliases: Sequence[Alias] = ()
    clock_s: Callable[[], float] = time.time


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request, in the form of OpenAI's endpoints whatever it came as.

    Attributes:
        kind: of the endpoint.
        path: of the endpoint, for the request log.
        body: OpenAI style.
        headers: of the request, with lower-case names.
        marks: message counts of cache breakpoints, ascending.
        mark_ttl_s: the longest lifetime asked for; 0 for none.
    """

    kind: PromptKind
    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]
    marks: tuple[int, ...] = ()
    mark_ttl_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Planned:
    """What a request comes to.

    Attributes:
        entry: the model that answers.
        asked: what it is asked.
        removed: what was taken out of the prompt.
        window_limited: the client did not say how much may be generated, so less will do near the end of the window.
    """

    entry: ModelEntry
    asked: Asked
    removed: tuple[Removed, ...]
    window_limited: bool


class Front:
    """Runs the requests of HTTP clients.

    Args:
        engines: the models.
        names: the named contexts.
        lane: where blocking store work runs.
        completer: answers what is asked.
        log: keeps the last requests.
        options: how.
    """

    def __init__(
        self,
        engines: EngineShelf,
        names: NameBook,
        lane: Lane,
        completer: Completes,
        log: RequestLog,
        options: FrontOptions | None = None,
    ) -> None:
        self._engines = engines
        self._completer = completer
        self._options = options or FrontOptions()
        self._naming = ModelNaming(engines, names, lane, self._options.aliases)
        self._waiting: Counter[Path] = Counter()
        self._running = 0
        self._left = News()
        self.log = log
        self.counters: Counter[str] = Counter()
        self.draining = False

    @property
    def running(self) -> int:
        """Requests that are being answered."""
        return self._running

    async def wait_idle(self) -> None:
        """Return when no request is being answered."""
        while self.running:
            await self._left.wait()

    @contextmanager
    def request(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Iterator[LoggedRequest]:
        """Note a request and how it ends; its id goes to the client.

        Of a private one, also of one that is at fault, nothing that it said is noted.

        Raises:
            ApiError: 503: the node is about to stop.
        """
        if self.draining:
            raise refused(
                503,
                "the node is about to stop; it takes no new requests",
                kind=SERVER,
                code="stopping",
                headers={"retry-after": str(RETRY_AFTER_S)},
            )
        model = body.get("model")
        self.counters["requests"] += 1
        request = self.log.begin(
            time_s=self._options.clock_s(), path=path, model=model[:200] if isinstance(model, str) else ""
        )
        request.private = may_be_private(headers) or names_private(model)
        self._running += 1
        try:
            yield request
        except Exception as error:
            failure = failure_of(error)
            # Its message may quote what was asked.
            request.failure = replace(failure, message=PRIVATE_FAILURE, headers={}) if request.private else failure
            self.counters["requests_failed"] += 1
            raise
        except BaseException:
            if request.finished is None:
                request.cancelled = True
                self.counters["requests_cancelled"] += 1
            raise
        finally:
            self._running -= 1
            self._left.tell()

    async def models(self) -> list[dict[str, Any]]:
        """The ``data`` of ``/v1/models``."""
        return await self._naming.models()

    async def plan(self, incoming: Incoming) -> Planned:
        """What a request comes to.

        Raises:
            ApiError: its body is at fault.
            UnknownModelError: no such model, context or version.
        """
        body = clean_parameters(incoming.kind, incoming.body)
        meant = await self._naming.find(body.get("model"))
        normalised = normalise(body, self._options.rules)
        body, marks = _normalised(body, normalised.body, incoming.marks)
        inputs: Mapping[str, Any] = {}
        if meant.version is not None:
            if incoming.kind is not PromptKind.CHAT:
                raise invalid("a named context is a conversation; ask /v1/chat/completions", param="model")
            context = decode_context(meant.version.context)
            merged = with_context(body, context)
            body, inputs = merged.body, context.template_inputs
            marks = tuple(merged.mark(mark) for mark in marks)
        body.setdefault("model", meant.entry.name)
        max_tokens = max_tokens_of(body)
        limited = max_tokens is None
        if max_tokens is None:
            max_tokens = body["max_tokens"] = self._default_max_tokens(meant.entry)
        asked = Asked(
            kind=incoming.kind,
            body=encode_object(body),
            template_inputs=inputs,
            max_tokens=max_tokens,
            private=meant.private or is_private(incoming.headers),
            reuse=wants_reuse(incoming.headers),
            marks=marks,
            mark_ttl_s=incoming.mark_ttl_s,
            cache_key=cache_key_of(body),
        )
        return Planned(meant.entry, asked, normalised.removed, limited)

    async def answer(
        self, incoming: Incoming, request: LoggedRequest
    ) -> AsyncGenerator[Started | Body | Finished, None]:
        """Answer a request: ``Started`` once, any number of ``Body``, ``Finished`` last.

        Raises:
            KvnetError: it cannot be answered; after ``Started`` only when the engine broke off.
        """
        planned = await self.plan(incoming)
        request.answered_by = planned.entry.name
        self.log.run(request, planned.asked, planned.removed)
        async with self._engine(planned.entry) as engine, aclosing(self._run(engine, planned)) as events:
            async for event in events:
                self._note(request, event)
                yield event

    async def count(self, incoming: Incoming) -> PreparedPrompt:
        """Tokenize a request's prompt as it would be run, and nothing else.

        Raises:
            KvnetError: it cannot be.
        """
        planned = await self.plan(incoming)
        async with self._engine(planned.entry) as engine:
            return await self._completer.prepare(engine, planned.asked)

    async def _run(self, engine: Engine, planned: Planned) -> AsyncGenerator[Started | Body | Finished, None]:
        asked = planned.asked
        try:
            async with aclosing(self._completer.complete(engine, asked)) as events:
                async for event in events:
                    yield event
            return
        except WindowError:
            if not planned.window_limited:
                raise
            left = engine.info.window_tokens - len((await self._completer.prepare(engine, asked)).tokens)
            if left < 1:
                raise
        # The client left the length to us; what is left of the window is more than nothing.
        body = msgspec.json.decode(asked.body) | {"max_tokens": left}
        asked = replace(asked, body=encode_object(body), max_tokens=left)
        async with aclosing(self._completer.complete(engine, asked)) as events:
            async for event in events:
                yield event

    def _default_max_tokens(self, entry: ModelEntry) -> int:
        # Not more than half of a small window, so that the common request needs one attempt.
        window = entry.window_tokens or 0
        return min(self._options.max_tokens, max(window // 2, 1)) if window else self._options.max_tokens

    @asynccontextmanager
    async def _engine(self, entry: ModelEntry) -> AsyncIterator[Engine]:
        with self._place(entry):
            async with self._engines.use_entry(entry) as engine:
                yield engine

    @contextmanager
    def _place(self, entry: ModelEntry) -> Iterator[None]:
        """One of the bounded places at an engine."""
        if self._waiting[entry.path] >= self._options.queue_requests:
            raise BusyError(
                f"{self._waiting[entry.path]} requests wait or run at {entry.name}, and no more may "
                "(api.queue_requests)",
                hint=f"try again in {RETRY_AFTER_S} s",
            )
        self._waiting[entry.path] += 1
        try:
            yield
        finally:
            self._waiting[entry.path] -= 1

    def _note(self, request: LoggedRequest, event: Started | Body | Finished) -> None:
        if isinstance(event, Started):
            self.log.reused(request, event.reuse)
        elif isinstance(event, Finished):
            self.log.finish(request, event)
        if not request.private:
            self._count(event)

    def _count(self, event: Started | Body | Finished) -> None:
        if isinstance(event, Started):
            self.counters["prompt_tokens"] += event.reuse.prompt_tokens
            if event.reuse.reused_tokens:
                self.counters[f"reused_{event.reuse.source}_tokens"] += event.reuse.reused_tokens
        elif isinstance(event, Finished):
            self.counters["generated_tokens"] += len(event.completed.tokens)


def _normalised(
    before: Mapping[str, Any], after: Mapping[str, Any], marks: Sequence[int]
) -> tuple[dict[str, Any], tuple[int, ...]]:
    """A normalised body and its marks; a first message that was nothing but noise is gone, and counts less by one."""
    messages, kept = before.get("messages"), after.get("messages")
    gone = len(messages) - len(kept) if isinstance(messages, list) and isinstance(kept, list) else 0
    return dict(after), tuple(mark - gone for mark in marks if mark > gone)
