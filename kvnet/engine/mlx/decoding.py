"""The decode thread: every running generation takes its next token in the same batch.

It gets evaluated caches with exactly one token left to feed and owns them from then on. The batch is
mlx-lm's ``GenerationBatch``: what its ``BatchGenerator`` drives once prompts are done. Here the prefill lane does them.
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationBatch, StopSequences

from kvnet.engine.mlx.caches import as_batch
from kvnet.engine.mlx.requests import Request, microseconds
from kvnet.engine.wire import DeltaEvent, FirstTokenEvent, GeneratedEvent, error_event, text_bytes
from kvnet.format.prefix import tokens_to_bytes

MAX_BATCH = 32
"""Sequences decoded together; mlx-lm's default. Others wait their turn."""

CLEAR_EVERY_STEPS = 512
"""Decode steps after which MLX's free buffers are given back, as mlx-lm does."""


@dataclass(slots=True)
class Generation:
    """One sequence handed over for decoding.

    Attributes:
        request: who asked.
        caches: evaluated caches holding all of the prompt but its last token.
        tokens: the whole prompt.
        max_tokens: how many tokens to make at most; at least 1.
        restored_tokens: prompt tokens restored; the rest was prefilled.
        restore_s: seconds spent restoring.
        prefill_s: seconds spent in prefill.
        release: called once when the memory is free again.
    """

    request: Request
    caches: list[Any]
    tokens: list[int]
    max_tokens: int
    restored_tokens: int
    restore_s: float
    prefill_s: float
    release: Callable[[], None]
    detokenizer: Any = None
    made: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    ttft_s: float = 0.0


class DecodeThread:
    """Runs generations until the process ends.

    Args:
        model: the loaded model; its weights are evaluated.
        tokenizer: mlx-lm's wrapper: end tokens and a streaming detokenizer per sequence.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._stop = StopSequences([[int(token)] for token in sorted(tokenizer.eos_token_ids)])
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
            self._drop_cancelled()
            self._admit()
            if self._running:
                self._step()

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
                self._batch.extend(self._batch_of(generation))
            except Exception as error:  # noqa: BLE001 - one bad sequence must not end the thread
                self._fail(generation, error)

    def _batch_of(self, generation: Generation) -> Any:
        uid, self._next_uid = self._next_uid, self._next_uid + 1
        batch = GenerationBatch(
            self._model,
            [uid],
            mx.array([generation.tokens[-1]]),
            as_batch(generation.caches),
            [generation.tokens[:-1]],
            [_greedy],
            _greedy,
            [[]],
            [self._stop],
            [generation.max_tokens],
        )
        generation.caches = []
        generation.detokenizer = self._tokenizer.detokenizer
        self._running[uid] = generation
        return batch

    def _step(self) -> None:
        try:
            responses = self._batch.next()
        except Exception as error:  # noqa: BLE001 - the requests fail, the thread lives on
            self._batch = self._empty_batch()
            running, self._running = self._running, {}
            for generation in running.values():
                self._fail(generation, error)
            return
        for response in responses:
            self._take(response)
        self._steps += 1
        if self._steps % CLEAR_EVERY_STEPS == 0:
            mx.clear_cache()

    def _take(self, response: Any) -> None:
        generation = self._running[response.uid]
        send, request_id = generation.request.send, generation.request.id
        if not generation.ttft_s:
            generation.ttft_s = time.monotonic() - generation.request.accepted_s
            send(FirstTokenEvent(request_id, microseconds(generation.ttft_s)))
        ended = response.finish_reason == "stop"
        if not ended:
            generation.made.append(int(response.token))
            generation.detokenizer.add_token(int(response.token))
        if response.finish_reason is not None:
            generation.detokenizer.finalize()
        if text := generation.detokenizer.last_segment:
            generation.text.append(text)
        if text or not ended:
            send(DeltaEvent(request_id, text_bytes(text), int(response.token)))
        if response.finish_reason is not None:
            self._finish(response.uid, response.finish_reason)

    def _finish(self, uid: int, reason: str) -> None:
        generation = self._running.pop(uid)
        generation.release()
        generation.request.send(
            GeneratedEvent(
                id=generation.request.id,
                text=text_bytes("".join(generation.text)),
                tokens=tokens_to_bytes(generation.made),
                finish_reason=reason,
                ttft_us=microseconds(generation.ttft_s),
                restored_tokens=generation.restored_tokens,
                prefilled_tokens=len(generation.tokens) - generation.restored_tokens,
                restore_us=microseconds(generation.restore_s),
                prefill_us=microseconds(generation.prefill_s),
            )
        )

    def _drop_cancelled(self) -> None:
        for generation in [waiting for waiting in self._waiting if waiting.request.cancelled]:
            self._waiting.remove(generation)
            generation.release()
        gone = {uid for uid, generation in self._running.items() if generation.request.cancelled}
        if gone:
            self._batch.filter([i for i, uid in enumerate(self._batch.uids) if uid not in gone])
            for uid in gone:
                self._running.pop(uid).release()
            if not self._running:
                self._batch = self._empty_batch()

    def _fail(self, generation: Generation, error: Exception) -> None:
        self._running = {uid: other for uid, other in self._running.items() if other is not generation}
        generation.caches = []
        generation.release()
        generation.request.send(error_event(generation.request.id, error))

    def _empty_batch(self) -> Any:
        return GenerationBatch.empty(self._model, _greedy)


def _greedy(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)
