"""The engine process: ``python -m kvnet.engine.mlx.process --fd N --model FOLDER``.

Threads: the main thread reads calls from the inherited socket; the prefill lane and the decode thread own MLX; one
thread renders, tokenizes and prepares prompts; each completion has one that formats its answer; one writes events. The
process ends when the other end of the socket closes, whatever it is doing, and without tearing the
interpreter down (see `leave`).
"""

import argparse
import faulthandler
import json
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvnet.engine.completions import CompletionRequest
from kvnet.engine.generations import GenerateRequest, LogitsRequest
from kvnet.engine.kv_state import ExportRequest
from kvnet.engine.mlx import blas, runtime, server_parts
from kvnet.engine.mlx.leaving import leave
from kvnet.engine.mlx.requests import Request
from kvnet.engine.prompts import PromptKind, PromptRequest
from kvnet.engine.wire import (
    FINAL_EVENTS,
    CancelCall,
    CompleteCall,
    DropLiveCall,
    ExportCall,
    FrameBuffer,
    GenerateCall,
    LimitedEvent,
    LimitMemoryCall,
    LiveCall,
    LiveEvent,
    LogitsCall,
    PrepareCall,
    PreparedEvent,
    Record,
    RenderCall,
    SampleCall,
    TextEvent,
    TextOfCall,
    TokenizeCall,
    TokensEvent,
    encode_frame,
)
from kvnet.engine.wire_values import (
    bytes_text,
    error_event,
    prepared_prompt,
    ready_event,
    restore_plan,
    text_bytes,
    wire_prompt,
)
from kvnet.errors import EngineError, KvnetError
from kvnet.format.codecs import Codec
from kvnet.format.prefix import tokens_from_bytes, tokens_to_bytes

if TYPE_CHECKING:
    from kvnet.engine.mlx.budget import Budget
    from kvnet.engine.mlx.endpoint import Endpoint
    from kvnet.engine.mlx.generation import Generation
    from kvnet.engine.mlx.lane import Prefilled, Reused, Runner
    from kvnet.engine.mlx.live import Shelf
    from kvnet.engine.mlx.preparing import Preparer
    from kvnet.engine.mlx.text import PromptText

READ_BYTES = 1 << 18
"""Socket reads."""


class _Worker:
    """A thread that runs jobs in order; an exception becomes the request's answer."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Request, Callable[[], None]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, request: Request, job: Callable[[], None]) -> None:
        self._jobs.put((request, job))

    def _run(self) -> None:
        while True:
            request, job = self._jobs.get()
            if request.cancelled:
                continue
            try:
                job()
            except Exception as error:  # noqa: BLE001 - one request fails, the thread lives on
                request.send(error_event(request.id, error))


class _Outbox:
    """Events on their way out: never blocks the thread that made them."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._events: queue.SimpleQueue[Record] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="outbox", daemon=True).start()

    def put(self, event: Record) -> None:
        self._events.put(event)

    def _run(self) -> None:
        while True:
            try:
                self._connection.sendall(encode_frame(self._events.get()))
            except OSError:
                # Nobody listens any more; the reader sees the end too, and ends the process.
                return


class EngineProcess:
    """Routes calls to the threads that do the work."""

    def __init__(self, connection: socket.socket, arguments: argparse.Namespace, blas_report: blas.BlasReport) -> None:
        from kvnet.engine.mlx.lane import Lane

        self._connection = connection
        self._arguments = arguments
        self._blas = blas_report
        self._outbox = _Outbox(connection)
        self._lane = Lane()
        self._text_thread = _Worker("text")
        self._requests: dict[int, Request] = {}
        self._wake: Callable[[], None] = lambda: None
        self._runner: Runner
        self._shelf: Shelf
        self._budget: Budget
        self._text: PromptText
        self._preparer: Preparer
        self._endpoint: Endpoint

    def run(self) -> None:
        """Loads the model and serves until the socket closes."""
        loading = Request(0, self._outbox.put)
        self._lane.start()
        self._lane.submit(loading, self._load)
        frames = FrameBuffer()
        while data := self._connection.recv(READ_BYTES):
            for record in frames.feed(data):
                self._take(record)

    def _load(self) -> None:
        from kvnet.engine.mlx.budget import Budget
        from kvnet.engine.mlx.decoding import DecodeThread
        from kvnet.engine.mlx.endpoint import Endpoint
        from kvnet.engine.mlx.fingerprinting import DigestCache
        from kvnet.engine.mlx.lane import Runner
        from kvnet.engine.mlx.live import Shelf
        from kvnet.engine.mlx.loader import load_folder
        from kvnet.engine.mlx.preparing import Preparer
        from kvnet.engine.mlx.text import PromptText

        asked = self._arguments
        digests = DigestCache(asked.digest_cache, verify=asked.verify)
        loaded = load_folder(
            asked.model, digests=digests, blas=self._blas, memory_budget_bytes=asked.memory_budget_bytes
        )
        digests.save()
        info = loaded.info
        self._shelf = Shelf(0)
        self._budget = budget = Budget(
            weights_size_bytes=info.weights_size_bytes,
            cost=loaded.cost,
            window_tokens=info.window_tokens,
            limit_bytes=info.memory_budget_bytes,
            live=self._shelf,
            live_bytes=asked.live_bytes,
        )
        if asked.limit_bytes is not None:
            budget.limit(asked.limit_bytes)
        decode = DecodeThread(loaded.model, loaded.tokenizer)
        decode.start()
        self._wake = budget.wake
        self._runner = Runner(
            loaded, budget, decode, self._shelf, waiting=self._lane.shared_by_waiting, give_way=self._lane.give_way
        )
        self._text = PromptText(loaded.tokenizer)
        self._preparer = Preparer(loaded.tokenizer, self._text, self._shelf.covered)
        self._endpoint = Endpoint(loaded.tokenizer, info.window_tokens, self._prefill)
        self._outbox.put(ready_event(info))

    def _take(self, record: Record) -> None:
        if isinstance(record, CancelCall):
            if request := self._requests.pop(record.id, None):
                request.cancel()
                self._wake()
            return
        request = Request(record.id, self._send_for(record.id))
        self._requests[record.id] = request
        if isinstance(record, RenderCall | TokenizeCall | PrepareCall | TextOfCall):
            self._text_thread.submit(request, lambda: self._words(request, record))
        elif isinstance(record, LiveCall | DropLiveCall):
            self._tell_live(request, drop=isinstance(record, DropLiveCall))
        elif isinstance(record, LimitMemoryCall):
            request.send(LimitedEvent(request.id, self._budget.limit(record.limit_bytes)))
        elif isinstance(record, CompleteCall):
            self._complete(request, record)
        else:
            export = record if isinstance(record, ExportCall) else None
            self._lane.submit(
                request,
                lambda: self._compute(request, record),
                background=isinstance(record, SampleCall) or (export is not None and export.background),
                tokens=tokens_from_bytes(export.tokens) if export is not None else None,
            )

    def _complete(self, request: Request, call: CompleteCall) -> None:
        try:
            self._endpoint.answer(request, _completion_request(call))
        except KvnetError as error:
            request.send(error_event(request.id, error))

    def _prefill(
        self,
        request: Request,
        asked: CompletionRequest,
        max_tokens: int,
        *,
        started: "Callable[[Reused], None]",
        generation: "Callable[[Prefilled], Generation]",
    ) -> None:
        """Queues a completion's prompt; see ``Runner.complete``."""
        self._lane.submit(
            request,
            lambda: self._runner.complete(request, asked, max_tokens, started=started, generation=generation),
            tokens=asked.prompt.tokens,
        )

    def _tell_live(self, request: Request, *, drop: bool) -> None:
        if drop:
            self._shelf.drop()
        held = self._shelf.figures()
        request.send(LiveEvent(request.id, held.n_caches, held.size_bytes, held.cap_bytes))

    def _send_for(self, request_id: int) -> Callable[[Record], None]:
        def send(event: Record) -> None:
            if isinstance(event, FINAL_EVENTS):
                self._requests.pop(request_id, None)
            self._outbox.put(event)

        return send

    def _words(self, request: Request, call: RenderCall | TokenizeCall | PrepareCall | TextOfCall) -> None:
        if isinstance(call, PrepareCall):
            asked = PromptRequest(PromptKind(call.kind), call.body, json.loads(call.inputs), tuple(call.marks))
            request.send(PreparedEvent(request.id, wire_prompt(self._preparer.prepare(asked))))
            return
        if isinstance(call, TextOfCall):
            request.send(TextEvent(request.id, text_bytes(self._text.text_of(tokens_from_bytes(call.tokens)))))
            return
        if isinstance(call, TokenizeCall):
            tokens = self._text.tokenize(bytes_text(call.text))
        else:
            messages, inputs = json.loads(call.messages), json.loads(call.inputs)
            make = self._text.context_tokens if call.cut else self._text.render
            tokens = make(messages, inputs)
        request.send(TokensEvent(request.id, tokens_to_bytes(tokens)))

    def _compute(self, request: Request, call: Record) -> Iterator[None] | None:
        if isinstance(call, GenerateCall):
            self._runner.generate(
                request, GenerateRequest(tokens_from_bytes(call.tokens), restore_plan(call.restores), call.max_tokens)
            )
        elif isinstance(call, ExportCall):
            return self._runner.export(request, _export_request(call))
        elif isinstance(call, SampleCall):
            return self._runner.sample(request)
        elif isinstance(call, LogitsCall):
            self._runner.logits(
                request,
                LogitsRequest(
                    tokens_from_bytes(call.tokens), restore_plan(call.restores), tuple(call.stops), call.one_shot
                ),
            )
        else:
            raise EngineError(f"the engine does not take {type(call).__name__}")
        return None


def _export_request(call: ExportCall) -> ExportRequest:
    return ExportRequest(
        tokens=tokens_from_bytes(call.tokens),
        restore=restore_plan(call.restores),
        pack_path=Path(bytes_text(call.pack_path)),
        pack_offset=call.pack_offset,
        first_block=call.first_block,
        codec=Codec(call.codec),
        context_size_bytes=call.context_size_bytes,
        prefill=call.prefill,
        background=call.background,
    )


def _completion_request(call: CompleteCall) -> CompletionRequest:
    return CompletionRequest(
        kind=PromptKind(call.kind),
        body=call.body,
        prompt=prepared_prompt(call.prompt),
        restore=restore_plan(call.restores),
        use_live=call.use_live,
        keep_live=call.keep_live,
        created_tokens=call.created_tokens,
    )


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kvnet.engine.mlx.process")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--digest-cache", type=Path)
    parser.add_argument("--memory-budget-bytes", type=int)
    parser.add_argument("--live-bytes", type=int)
    parser.add_argument("--limit-bytes", type=int)
    parser.add_argument("--verify", action="store_true")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> Any:
    """Runs the engine; never returns."""
    # Ctrl-C goes to the whole terminal group; the node decides what it means and closes the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    arguments = _arguments(argv)
    connection = socket.socket(fileno=arguments.fd)
    status = 0
    try:
        report = blas.preload()
        runtime.import_mlx_lm()
        server_parts.import_parts()
        EngineProcess(connection, arguments, report).run()
    except Exception as error:  # noqa: BLE001 - the last handler: say what happened, then leave without teardown
        status = 1
        connection.sendall(encode_frame(error_event(0, error)))
    finally:
        leave(status)


if __name__ == "__main__":
    main()
