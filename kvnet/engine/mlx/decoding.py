"""The decode thread: every running generation takes its next token in the same batch.

It gets evaluated caches of a whole prompt with the logits after it, and owns them from then on. The batch is
mlx-lm's ``GenerationBatch``: what its ``BatchGenerator`` drives once prompts are done. Here the prefill lane does them.

Whoever is told of tokens takes them without blocking: one slow reader never holds up the others.
"""

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import mlx.core as mx
from mlx_lm.generate import GenerationBatch, StopSequences

from kvnet.engine.mlx.caches import as_batch, evaluate, unbatched
from kvnet.engine.mlx.generation import EventSink, Generation, Piece
from kvnet.engine.mlx.stopping import StopText
from kvnet.engine.mlx.unfilled import clear_cache
from kvnet.engine.wire_values import error_event
from kvnet.errors import EngineError

MAX_BATCH = 32
"""Sequences decoded together; mlx-lm's default. Others wait their turn."""

CLEAR_EVERY_STEPS = 512
"""Decode steps after which MLX's free buffers are given back, as mlx-lm does."""


class DecodeThread:
    """Runs generations until the process ends.

    Args:
        model: the loaded model; its weights are evaluated.
        tokenizer: mlx-lm's wrapper: end tokens and a streaming detokenizer per sequence.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._stop = StopSequences([[token] for token in sorted(int(t) for t in tokenizer.eos_token_ids)])
        self._arrivals: queue.SimpleQueue[Generation] = queue.SimpleQueue()
        self._waiting: list[Generation] = []
        self._running: dict[int, Generation] = {}
        self._batch = self._empty_batch()
        self._next_uid = 0
        self._steps = 0
        # A daemon: an MLX thread that ends, or is joined, while the interpreter exits aborts the process.
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, generation: Generation) -> None:
        """Hands a sequence over; its caches belong to this thread from here on."""
        self._arrivals.put(generation)

    def _run(self) -> None:
        while True:
            self._collect()
            try:
                self._drop_cancelled()
                self._admit()
                if self._running:
                    self._step()
            except Exception as error:  # noqa: BLE001 - what runs fails together, the thread lives on
                self._fail_all(error)

    def _collect(self) -> None:
        # With nothing to decode the thread sleeps until something comes.
        if not self._running and not self._waiting:
            self._waiting.append(self._arrivals.get())
        while not self._arrivals.empty():
            self._waiting.append(self._arrivals.get())

    def _admit(self) -> None:
        while self._waiting and len(self._running) < MAX_BATCH:
            generation = self._waiting.pop(0)
            try:
                batch = self._join(generation)
            except Exception as error:  # noqa: BLE001 - one bad sequence harms no other
                self._fail(generation, error)
                continue
            if batch is not None:
                self._running[batch.uids[0]] = generation
                self._batch.extend(batch)

    def _join(self, generation: Generation) -> Any:
        """Chooses the first new token and tells it at once; a batch to go on with, or ``None``.

        The batch itself would tell the first token only after the second forward pass was under way.
        """
        generation.sink = generation.sink or EventSink(generation.request)
        batch = self._batch_of(generation)
        [first] = batch._next_tokens.tolist()
        generation.ttft_s = time.monotonic() - generation.request.accepted_s
        generation.sink.first(generation.ttft_s)
        stopped = (generation.stop or self._stop).matcher().advance(first)
        reason = "stop" if stopped else "length" if generation.max_tokens == 1 else None
        ended = self._tell(generation, int(first), batch._next_logprobs[0], reason)
        if ended is not None:
            self._finish(generation, ended, unbatched(batch.prompt_cache), batch.tokens[0])
            return None
        batch.uids[0], self._next_uid = self._next_uid, self._next_uid + 1
        return batch

    def _batch_of(self, generation: Generation) -> Any:
        sampler = generation.sampler or _greedy
        # The batch begins with a forward pass over the last token; here it has been made.
        batch = GenerationBatch(
            _Fed(_set(generation.logits)),
            [0],
            mx.array([generation.tokens[-1]]),
            as_batch(generation.caches),
            [generation.tokens[:-1]],
            [sampler],
            _greedy,
            [list(generation.processors)],
            [generation.stop or self._stop],
            [generation.max_tokens],
        )
        batch.model = self._model
        generation.caches, generation.logits = [], None
        generation.detokenizer = self._tokenizer.detokenizer
        generation.stop_text = StopText(generation.stop_texts)
        return batch

    def _step(self) -> None:
        # Of a batch of one the rows are taken as they are: extracting them would copy the longest conversation.
        alone = list(self._batch.prompt_cache) if len(self._running) == 1 else None
        for response in self._batch.next():
            generation = self._running[response.uid]
            try:
                if failure := generation.failure():
                    raise failure
                self._take(generation, response, alone)
            except Exception as error:  # noqa: BLE001 - one sequence harms no other
                self._remove({response.uid})
                self._fail(generation, error)
        self._steps += 1
        if self._steps % CLEAR_EVERY_STEPS == 0:
            clear_cache()

    def _take(self, generation: Generation, response: Any, alone: list[Any] | None) -> None:
        if not generation.joined:
            # The first token was told when the sequence joined.
            generation.joined = True
            return
        reason = self._tell(generation, int(response.token), response.logprobs, response.finish_reason)
        if reason is None:
            return
        if response.finish_reason is None:
            caches, held = self._extract(response.uid)
            self._remove({response.uid})
        else:
            held = response.all_tokens
            caches = response.prompt_cache if alone is None else unbatched(alone)
            del self._running[response.uid]
        self._finish(generation, reason, caches, held)

    def _tell(self, generation: Generation, token: int, logprobs: mx.array, reason: str | None) -> str | None:
        """Tells one token; returns why the answer ends with it, if it does."""
        detokenizer, stop_text, sink = generation.detokenizer, generation.stop_text, _set(generation.sink)
        if reason != "stop":
            generation.made.append(token)
            detokenizer.add_token(token)
        if reason is not None:
            detokenizer.finalize()
        text = detokenizer.last_segment
        if reason != "stop" and (cut := _set(stop_text).cut(text)) is not None:
            # The handler goes on from its text alone: an end without a reason is a stop, with all of the text before.
            text, reason, told = text[:cut], "stop", None
        else:
            told = reason
        logprob = _number(logprobs[token]) if generation.logprobs else 0.0
        sink.told(Piece(text, token, logprob, told, self._likeliest(generation, logprobs)))
        return reason

    def _likeliest(self, generation: Generation, logprobs: mx.array) -> tuple[dict[str, Any], ...]:
        # As mlx-lm's server tells them.
        if generation.top_logprobs <= 0:
            return ()
        places = mx.argpartition(-logprobs, kth=generation.top_logprobs - 1)[: generation.top_logprobs]
        tokens: Any = places.tolist()
        values: Any = logprobs[places].tolist()
        names = self._tokenizer.convert_ids_to_tokens(tokens)
        return tuple(
            {"id": token, "token": name, "logprob": value}
            for token, name, value in zip(tokens, names, values, strict=True)
        )

    def _finish(self, generation: Generation, reason: str, caches: list[Any], held: list[int]) -> None:
        generation.ended_s = time.monotonic()
        self._keep(generation, caches, held)
        generation.release()
        _set(generation.sink).ended(generation, reason)

    def _keep(self, generation: Generation, caches: list[Any], held: list[int]) -> None:
        if generation.finished is None:
            return
        # Extracted rows are lazy, and lazy arrays belong to this thread.
        evaluate(caches)
        generation.held_tokens = generation.finished(caches, list(held))

    def _extract(self, uid: int) -> tuple[list[Any], list[int]]:
        place = self._batch.uids.index(uid)
        if len(self._running) == 1:
            return unbatched(self._batch.prompt_cache), self._batch.tokens[place]
        return self._batch.extract_cache(place), self._batch.tokens[place]

    def _drop_cancelled(self) -> None:
        for generation in [waiting for waiting in self._waiting if waiting.request.cancelled]:
            self._waiting.remove(generation)
            self._drop(generation, generation.caches, generation.tokens)
        gone = {uid: generation for uid, generation in self._running.items() if generation.request.cancelled}
        for uid, generation in gone.items():
            self._drop(generation, *(self._extract(uid) if generation.finished else ([], [])))
        if gone:
            self._remove(set(gone))

    def _drop(self, generation: Generation, caches: list[Any], held: list[int]) -> None:
        try:
            self._keep(generation, caches, held)
        except Exception as error:  # noqa: BLE001 - nobody waits for it, and no other sequence is to suffer
            generation.request.send(error_event(generation.request.id, error))
        generation.caches = []
        generation.release()

    def _remove(self, gone: set[int]) -> None:
        self._running = {uid: generation for uid, generation in self._running.items() if uid not in gone}
        if self._running:
            self._batch.filter([i for i, uid in enumerate(self._batch.uids) if uid not in gone])
        else:
            self._batch = self._empty_batch()

    def _fail(self, generation: Generation, error: Exception) -> None:
        generation.caches = []
        generation.release()
        generation.request.send(error_event(generation.request.id, error))

    def _fail_all(self, error: Exception) -> None:
        self._batch = self._empty_batch()
        running, self._running = self._running, {}
        for generation in running.values():
            self._fail(generation, error)

    def _empty_batch(self) -> Any:
        return GenerationBatch.empty(self._model, _greedy)


class _Fed:
    """Stands for the model where what it would compute is known: logits after tokens that the caches hold already."""

    def __init__(self, logits: mx.array) -> None:
        self._logits = logits

    def __call__(self, inputs: mx.array, cache: Sequence[Any]) -> mx.array:
        del inputs, cache
        return self._logits


T = TypeVar("T")


def _set(value: T | None) -> T:
    """What is set when a generation joins the batch."""
    if value is None:
        raise EngineError("the generation has not joined the batch")
    return value


def _number(value: Any) -> float:
    return float(value.item())


def _greedy(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)
