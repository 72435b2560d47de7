"""What the lane does for a loaded model: completions, generations, exports, logits."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from kvnet.engine.completions import CompletionRequest
from kvnet.engine.generations import GenerateRequest, LogitsRequest
from kvnet.engine.kv_state import ExportRequest
from kvnet.engine.mlx.budget import Budget
from kvnet.engine.mlx.caches import evaluate
from kvnet.engine.mlx.decoding import DecodeThread
from kvnet.engine.mlx.exporting import TileWriter, sampled_rows
from kvnet.engine.mlx.generation import Generation
from kvnet.engine.mlx.live import Shelf, cuttable
from kvnet.engine.mlx.loader import LoadedModel
from kvnet.engine.mlx.prefill import last_logits, prefill, prompt_step_ends, step_ends
from kvnet.engine.mlx.requests import Request, microseconds
from kvnet.engine.mlx.states import State, States, Wish
from kvnet.engine.prompts import Boundary, BoundaryKind, PreparedPrompt
from kvnet.engine.wire import ExportedEvent, LogitsEvent, ProgressEvent, SampleEvent, WireOrigin
from kvnet.engine.wire_values import wire_chunks
from kvnet.errors import BusyError, CompatibilityError, EngineError
from kvnet.format.sample import SAMPLE_STEP, SAMPLE_TOKENS, SAMPLE_VERSION, Sample, sample_tokens

NEWEST_MESSAGES = 2
"""Ends of messages at which layers that cannot be cut are kept, from the last one back."""


@dataclass(frozen=True, slots=True)
class Reused:
    """What a completion starts from: tokens of a live cache or of the restore plan, and how long it took."""

    live_tokens: int
    restored_tokens: int
    restore_s: float


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt ready for the decode thread.

    Attributes:
        caches: evaluated, holding the whole prompt; given up to the generation.
        tokens: the whole prompt.
        logits: after its last token, (1, 1, vocabulary), evaluated.
        reused: what it started from.
        prefill_s: seconds of prefill.
        release: gives the memory back; called once at the end, in any case.
        finished: takes caches and the tokens they hold, at the end or when given up; how many tokens are kept live.
    """

    caches: list[Any]
    tokens: list[int]
    logits: mx.array
    reused: Reused
    prefill_s: float
    release: Callable[[], None]
    finished: Callable[[list[Any], list[int]], int]


class Runner:
    """What the lane does for a loaded model.

    Args:
        loaded: the model.
        budget: admission.
        decode: where generations go after prefill.
        shelf: live caches; none by default.
        waiting: how many tokens of a prompt the requests that wait share with it, ``Lane.shared_by_waiting``.
        give_way: frees the memory of background work, ``Lane.give_way``.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        budget: Budget,
        decode: DecodeThread,
        shelf: Shelf | None = None,
        *,
        waiting: Callable[[Sequence[int]], int] = lambda _: 0,
        give_way: Callable[[], None] = lambda: None,
    ) -> None:
        self._loaded = loaded
        self._model = loaded.model
        self._step = loaded.info.producer.prefill_step
        self._budget = budget
        self._decode = decode
        self._states = States(loaded, budget, shelf or Shelf(0), waiting=waiting, give_way=give_way)

    def complete(
        self,
        request: Request,
        asked: CompletionRequest,
        max_tokens: int,
        *,
        started: Callable[[Reused], None],
        generation: Callable[[Prefilled], Generation],
    ) -> None:
        """Prefills the prompt, from the longest of live cache and restore plan, and hands over.

        Args:
            request: who asked.
            asked: prompt, plan, and what live caches are to be used and kept.
            max_tokens: length of the answer at most; at least 1.
            started: called before prefill, once what can be reused is in place.
            generation: makes what the decode thread runs.

        Raises:
            OverBudgetError: it could never run.
            BusyError: it waited for memory too long.
            CompatibilityError, IntegrityError, EngineError: as ``restore``; all of them before ``started``.
        """
        tokens = self._checked(asked.prompt.tokens, max_tokens)
        wish = Wish(tokens, asked.restore, len(tokens) - 1, max_tokens, asked.use_live, asked.keep_live)
        state = self._states.begin(request, wish)
        try:
            reused = Reused(state.live_tokens, state.restored_tokens, state.restore_s)
            started(reused)
            ends_at = () if cuttable(state.caches) else _points(asked.prompt)
            logits = self._prefill(request, state, tokens, stops=ends_at)
            if asked.keep_live:
                self._states.keep_system(state, tokens, _system_tokens(asked.prompt.boundaries))
            prefilled = Prefilled(
                caches=state.caches,
                tokens=tokens,
                logits=logits,
                reused=reused,
                prefill_s=state.prefill_s,
                release=state.release,
                finished=self._keeper(state, keep=asked.keep_live),
            )
            ready = generation(prefilled)
        except BaseException as error:
            self._states.abandon(state, tokens, keep=asked.keep_live, error=error)
            raise
        state.caches = []
        self._decode.submit(ready)

    def _keeper(self, state: State, *, keep: bool) -> Callable[[list[Any], list[int]], int]:
        def finished(caches: list[Any], tokens: list[int]) -> int:
            return self._states.keep(state, caches, tokens) if keep and tokens else 0

        return finished

    def generate(self, request: Request, asked: GenerateRequest) -> None:
        """Prefills the prompt and hands over to the decode thread.

        Raises:
            KvnetError: as `complete`.
        """
        tokens = self._checked(asked.tokens, asked.max_tokens)
        state = self._states.begin(request, Wish(tokens, asked.restore, len(tokens) - 1, asked.max_tokens))
        try:
            logits = self._prefill(request, state, tokens)
        except BaseException:
            state.release()
            raise
        self._decode.submit(
            Generation(
                request=request,
                caches=state.caches,
                tokens=tokens,
                logits=logits,
                max_tokens=asked.max_tokens,
                restored_tokens=state.restored_tokens,
                restore_s=state.restore_s,
                prefill_s=state.prefill_s,
                release=state.release,
            )
        )

    def export(self, request: Request, asked: ExportRequest) -> Iterator[None]:
        """Computes what is missing and writes tiles; a piece at each step, then tells of the result.

        Raises:
            CompatibilityError: this model's K/V cannot be exported, or the state to restore is not for it.
            NoLiveStateError: something would have to be computed, against what was asked.
            EngineError: values that are not finite, or blocks left out that nothing covers.
            StoreError: the pack cannot be written.
            KvnetError: as `complete`.
        """
        info = self._loaded.info
        if info.fingerprint is None:
            raise CompatibilityError(f"{info.name} cannot be exported: {info.refusal}")
        tokens = self._checked(asked.tokens)
        _check_first_block(asked)
        wish = Wish(tokens, asked.restore, len(tokens), use_live=True, read_only=True, compute=asked.prefill)
        state = self._states.begin(request, wish)
        try:
            with TileWriter(asked, info.fingerprint.layers) as writer:
                n_told = _tell_written(request, state, writer, 0, _origins(state, asked))
                while writer.write_next(state.caches, state.position):
                    yield
                for _ in self._prefill_steps(state, tokens, step_ends(state.position, len(tokens), self._step)):
                    while writer.write_next(state.caches, state.position):
                        yield
                    n_told = _tell_written(request, state, writer, n_told)
                    yield
        finally:
            state.caches = []
            state.release()
        request.send(
            ExportedEvent(
                request.id,
                wire_chunks(writer.written),
                state.reused_tokens,
                len(tokens) - state.reused_tokens,
                microseconds(state.restore_s),
                microseconds(state.prefill_s),
                _origins(state, asked),
            )
        )

    def sample(self, request: Request) -> Iterator[None]:
        """Computes the model's sample, a short step at a time, in memory that nobody else wants.

        Raises:
            CompatibilityError: this model's K/V cannot be shared, or a sample of it would be too large.
            BusyError: there is no room for it just now.
            OverBudgetError: there never is.
            EngineError: values that are not finite.
        """
        info = self._loaded.info
        if info.fingerprint is None:
            raise CompatibilityError(f"{info.name} has no sample: {info.refusal}")
        self._budget.check(SAMPLE_TOKENS)
        if not self._budget.acquire_spare(SAMPLE_TOKENS):
            raise BusyError("there is no room for a sample beside what runs and is kept", hint="try again later")
        try:
            caches = self._loaded.new_caches()
            tokens = sample_tokens(self._loaded.vocabulary)
            for stop in range(SAMPLE_STEP, SAMPLE_TOKENS + 1, SAMPLE_STEP):
                prefill(self._model, caches, tokens, start=stop - SAMPLE_STEP, ends=[stop], between=lambda _: None)
                yield
            rows = sampled_rows(info.fingerprint.layers, caches)
        finally:
            caches = []
            self._budget.release(SAMPLE_TOKENS)
        sample = Sample(
            version=SAMPLE_VERSION,
            fingerprint=info.fingerprint.hash,
            producer=info.producer,
            vocabulary=self._loaded.vocabulary,
            rows=rows,
        )
        request.send(SampleEvent(request.id, sample.encode()))

    def logits(self, request: Request, asked: LogitsRequest) -> None:
        """Prefills the prompt as a generation does, and answers with the logits after its last token.

        Raises:
            EngineError: one step over the whole prompt was asked for together with state to restore.
            KvnetError: as `complete`.
        """
        tokens = self._checked(asked.tokens)
        if asked.one_shot and asked.restore is not None:
            raise EngineError("logits of one step over the whole prompt leave nothing to restore")
        state = self._states.begin(request, Wish(tokens, asked.restore, len(tokens) - 1))
        try:
            if asked.one_shot:
                logits = last_logits(self._model, state.caches, tokens)
            else:
                logits = self._prefill(request, state, tokens, stops=asked.stops)
            positions = [int(getattr(cache, "offset", 1)) - 1 for cache in state.caches]
            row: Any = logits[0, 0, :].astype(mx.float32)
            mx.eval(row)
            values = np.asarray(memoryview(row))
        finally:
            state.release()
        request.send(LogitsEvent(request.id, values.astype("<f4").tobytes(), positions))

    def _checked(self, asked: Any, max_tokens: int | None = None) -> list[int]:
        if not asked:
            raise EngineError("expected at least one token, found none")
        if max_tokens is not None and max_tokens < 1:
            raise EngineError(f"expected max_tokens of at least 1, found {max_tokens}")
        self._budget.check(len(asked), max_tokens or 0)
        return [int(token) for token in asked]

    def _prefill(self, request: Request, state: State, tokens: list[int], *, stops: tuple[int, ...] = ()) -> mx.array:
        """Feeds the rest of a prompt; the logits after its last token, (1, 1, vocabulary), evaluated."""
        request.send(ProgressEvent(request.id, state.position, len(tokens)))
        ends = prompt_step_ends(state.position, len(tokens), self._step, stops)
        for _ in self._prefill_steps(state, tokens, ends, stops):
            request.send(ProgressEvent(request.id, state.position, len(tokens)))
            request.raise_if_cancelled()
        began = time.monotonic()
        logits = last_logits(self._model, state.caches, tokens[state.position :])
        self._states.mark(state, len(tokens), point=False)
        state.prefill_s += time.monotonic() - began
        return logits

    def _prefill_steps(
        self, state: State, tokens: list[int], ends: Sequence[int], stops: Sequence[int] = ()
    ) -> Iterator[None]:
        """Feeds tokens in steps that end where they are to."""
        for end in ends:
            began = time.monotonic()
            prefill(self._model, state.caches, tokens, start=state.position, ends=[end], between=lambda _: None)
            evaluate(state.caches)
            self._states.mark(state, end, point=end in stops)
            state.prefill_s += time.monotonic() - began
            yield


def _tell_written(
    request: Request, state: State, writer: TileWriter, n_told: int, origins: Sequence[WireOrigin] = ()
) -> int:
    """Says how far an export is, and which tiles lie in the pack beyond the first ``n_told``; how many are told now."""
    written = writer.written[n_told:]
    request.send(ProgressEvent(request.id, state.position, writer.n_tokens, wire_chunks(written), list(origins)))
    return n_told + len(written)


def _origins(state: State, asked: ExportRequest) -> list[WireOrigin]:
    """Artifacts behind a live cache; the plan's own is known to whoever asked."""
    planned = asked.restore.manifest if asked.restore is not None else b""
    origins = state.origins if state.live_tokens else ()
    return [WireOrigin(origin.manifest, origin.n_tokens) for origin in origins if origin.manifest != planned]


def _points(prompt: PreparedPrompt) -> tuple[int, ...]:
    """Where layers that cannot be cut are kept: system, tools, marks, the newest messages, the stable end."""
    messages = [b.n_tokens for b in prompt.boundaries if b.kind == BoundaryKind.MESSAGE]
    others = [b.n_tokens for b in prompt.boundaries if b.kind != BoundaryKind.MESSAGE]
    return tuple(sorted({*others, *messages[-NEWEST_MESSAGES:], prompt.stable_tokens} - {0}))


def _system_tokens(boundaries: Sequence[Boundary]) -> int:
    kinds = (BoundaryKind.SYSTEM, BoundaryKind.TOOLS)
    return max((b.n_tokens for b in boundaries if b.kind in kinds), default=0)


def _check_first_block(asked: ExportRequest) -> None:
    restored = asked.restore.n_tokens if asked.restore is not None else 0
    if asked.first_block * 256 > restored:
        raise EngineError(
            f"blocks before {asked.first_block} are not to be written, but only {restored} tokens are restored"
        )
