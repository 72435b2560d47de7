"""The prefill lane: the one thread that loads, restores, prefills, exports and probes, one request after another.

It hands generations over to the decode thread with evaluated caches and exactly one token left to feed.
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvnet.engine.interface import ExportRequest, GenerateRequest, LogitsRequest, RestorePlan
from kvnet.engine.mlx.budget import Budget
from kvnet.engine.mlx.caches import evaluate
from kvnet.engine.mlx.decoding import DecodeThread, Generation
from kvnet.engine.mlx.exporting import TileWriter
from kvnet.engine.mlx.loader import LoadedModel
from kvnet.engine.mlx.prefill import last_logits, prefill, step_ends
from kvnet.engine.mlx.requests import CancelledRequestError, Request, microseconds
from kvnet.engine.mlx.restoring import restore
from kvnet.engine.wire import ExportedEvent, LogitsEvent, ProgressEvent, error_event, wire_chunks
from kvnet.errors import CompatibilityError, EngineError

Job = Callable[[], None]


@dataclass(slots=True)
class _State:
    """Caches and how they came to be."""

    caches: list[Any]
    restored_tokens: int
    restore_s: float
    prefill_s: float = 0.0


class Lane:
    """Runs jobs in order, in a thread that lives until the process ends."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Request, Job]] = queue.SimpleQueue()
        # A daemon: an MLX thread that ends, or is joined, while the interpreter exits aborts the process.
        self._thread = threading.Thread(target=self._run, name="prefill-lane", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, request: Request, job: Job) -> None:
        """Queues a job; an exception from it becomes the request's answer."""
        self._jobs.put((request, job))

    def _run(self) -> None:
        while True:
            request, job = self._jobs.get()
            try:
                request.raise_if_cancelled()
                job()
            except CancelledRequestError:
                continue
            except Exception as error:  # noqa: BLE001 - one request fails, the lane lives on
                request.send(error_event(request.id, error))


class Runner:
    """What the lane does for a loaded model.

    Args:
        loaded: the model.
        budget: admission.
        decode: where generations go after prefill.
    """

    def __init__(self, loaded: LoadedModel, budget: Budget, decode: DecodeThread) -> None:
        self._loaded = loaded
        self._model = loaded.model
        self._step = loaded.info.producer.prefill_step
        self._budget = budget
        self._decode = decode

    def generate(self, request: Request, asked: GenerateRequest) -> None:
        """Prefills all but the last token and hands over to the decode thread."""
        tokens = _checked(asked.tokens)
        if asked.max_tokens < 1:
            raise EngineError(f"expected max_tokens of at least 1, found {asked.max_tokens}")
        self._budget.check(len(tokens), asked.max_tokens)
        total = len(tokens) + asked.max_tokens
        release = self._take(request, total)
        try:
            state = self._start(request, asked.restore, limit=len(tokens) - 1, capacity=total)
            self._prefill(request, state, tokens, end=len(tokens) - 1, total=len(tokens))
        except BaseException:
            release()
            raise
        self._decode.submit(
            Generation(
                request=request,
                caches=state.caches,
                tokens=tokens,
                max_tokens=asked.max_tokens,
                restored_tokens=state.restored_tokens,
                restore_s=state.restore_s,
                prefill_s=state.prefill_s,
                release=release,
            )
        )

    def export(self, request: Request, asked: ExportRequest) -> None:
        """Prefills everything, writing tiles between the steps."""
        info = self._loaded.info
        if info.fingerprint is None:
            raise CompatibilityError(f"{info.name} cannot be exported: {info.refusal}")
        tokens = _checked(asked.tokens)
        self._budget.check(len(tokens))
        _check_first_block(asked)
        release = self._take(request, len(tokens))
        try:
            with TileWriter(asked, info.fingerprint.layers) as writer:
                state = self._start(request, asked.restore, limit=len(tokens), capacity=len(tokens))
                writer.write_complete(state.caches, state.restored_tokens)
                self._prefill(
                    request,
                    state,
                    tokens,
                    end=len(tokens),
                    total=len(tokens),
                    arrived=lambda done: writer.write_complete(state.caches, done),
                )
        finally:
            release()
        request.send(
            ExportedEvent(
                request.id,
                wire_chunks(writer.written),
                state.restored_tokens,
                len(tokens) - state.restored_tokens,
                microseconds(state.restore_s),
                microseconds(state.prefill_s),
            )
        )

    def logits(self, request: Request, asked: LogitsRequest) -> None:
        """Prefills all but the last token, feeds it, and answers with the logits."""
        tokens = _checked(asked.tokens)
        if asked.one_shot and asked.restore is not None:
            raise EngineError("logits of one step over the whole prompt leave nothing to restore")
        self._budget.check(len(tokens))
        release = self._take(request, len(tokens))
        try:
            state = self._start(request, asked.restore, limit=len(tokens) - 1, capacity=len(tokens))
            tail = tokens if asked.one_shot else tokens[-1:]
            if not asked.one_shot:
                self._prefill(
                    request,
                    state,
                    tokens,
                    end=len(tokens) - 1,
                    total=len(tokens),
                    stops=asked.stops,
                )
            positions = [int(getattr(cache, "offset", 0)) for cache in state.caches]
            logits: Any = last_logits(self._model, state.caches, tail)
            values = np.asarray(memoryview(logits))
        finally:
            release()
        request.send(LogitsEvent(request.id, values.astype("<f4").tobytes(), positions))

    def _take(self, request: Request, total: int) -> Callable[[], None]:
        if not self._budget.acquire(total, lambda: request.cancelled):
            raise CancelledRequestError
        return _once(lambda: self._budget.release(total))

    def _start(self, request: Request, plan: RestorePlan | None, *, limit: int, capacity: int) -> _State:
        """Fresh caches, or restored ones with at most ``limit`` tokens."""
        info = self._loaded.info
        if plan is None or limit == 0:
            return _State(self._loaded.new_caches(), 0, 0.0)
        if info.fingerprint is None:
            raise CompatibilityError(f"{info.name} cannot restore state: {info.refusal}")
        began = time.monotonic()
        n_tokens = min(plan.n_tokens, limit)
        caches = restore(
            RestorePlan(plan.manifest, n_tokens, plan.chunks),
            info.fingerprint,
            capacity_tokens=capacity,
            between=request.raise_if_cancelled,
        )
        return _State(caches, n_tokens, time.monotonic() - began)

    def _prefill(
        self,
        request: Request,
        state: _State,
        tokens: list[int],
        *,
        end: int,
        total: int,
        stops: tuple[int, ...] = (),
        arrived: Callable[[int], None] | None = None,
    ) -> None:
        began = time.monotonic()
        start = state.restored_tokens
        request.send(ProgressEvent(request.id, start, total))

        def between(position: int) -> None:
            if arrived is not None:
                arrived(position)
            request.send(ProgressEvent(request.id, position, total))
            request.raise_if_cancelled()

        ends = step_ends(start, end, self._step, stops)
        prefill(self._model, state.caches, tokens, start=start, ends=ends, between=between)
        if ends:
            evaluate(state.caches)
        state.prefill_s = time.monotonic() - began


def _once(action: Callable[[], None]) -> Callable[[], None]:
    """The action, done at the first call only."""
    done = threading.Lock()
    return lambda: action() if done.acquire(blocking=False) else None


def _checked(tokens: Any) -> list[int]:
    if not tokens:
        raise EngineError("expected at least one token, found none")
    return [int(token) for token in tokens]


def _check_first_block(asked: ExportRequest) -> None:
    restored = asked.restore.n_tokens if asked.restore is not None else 0
    if asked.first_block * 256 > restored:
        raise EngineError(
            f"blocks before {asked.first_block} are not to be written, but only {restored} tokens are restored"
        )
