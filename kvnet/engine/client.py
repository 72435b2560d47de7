"""The engine as the node sees it: one child process per model, restarted at the next use if it dies.

Calls and events travel as frames over a socket pair whose other end the child inherits; there is no path on disk that
somebody else could open. The child ends when its end of the pair closes, so it never outlives the node.
"""

import json
import math
import os
import signal
import site
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import TypeVar

import trio

import kvnet
from kvnet.engine.interface import (
    Completed,
    CompletionBody,
    CompletionEvent,
    CompletionRequest,
    CompletionStarted,
    Engine,
    Exported,
    ExportEvent,
    ExportRequest,
    FirstToken,
    Generated,
    GenerateEvent,
    GenerateRequest,
    JsonObject,
    LiveCaches,
    Logits,
    LogitsRequest,
    ModelInfo,
    Origin,
    PrefillProgress,
    PreparedPrompt,
    PromptRequest,
    TextDelta,
)
from kvnet.engine.wire import (
    FINAL_EVENTS,
    BodyEvent,
    CancelCall,
    CompleteCall,
    CompletedEvent,
    DeltaEvent,
    DropLiveCall,
    ExportCall,
    ExportedEvent,
    FailedEvent,
    FirstTokenEvent,
    FrameBuffer,
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
    ReadyEvent,
    Record,
    RenderCall,
    SampleCall,
    SampleEvent,
    StartedEvent,
    TextEvent,
    TextOfCall,
    TokenizeCall,
    TokensEvent,
    bytes_text,
    encode_frame,
    model_info,
    prepared_prompt,
    raised_error,
    text_bytes,
    wire_prompt,
    wire_restores,
    written_chunks,
)
from kvnet.errors import EngineCrashedError, EngineError, KvnetError
from kvnet.format.prefix import tokens_from_bytes, tokens_to_bytes

READ_BYTES = 1 << 18
"""Socket reads."""

STDERR_TAIL_BYTES = 4096
"""How much of a child's last words is kept to explain its end."""

E = TypeVar("E", bound=Record)

GRACE_S = 5.0
"""How long a child may take to end once its socket is closed; then it is killed."""


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


class _Child:
    """One engine process and the requests running in it."""

    def __init__(self, process: trio.Process, stream: trio.SocketStream) -> None:
        self.process = process
        self.ready = trio.Event()
        self.ended = trio.Event()
        self.info: ModelInfo | None = None
        self.failure: KvnetError | None = None
        self._stream = stream
        self._pending: dict[int, trio.MemorySendChannel[Record]] = {}
        # Bounded by the requests that run: each puts one call and at most one cancellation.
        self._outbox, self._to_send = trio.open_memory_channel[bytes](math.inf)
        self._last_words = bytearray()

    @contextmanager
    def request(self, call: Record) -> Iterator[trio.MemoryReceiveChannel[Record]]:
        """Sends a call; gives the channel its events arrive in. Leaving early cancels the request."""
        # Bounded by the request itself: its steps, its tokens and one answer.
        inbox, events = trio.open_memory_channel[Record](math.inf)
        frame = encode_frame(call)
        self._pending[call.id] = inbox
        if self.ended.is_set():
            inbox.close()
        else:
            self._outbox.send_nowait(frame)
        try:
            yield events
        finally:
            # A request that got its answer is not pending any more.
            if self._pending.pop(call.id, None) is not None and not self.ended.is_set():
                self._outbox.send_nowait(encode_frame(CancelCall(call.id)))
            inbox.close()
            events.close()

    async def read(self) -> None:
        """Delivers events until the process ends, then fails what still runs."""
        frames = FrameBuffer()
        try:
            while data := await self._stream.receive_some(READ_BYTES):
                for record in frames.feed(data):
                    self._deliver(record)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        except KvnetError as error:
            self.failure = EngineError(f"the engine process speaks another language: {error.message}")
        finally:
            await self._end()

    def _deliver(self, record: Record) -> None:
        if isinstance(record, ReadyEvent):
            self.info = model_info(record)
            self.ready.set()
        elif record.id == 0 and isinstance(record, FailedEvent):
            self.failure = raised_error(record)
            self.ready.set()
        elif inbox := self._pending.get(record.id):
            inbox.send_nowait(record)
            if isinstance(record, FINAL_EVENTS):
                self._pending.pop(record.id).close()

    async def _end(self) -> None:
        with trio.CancelScope(deadline=trio.current_time() + GRACE_S, shield=True):
            await self._stream.aclose()
            await self.process.wait()
        if self.process.returncode is None:
            self.process.kill()
            with trio.CancelScope(shield=True):
                await self.process.wait()
        self.ended.set()
        self.ready.set()
        self._outbox.close()
        # Closed without an answer: the request sees the end of its events.
        for inbox in self._pending.values():
            inbox.close()
        self._pending.clear()

    async def write(self) -> None:
        """Sends frames until the process ends."""
        async for frame in self._to_send:
            try:
                await self._stream.send_all(frame)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return

    async def listen(self) -> None:
        """Keeps the end of what the process says on stderr."""
        assert self.process.stderr is not None  # noqa: S101 - the process was started with a pipe
        async for data in self.process.stderr:
            self._last_words += data
            del self._last_words[:-STDERR_TAIL_BYTES]

    def crash(self) -> KvnetError:
        """Why requests of this process failed."""
        if self.failure is not None:
            return self.failure
        status = self.process.returncode
        how = f"status {status}" if status is None or status >= 0 else f"signal {signal.Signals(-status).name}"
        lines = self._last_words.decode("utf-8", "replace").strip().splitlines()
        said = f"; it said last: {lines[-1][:200]}" if lines else ""
        return EngineCrashedError(f"the engine process ended ({how}){said}", hint="ask again: it is started anew")

    async def close(self) -> None:
        """Ends the process by closing its socket; kills it if it does not go."""
        await self._stream.aclose()
        await self.ended.wait()


class EngineClient(Engine):
    """An engine in its own process; see ``open_engine``."""

    def __init__(self, nursery: trio.Nursery, model_path: Path, work_dir: Path, options: Sequence[str]) -> None:
        self._nursery = nursery
        self._model_path = model_path
        self._work_dir = work_dir
        self._options = options
        self._child: _Child | None = None
        self._starting = trio.Lock()
        self._ids = count(1)
        self._info: ModelInfo | None = None
        self._closed = False
        self._limit_bytes: int | None = None

    @property
    def info(self) -> ModelInfo:
        """The loaded model."""
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

    async def _running(self) -> _Child:
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

    async def _spawn(self) -> _Child:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            process = await trio.lowlevel.open_process(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "kvnet.engine.mlx.process",
                    "--fd",
                    str(theirs.fileno()),
                    "--model",
                    str(self._model_path),
                    *self._options,
                    *(["--limit-bytes", str(self._limit_bytes)] if self._limit_bytes is not None else []),
                ],
                stdin=DEVNULL,
                stdout=DEVNULL,
                stderr=PIPE,
                pass_fds=[theirs.fileno()],
                env=self._environment(),
            )
        except OSError as error:
            ours.close()
            raise EngineError(f"could not start the engine process: {error.strerror}") from error
        finally:
            theirs.close()
        child = _Child(process, trio.SocketStream(trio.socket.from_stdlib_socket(ours)))
        for task in (child.read, child.write, child.listen):
            self._nursery.start_soon(task)
        return child

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            **_python_path(str(Path(kvnet.__file__).parent.parent)),
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self._work_dir / "hub"),
        }

    async def _answer(self, call: Record) -> Record:
        """The one event that answers a call."""
        child = await self._running()
        with child.request(call) as events:
            async for event in events:
                if isinstance(event, FailedEvent):
                    raise raised_error(event)
                if isinstance(event, FINAL_EVENTS):
                    return event
        raise child.crash()

    async def _tokens(self, call: Record) -> list[int]:
        answer = await self._answer(call)
        return tokens_from_bytes(_expected(answer, TokensEvent).tokens)

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
        answer = _expected(
            await self._answer(
                LogitsCall(
                    next(self._ids),
                    tokens_to_bytes(request.tokens),
                    wire_restores(request.restore),
                    list(request.stops),
                    request.one_shot,
                )
            ),
            LogitsEvent,
        )
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
        child = await self._running()
        with child.request(call) as events:
            async for event in events:
                if isinstance(event, FailedEvent):
                    raise raised_error(event)
                if isinstance(event, ProgressEvent):
                    yield PrefillProgress(event.done, event.total)
                elif isinstance(event, ExportedEvent):
                    yield _exported(event)
                    return
        raise child.crash()

    async def prepare(self, request: PromptRequest) -> PreparedPrompt:
        """See ``Engine.prepare``."""
        call = PrepareCall(
            next(self._ids),
            request.kind.value,
            request.body,
            json.dumps(dict(request.template_inputs)).encode(),
            list(request.marks),
        )
        return prepared_prompt(_expected(await self._answer(call), PreparedEvent).prompt)

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
        child = await self._running()
        with child.request(call) as events:
            async for event in events:
                if isinstance(event, FailedEvent):
                    raise raised_error(event)
                yield _completion_event(event)
                if isinstance(event, CompletedEvent):
                    return
        raise child.crash()

    async def text_of(self, tokens: Sequence[int]) -> str:
        """See ``Engine.text_of``."""
        answer = await self._answer(TextOfCall(next(self._ids), tokens_to_bytes(tokens)))
        return bytes_text(_expected(answer, TextEvent).text)

    async def live(self) -> LiveCaches:
        """See ``Engine.live``."""
        answer = _expected(await self._answer(LiveCall(next(self._ids))), LiveEvent)
        return LiveCaches(answer.n_caches, answer.size_bytes, answer.cap_bytes)

    async def limit_memory(self, limit_bytes: int) -> int:
        """See ``Engine.limit_memory``. A process that has ended holds nothing, and is not started for this."""
        self._limit_bytes = limit_bytes
        if self.process_id is None:
            await trio.lowlevel.checkpoint()
            return limit_bytes
        return _expected(await self._answer(LimitMemoryCall(next(self._ids), limit_bytes)), LimitedEvent).held_bytes

    async def drop_live(self) -> None:
        """See ``Engine.drop_live``."""
        _expected(await self._answer(DropLiveCall(next(self._ids))), LiveEvent)

    async def sample(self) -> bytes:
        """See ``Engine.sample``."""
        return _expected(await self._answer(SampleCall(next(self._ids))), SampleEvent).sample

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """See ``Engine.generate``."""
        call = GenerateCall(
            next(self._ids), tokens_to_bytes(request.tokens), wire_restores(request.restore), request.max_tokens
        )
        child = await self._running()
        with child.request(call) as events:
            async for event in events:
                if isinstance(event, FailedEvent):
                    raise raised_error(event)
                if isinstance(event, GeneratedEvent):
                    yield _generated(event)
                    return
                if isinstance(event, ProgressEvent):
                    yield PrefillProgress(event.done, event.total)
                elif isinstance(event, FirstTokenEvent):
                    yield FirstToken(event.ttft_us / 1e6)
                elif isinstance(event, DeltaEvent):
                    yield TextDelta(bytes_text(event.text), event.token)
        raise child.crash()


def _python_path(package_root: str) -> dict[str, str]:
    """Lets the child import the same kvnet from a checkout; an installed one it finds by itself."""
    if package_root in site.getsitepackages():
        return {}
    paths = [package_root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def _expected(event: Record, kind: type[E]) -> E:
    if not isinstance(event, kind):
        raise EngineError(f"the engine answered with {type(event).__name__}, expected {kind.__name__}")
    return event


def _exported(event: ExportedEvent) -> Exported:
    return Exported(
        written_chunks(event.chunks),
        event.restored_tokens,
        event.prefilled_tokens,
        event.restore_us / 1e6,
        event.prefill_us / 1e6,
        tuple(Origin(origin.manifest, origin.n_tokens) for origin in event.origins),
    )


def _completion_event(event: Record) -> CompletionEvent:
    if isinstance(event, BodyEvent):
        return CompletionBody(event.data)
    if isinstance(event, StartedEvent):
        return CompletionStarted(
            event.status, event.content_type, event.live_tokens, event.restored_tokens, event.restore_us / 1e6
        )
    completed = _expected(event, CompletedEvent)
    return Completed(
        tokens=tuple(tokens_from_bytes(completed.tokens)),
        finish_reason=completed.finish_reason,
        held_tokens=completed.held_tokens,
        ttft_s=completed.ttft_us / 1e6,
        prefilled_tokens=completed.prefilled_tokens,
        prefill_s=completed.prefill_us / 1e6,
        decode_s=completed.decode_us / 1e6,
    )


def _generated(event: GeneratedEvent) -> Generated:
    return Generated(
        text=bytes_text(event.text),
        tokens=tuple(tokens_from_bytes(event.tokens)),
        finish_reason=event.finish_reason,
        ttft_s=event.ttft_us / 1e6,
        restored_tokens=event.restored_tokens,
        prefilled_tokens=event.prefilled_tokens,
        restore_s=event.restore_us / 1e6,
        prefill_s=event.prefill_us / 1e6,
    )
