"""A model with a prefill lane and a decode thread in this very process, for cases of live caches.

Import it before anything that imports mlx: it loads BLAS and mlx_lm as the engine's process does.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvnet.engine.mlx import blas, runtime

REPORT = blas.preload()
runtime.import_mlx_lm()

from kvnet.engine.completions import CompletionRequest  # noqa: E402
from kvnet.engine.generations import GenerateRequest  # noqa: E402
from kvnet.engine.kv_state import ExportRequest, RestorePlan  # noqa: E402
from kvnet.engine.mlx.budget import Budget  # noqa: E402
from kvnet.engine.mlx.decoding import DecodeThread  # noqa: E402
from kvnet.engine.mlx.fingerprinting import DigestCache  # noqa: E402
from kvnet.engine.mlx.generation import Generation  # noqa: E402
from kvnet.engine.mlx.lane import Lane, Prefilled, Reused, Runner  # noqa: E402
from kvnet.engine.mlx.live import Shelf  # noqa: E402
from kvnet.engine.mlx.loader import load_folder  # noqa: E402
from kvnet.engine.mlx.requests import CancelledRequestError, Request  # noqa: E402
from kvnet.engine.prompts import Boundary, PreparedPrompt, PromptKind  # noqa: E402
from kvnet.engine.scratch import scratch_restore  # noqa: E402
from kvnet.engine.wire import ExportedEvent, FailedEvent, GeneratedEvent, Record  # noqa: E402
from kvnet.engine.wire_values import written_chunks  # noqa: E402
from kvnet.format.prefix import tokens_from_bytes  # noqa: E402
from tests.mlx import tinymodels  # noqa: E402


@dataclass
class Answer:
    """A finished completion."""

    tokens: list[int]
    reused: Reused
    held_tokens: int


@dataclass
class Running:
    """A completion on its way."""

    request: Request
    ended: "queue.SimpleQueue[Any]" = field(default_factory=queue.SimpleQueue)
    first: threading.Event = field(default_factory=threading.Event)
    reused: Reused | None = None
    held_tokens: int = 0

    def result(self) -> Answer:
        item = self.ended.get(timeout=120)
        if isinstance(item, Exception):
            raise item
        assert self.reused is not None
        return Answer(list(tokens_from_bytes(item.tokens)), self.reused, self.held_tokens)


class Bench:
    """A model with a lane, a decode thread and a shelf."""

    def __init__(self, model: Path, *, live_bytes: int = 1 << 30, limit_bytes: int = 8 << 30, wait_s: float = 60.0):
        self.loaded = load_folder(model, digests=DigestCache(None), blas=REPORT, memory_budget_bytes=limit_bytes)
        info = self.loaded.info
        self.shelf = Shelf(live_bytes)
        self.budget = Budget(
            weights_size_bytes=info.weights_size_bytes,
            cost=self.loaded.cost,
            window_tokens=info.window_tokens,
            limit_bytes=limit_bytes,
            live=self.shelf,
            live_bytes=live_bytes,
            wait_s=wait_s,
        )
        self.decode = DecodeThread(self.loaded.model, self.loaded.tokenizer)
        self.lane = Lane()
        self.runner = Runner(
            self.loaded,
            self.budget,
            self.decode,
            self.shelf,
            waiting=self.lane.shared_by_waiting,
            give_way=self.lane.give_way,
        )
        self.decode.start()
        self.lane.start()
        self._ids = iter(range(1, 1 << 30))

    def start(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int = 8,
        boundaries: tuple[Boundary, ...] = (),
        stable: int = 0,
        restore: RestorePlan | None = None,
        use_live: bool = True,
        keep_live: bool = True,
        on_started: Callable[[Running], None] = lambda _: None,
        on_token: Callable[[Running], None] = lambda _: None,
    ) -> Running:
        running: Running

        def send(event: Record) -> None:
            if isinstance(event, GeneratedEvent):
                running.ended.put(event)
            elif isinstance(event, FailedEvent):
                running.ended.put(RuntimeError(event.code, event.message))
            elif type(event).__name__ == "DeltaEvent":
                running.first.set()
                on_token(running)

        running = Running(Request(next(self._ids), send))
        asked = CompletionRequest(
            PromptKind.TEXT, b"{}", PreparedPrompt(tuple(tokens), boundaries, stable, 0), restore, use_live, keep_live
        )

        def started(reused: Reused) -> None:
            running.reused = reused
            on_started(running)

        def generation(ready: Prefilled) -> Generation:
            def finished(caches: list[Any], held: list[int]) -> int:
                running.held_tokens = ready.finished(caches, held)
                if running.request.cancelled:
                    running.ended.put(CancelledRequestError())
                return running.held_tokens

            return Generation(
                request=running.request,
                caches=ready.caches,
                tokens=ready.tokens,
                logits=ready.logits,
                max_tokens=max_tokens,
                restored_tokens=ready.reused.live_tokens + ready.reused.restored_tokens,
                restore_s=ready.reused.restore_s,
                prefill_s=ready.prefill_s,
                release=ready.release,
                finished=finished,
            )

        self.lane.submit(
            running.request,
            lambda: self.runner.complete(running.request, asked, max_tokens, started=started, generation=generation),
            tokens=tokens,
            failed=running.ended.put,
        )
        return running

    def complete(self, tokens: Sequence[int], **named: Any) -> Answer:
        return self.start(tokens, **named).result()

    def cold(self, tokens: Sequence[int], max_tokens: int = 8) -> list[int]:
        """What a plain generation answers."""
        ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        request = Request(
            next(self._ids), lambda e: ended.put(e) if isinstance(e, GeneratedEvent | FailedEvent) else None
        )
        self.lane.submit(
            request, lambda: self.runner.generate(request, GenerateRequest(list(tokens), None, max_tokens))
        )
        event = ended.get(timeout=120)
        assert isinstance(event, GeneratedEvent), event
        return list(tokens_from_bytes(event.tokens))

    def start_export(self, asked: ExportRequest) -> "queue.SimpleQueue[Any]":
        ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        request = Request(next(self._ids), lambda e: ended.put(e) if isinstance(e, ExportedEvent) else None)
        asked.pack_path.touch(mode=0o600)
        self.lane.submit(
            request,
            lambda: self.runner.export(request, asked),
            background=asked.background,
            tokens=asked.tokens,
            failed=ended.put,
        )
        return ended

    def export(self, tokens: Sequence[int], pack: Path, **named: Any) -> ExportedEvent:
        item = self.start_export(ExportRequest(list(tokens), named.pop("restore", None), pack, 0, **named)).get(
            timeout=120
        )
        if isinstance(item, Exception):
            raise item
        assert isinstance(item, ExportedEvent)
        return item

    def plan(self, tokens: Sequence[int], pack: Path, **named: Any) -> RestorePlan:
        from kvnet.engine.kv_state import Exported

        event = self.export(tokens, pack, **named)
        request = ExportRequest(list(tokens), None, pack, 0)
        exported = Exported(written_chunks(event.chunks), event.restored_tokens, event.prefilled_tokens, 0.0, 0.0)
        return scratch_restore(self.loaded.info, request, exported)


def refused(kind: type[Exception], action: Callable[[], Any]) -> str:
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")


def until(condition: Callable[[], bool]) -> None:
    """Waits for what another thread does."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.001)


def llama(folder: Path) -> Path:
    return tinymodels.write_model(folder / "llama")
