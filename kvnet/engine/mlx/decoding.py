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
    joined: bool = False


class DecodeThread:
    """Runs generations until the process ends.

    Args:
        model: the loaded model; its weights are evaluated.
        tokenizer: mlx-lm's wrapper: end tokens and a streaming detokenizer per sequence.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._end_tokens = frozenset(int(token) for token in tokenizer.eos_token_ids)
        self._stop = StopSequences([[token] for token in sorted(self._end_tokens)])
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
        """Feeds the last prompt token and tells the first new one at once; a batch to go on with, or ``None``.

        The batch itself would tell the first token only after the second forward pass was under way.
        """
        batch = self._batch_of(generation)
        [first] = batch._next_tokens.tolist()
        generation.ttft_s = time.monotonic() - generation.request.accepted_s
        generation.request.send(FirstTokenEvent(generation.request.id, microseconds(generation.ttft_s)))
        ended = "stop" if first in self._end_tokens else "length" if generation.max_tokens == 1 else ""
        if ended != "stop":
            self._tell(generation, int(first), last=bool(ended))
        if ended:
            self._finish(generation, ended)
            return None
        batch.uids[0], self._next_uid = self._next_uid, self._next_uid + 1
        return batch

    def _batch_of(self, generation: Generation) -> Any:
        batch = GenerationBatch(
            self._model,
            [0],
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
        return batch

    def _step(self) -> None:
        for response in self._batch.next():
            generation = self._running[response.uid]
            try:
                self._take(generation, response)
            except Exception as error:  # noqa: BLE001 - text of one sequence harms no other
                self._remove({response.uid})
                self._fail(generation, error)
        self._steps += 1
        if self._steps % CLEAR_EVERY_STEPS == 0:
            mx.clear_cache()

    def _take(self, generation: Generation, response: Any) -> None:
        if not generation.joined:
            # The first token was told when the sequence joined.
            generation.joined = True
            return
        reason = response.finish_reason
        if reason != "stop":
            self._tell(generation, int(response.token), last=reason is not None)
        if reason is not None:
            del self._running[response.uid]
            self._finish(generation, reason)

    def _tell(self, generation: Generation, token: int, *, last: bool) -> None:
        generation.made.append(token)
        generation.detokenizer.add_token(token)
        if last:
            generation.detokenizer.finalize()
        text = generation.detokenizer.last_segment
        generation.text.append(text)
        generation.request.send(DeltaEvent(generation.request.id, text_bytes(text), token))

    def _finish(self, generation: Generation, reason: str) -> None:
        if reason == "stop":
            # What was held back waiting for the rest of a character belongs to the last token told.
            generation.detokenizer.finalize()
            if (rest := generation.detokenizer.last_segment) and generation.made:
                generation.text.append(rest)
                generation.request.send(DeltaEvent(generation.request.id, text_bytes(rest), generation.made[-1]))
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
        gone = {uid: generation for uid, generation in self._running.items() if generation.request.cancelled}
        if gone:
            self._remove(set(gone))
            for generation in gone.values():
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


def _greedy(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)
