"""The prefill lane: the one thread that loads, restores, prefills, exports and probes, one request after another.

It hands generations over to the decode thread with evaluated caches of the whole prompt and the logits after it.
Background exports run when nobody waits, and give way between two blocks.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvnet.engine.mlx.live import TokenArray, as_token_array, common_prefix
from kvnet.engine.mlx.requests import CancelledRequestError, Request
from kvnet.engine.mlx.running import Prefilled, Reused, Runner
from kvnet.engine.wire_values import error_event

__all__ = ["Lane", "Prefilled", "Reused", "Runner"]

Job = Callable[[], Iterator[None] | None]
"""Does its work at once, or returns an iterator that does a piece of it at each step."""

Failed = Callable[[Exception], None]
"""Told in the lane why a job ended early; ``CancelledRequestError`` when nobody wanted it any more."""


@dataclass(slots=True, eq=False)
class _Work:
    request: Request
    job: Job
    failed: Failed
    tokens: TokenArray | None
    steps: Iterator[None] | None = None

    def advance(self) -> bool:
        """One piece; whether there is more."""
        self.request.raise_if_cancelled()
        if self.steps is None:
            self.steps = self.job()
        return self.steps is not None and next(self.steps, self) is not self

    def close(self) -> None:
        """Frees what the work holds; it would start from its beginning."""
        steps, self.steps = self.steps, None
        if steps is not None:
            steps.close()  # type: ignore[attr-defined]  # jobs are generators


class Lane:
    """Runs jobs in order, in a thread that lives until the process ends."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[_Work] = deque()
        self._background: deque[_Work] = deque()
        # A daemon: an MLX thread that ends, or is joined, while the interpreter exits aborts the process.
        self._thread = threading.Thread(target=self._run, name="prefill-lane", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(
        self,
        request: Request,
        job: Job,
        *,
        background: bool = False,
        tokens: Sequence[int] | None = None,
        failed: Failed | None = None,
    ) -> None:
        """Queues a job.

        Args:
            request: who asked.
            job: the work.
            background: do it only while no other job waits, piece by piece.
            tokens: the prompt, so that a job before it leaves on the shelf what both begin with.
            failed: told of an exception from the job; by default it becomes the request's answer.
        """

        def answer(error: Exception) -> None:
            if not isinstance(error, CancelledRequestError):
                request.send(error_event(request.id, error))

        array = None if tokens is None else as_token_array(tokens)
        work = _Work(request, job, failed or answer, array)
        with self._changed:
            (self._background if background else self._waiting).append(work)
            self._changed.notify()

    def shared_by_waiting(self, tokens: Sequence[int]) -> int:
        """How many tokens the prompts and exports that wait have in common with this one, at most."""
        array = as_token_array(tokens)
        with self._changed:
            others = [work.tokens for work in (*self._waiting, *self._background) if work.tokens is not None]
        return max((common_prefix(array, other) for other in others), default=0)

    def give_way(self) -> None:
        """Stops background work and frees its memory; it starts anew later. For jobs in the lane only."""
        for work in self._background:
            work.close()

    def _run(self) -> None:
        while True:
            work, background = self._next()
            if background:
                self._one_piece(work)
            else:
                self._all_of(work)

    def _next(self) -> tuple[_Work, bool]:
        with self._changed:
            while not self._waiting and not self._background:
                self._changed.wait()
            return (self._waiting.popleft(), False) if self._waiting else (self._background[0], True)

    def _all_of(self, work: _Work) -> None:
        try:
            while work.advance():
                pass
        except Exception as error:  # noqa: BLE001 - one request fails, the lane lives on
            work.failed(error)
        finally:
            work.close()

    def _one_piece(self, work: _Work) -> None:
        try:
            if work.advance():
                return
        except Exception as error:  # noqa: BLE001 - one request fails, the lane lives on
            work.failed(error)
        work.close()
        with self._changed:
            self._background.remove(work)
