"""The engine as the node sees it: one child process per model, restarted at the next use if it dies."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import TypeVar

import trio

from kvnet.engine.child import EngineChild, start_child
from kvnet.engine.completions import CompletionEvent, CompletionRequest
from kvnet.engine.generations import FirstToken, GenerateEvent, GenerateRequest, Logits, LogitsRequest, TextDelta
from kvnet.engine.interface import Engine, LiveCaches, ModelInfo
from kvnet.engine.kv_state import ExportEvent, ExportRequest, PrefillProgress
from kvnet.engine.prompts import JsonObject, PreparedPrompt, PromptRequest
from kvnet.engine.wire import (
    FINAL_EVENTS,
    CompleteCall,
    DeltaEvent,
    DropLiveCall,
    ExportCall,
    ExportedEvent,
    FailedEvent,
    FirstTokenEvent,
    GenerateCall,
    GeneratedEvent,
    LimitedEvent,
    LimitMemoryCall,
    LiveCall,
    LiveEvent,
    LogitsCall,
    LogitsEvent,
    PrepareCall,
    PreparedEvent,
    ProgressEvent,
    Record,
    RenderCall,
    SampleCall,
    SampleEvent,
    TextEvent,
    TextOfCall,
    TokenizeCall,
    TokensEvent,
)
from kvnet.engine.wire_values import (
    bytes_text,
    completion_event,
    expected_event,
    export_progress,
    exported,
    generated,
    prepared_prompt,
    raised_error,
    text_bytes,
    wire_prompt,
    wire_restores,
)
from kvnet.errors import EngineError
from kvnet.format.prefix import tokens_from_bytes, tokens_to_bytes

E = TypeVar("E", bound=Record)


@asynccontextmanager
async def open_engine(
    model_path: Path,
    *,
    digest_cache: Path | None = None,
    work_dir: Path,
    memory_budget_bytes: int | None = None,
    live_bytes: int | None = None,
    verify: bool = False,
) -> AsyncIterator["EngineClient"]:
    """Starts an engine process for a model folder and waits until it is loaded.

    Args:
        model_path: an existing MLX model folder.
        digest_cache: file that remembers weight hashes between starts; ``None`` hashes every time.
        work_dir: private folder for what libraries want to write.
        memory_budget_bytes: for weights and K/V together; ``None`` takes the device's recommended working set, or 80 %
            of the RAM.
        live_bytes: most K/V kept in RAM between requests; 0 keeps none, ``None`` takes a quarter of what weights leave.
        verify: hash the weights again even if they are remembered.

    Raises:
        EngineError: the model cannot be loaded.
    """
    options = _options(digest_cache, memory_budget_bytes, live_bytes, verify)
    async with _plain_nursery() as nursery:
        engine = EngineClient(nursery, model_path, work_dir, options)
        try:
            await engine.start()
            yield engine
        finally:
            with trio.CancelScope(shield=True):
                await engine.aclose()
            nursery.cancel_scope.cancel()


def _options(
    digest_cache: Path | None, memory_budget_bytes: int | None, live_bytes: int | None, verify: bool
) -> list[str]:
    options: list[str] = []
    if digest_cache is not None:
        options += ["--digest-cache", str(digest_cache)]
    if memory_budget_bytes is not None:
        options += ["--memory-budget-bytes", str(memory_budget_bytes)]
    if live_bytes is not None:
        options += ["--live-bytes", str(live_bytes)]
    return [*options, "--verify"] if verify else options


@asynccontextmanager
async def _plain_nursery() -> AsyncIterator[trio.Nursery]:
    """A nursery whose tasks never fail: the body's own exception comes out as it went in, not in a group."""
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
    except BaseExceptionGroup as group:
        if len(group.exceptions) == 1:
            raise group.exceptions[0] from group.exceptions[0].__cause__
        raise


class EngineClient(Engine):
    """An engine in its own process; see ``open_engine``."""

    def __init__(self, nursery: trio.Nursery, model_path: Path, work_dir: Path, options: Sequence[str]) -> None:
        self._nursery = nursery
        self._model_path = model_path
        self._work_dir = work_dir
        self._options = options
        self._child: EngineChild | None = None
        self._starting = trio.Lock()
        self._ids = count(1)
        self._info: ModelInfo | None = None
        self._closed = False
        self._limit_bytes: int | None = None

    @property
    def info(self) -> ModelInfo:
        """The loaded model.

        Raises:
            EngineError: none is loaded yet.
        """
        if self._info is None:
            raise EngineError("the engine is not loaded yet")
        return self._info

    @property
    def process_id(self) -> int | None:
        """The engine's process, while there is one."""
        child = self._child
        return None if child is None or child.ended.is_set() else child.process.pid

    async def start(self) -> None:
        """Starts the process if none runs, and waits until its model is loaded.

        Raises:
            EngineError: the model cannot be loaded.
        """
        await self._running()

    async def aclose(self) -> None:
        """Ends the process; running requests fail with ``EngineCrashedError``."""
        self._closed = True
        if self._child is not None:
            await self._child.close()

    async def _running(self) -> EngineChild:
        if self._closed:
            raise EngineError("the engine is closed")
        async with self._starting:
            if self._child is None or self._child.ended.is_set():
                # Not half-way: a process that was started has tasks that look after it.
                with trio.CancelScope(shield=True):
                    self._child = await self._spawn()
            child = self._child
        await child.ready.wait()
        if child.info is None:
            await child.close()
            raise child.crash()
        self._check_same_model(child.info)
        return child

    def _check_same_model(self, info: ModelInfo) -> None:
        if self._info is not None and info.fingerprint != self._info.fingerprint:
            raise EngineError(f"the model in {info.name} changed while it was in use", hint="stop and start the node")
        self._info = self._info or info

    async def _spawn(self) -> EngineChild:
        limit = [] if self._limit_bytes is None else ["--limit-bytes", str(self._limit_bytes)]
        child = await start_child(self._model_path, self._work_dir, [*self._options, *limit])
        for task in (child.read, child.write, child.listen):
            self._nursery.start_soon(task)
        return child

    async def _events(self, call: Record) -> AsyncGenerator[Record, None]:
        """What a call is answered with, up to the last event."""
        child = await self._running()
        with child.request(call) as events:
            async for event in events:
                if isinstance(event, FailedEvent):
                    raise raised_error(event)
                yield event
                if isinstance(event, FINAL_EVENTS):
                    return
        raise child.crash()

    async def _answer(self, call: Record, kind: type[E]) -> E:
        """The one event that answers a call."""
        return expected_event([event async for event in self._events(call)][-1], kind)

    async def _tokens(self, call: Record) -> list[int]:
        return tokens_from_bytes((await self._answer(call, TokensEvent)).tokens)

    async def render(self, messages: Sequence[JsonObject], template_inputs: JsonObject) -> list[int]:
        """See ``Engine.render``."""
        return await self._tokens(self._render_call(messages, template_inputs, cut=False))

    async def context_tokens(self, messages: Sequence[JsonObject], template_inputs: JsonObject) -> list[int]:
        """See ``Engine.context_tokens``."""
        return await self._tokens(self._render_call(messages, template_inputs, cut=True))

    def _render_call(self, messages: Sequence[JsonObject], inputs: JsonObject, *, cut: bool) -> RenderCall:
        return RenderCall(
            id=next(self._ids),
            messages=json.dumps([dict(message) for message in messages]).encode(),
            inputs=json.dumps(dict(inputs)).encode(),
            cut=cut,
        )

    async def tokenize(self, text: str) -> list[int]:
        """See ``Engine.tokenize``."""
        return await self._tokens(TokenizeCall(next(self._ids), text_bytes(text)))

    async def logits(self, request: LogitsRequest) -> Logits:
        """See ``Engine.logits``."""
        call = LogitsCall(
            next(self._ids),
            tokens_to_bytes(request.tokens),
            wire_restores(request.restore),
            list(request.stops),
            request.one_shot,
        )
        answer = await self._answer(call, LogitsEvent)
        return Logits(answer.values, tuple(answer.positions))

    async def export(self, request: ExportRequest) -> AsyncGenerator[ExportEvent, None]:
        """See ``Engine.export``."""
        call = ExportCall(
            id=next(self._ids),
            tokens=tokens_to_bytes(request.tokens),
            restores=wire_restores(request.restore),
            pack_path=text_bytes(str(request.pack_path)),
            pack_offset=request.pack_offset,
            first_block=request.first_block,
            codec=request.codec.value,
            context_size_bytes=request.context_size_bytes,
            prefill=request.prefill,
            background=request.background,
        )
        async with aclosing(self._events(call)) as events:
            async for event in events:
                if isinstance(event, ProgressEvent):
                    yield export_progress(event)
                elif isinstance(event, ExportedEvent):
                    yield exported(event)

    async def prepare(self, request: PromptRequest) -> PreparedPrompt:
        """See ``Engine.prepare``."""
        call = PrepareCall(
            next(self._ids),
            request.kind.value,
            request.body,
            json.dumps(dict(request.template_inputs)).encode(),
            list(request.marks),
        )
        return prepared_prompt((await self._answer(call, PreparedEvent)).prompt)

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[CompletionEvent, None]:
        """See ``Engine.complete``."""
        call = CompleteCall(
            id=next(self._ids),
            kind=request.kind.value,
            body=request.body,
            prompt=wire_prompt(request.prompt),
            restores=wire_restores(request.restore),
            use_live=request.use_live,
            keep_live=request.keep_live,
            created_tokens=request.created_tokens,
        )
        async with aclosing(self._events(call)) as events:
            async for event in events:
                yield completion_event(event)

    async def text_of(self, tokens: Sequence[int]) -> str:
        """See ``Engine.text_of``."""
        answer = await self._answer(TextOfCall(next(self._ids), tokens_to_bytes(tokens)), TextEvent)
        return bytes_text(answer.text)

    async def live(self) -> LiveCaches:
        """See ``Engine.live``."""
        answer = await self._answer(LiveCall(next(self._ids)), LiveEvent)
        return LiveCaches(answer.n_caches, answer.size_bytes, answer.cap_bytes)

    async def limit_memory(self, limit_bytes: int) -> int:
        """See ``Engine.limit_memory``. A process that has ended holds nothing, and is not started for this."""
        self._limit_bytes = limit_bytes
        if self.process_id is None:
            await trio.lowlevel.checkpoint()
            return limit_bytes
        return (await self._answer(LimitMemoryCall(next(self._ids), limit_bytes), LimitedEvent)).held_bytes

    async def drop_live(self) -> None:
        """See ``Engine.drop_live``."""
        await self._answer(DropLiveCall(next(self._ids)), LiveEvent)

    async def sample(self) -> bytes:
        """See ``Engine.sample``."""
        return (await self._answer(SampleCall(next(self._ids)), SampleEvent)).sample

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """See ``Engine.generate``."""
        call = GenerateCall(
            next(self._ids), tokens_to_bytes(request.tokens), wire_restores(request.restore), request.max_tokens
        )
        async with aclosing(self._events(call)) as events:
            async for event in events:
                if isinstance(event, GeneratedEvent):
                    yield generated(event)
                elif isinstance(event, ProgressEvent):
                    yield PrefillProgress(event.done, event.total)
                elif isinstance(event, FirstTokenEvent):
                    yield FirstToken(event.ttft_us / 1e6)
                elif isinstance(event, DeltaEvent):
                    yield TextDelta(bytes_text(event.text), event.token)
