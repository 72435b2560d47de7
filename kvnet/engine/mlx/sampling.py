"""How an answer's tokens are chosen: mlx-lm's samplers and penalties, a random stream per seed, and a JSON mask.

mlx-lm seeds the random state of its thread and therefore serves a request with a seed alone. Here such a request
draws from a key of its own, split as mlx-lm's random state splits its key: the same seed gives the same answer in any
batch, and other requests neither disturb it nor are disturbed.
"""

import secrets
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p
from mlx_lm.server import _make_logits_processors, _make_sampler

Sample = Callable[[mx.array], mx.array]
"""Log probabilities (1, vocabulary) to a token (1,)."""


def make_sampler(arguments: Any, tokenizer: Any) -> Sample | None:
    """The sampler of a request; ``None`` for the likeliest token, which the whole batch shares.

    Args:
        arguments: mlx-lm's ``GenerationArguments``.
        tokenizer: mlx-lm's wrapper.
    """
    if arguments.sampling.temperature == 0:
        return None
    return _Sampler(arguments, tokenizer)


def make_processors(arguments: Any) -> list[Any]:
    """Bias and penalties of a request, in mlx-lm's order."""
    return list(_make_logits_processors(arguments))


class _Sampler:
    """Builds its chain at the first call, when the size of the vocabulary is known, in the decode thread."""

    def __init__(self, arguments: Any, tokenizer: Any) -> None:
        self._arguments = arguments
        self._tokenizer = tokenizer
        self._sample: Sample | None = None

    def __call__(self, logprobs: mx.array) -> mx.array:
        try:
            return self._drawn(logprobs)
        except BaseException:
            # A failure inside a function that mlx-lm compiles leaves a tracer as the random state of this thread, and
            # every later draw of every request would fail with it.
            mx.random.seed(secrets.randbits(64))
            raise

    def _drawn(self, logprobs: mx.array) -> mx.array:
        if self._sample is None:
            asked = self._arguments
            if asked.sampling.top_k >= logprobs.shape[-1]:
                # No restriction; mlx-lm raises, and its generation thread ends.
                asked.sampling.top_k = 0
            if asked.seed is None:
                self._sample = _make_sampler(asked, self._tokenizer)
            else:
                self._sample = SeededSampler(asked.sampling, asked.seed, _spared(self._tokenizer))
        return self._sample(logprobs)


class SeededSampler:
    """mlx-lm's sampler with a random stream of its own.

    Args:
        sampling: mlx-lm's ``SamplingArguments``, with a temperature above 0.
        seed: any integer; taken modulo 2**64.
        spared: token ids that XTC never removes.
    """

    def __init__(self, sampling: Any, seed: int, spared: list[int]) -> None:
        self._sampling = sampling
        self._spared = spared
        self._key = mx.random.key(seed % (1 << 64))

    def __call__(self, logprobs: mx.array) -> mx.array:
        """The next token; the order of steps and of draws is mlx-lm's."""
        asked = self._sampling
        if 0 < asked.top_p < 1.0:
            logprobs = apply_top_p(logprobs, asked.top_p)
        if asked.min_p != 0.0:
            logprobs = apply_min_p(logprobs, asked.min_p, 1)
        if asked.xtc_probability > 0.0:
            logprobs = self._xtc(logprobs)
        if asked.top_k > 0:
            logprobs = apply_top_k(logprobs, asked.top_k)
        return _categorical(logprobs, self._next_key(), asked.temperature)

    def _next_key(self) -> mx.array:
        kept, drawn = mx.random.split(self._key)
        self._key = kept
        return drawn

    def _xtc(self, logits: mx.array) -> mx.array:
        asked = self._sampling
        probabilities = mx.softmax(logits, -1)
        likely = mx.where(probabilities > asked.xtc_threshold, probabilities, mx.inf)
        removed = probabilities > likely.min(axis=-1, keepdims=True)
        if self._spared:
            removed[..., mx.array(self._spared)] = False
        happens = mx.random.uniform(0, 1, key=self._next_key()) <= asked.xtc_probability
        return mx.where(happens, mx.where(removed, -mx.inf, logits), logits)


@mx.compile
def _categorical(logits: mx.array, key: mx.array, temperature: float) -> mx.array:
    return mx.random.categorical(logits * (1.0 / temperature), key=key)


def _spared(tokenizer: Any) -> list[int]:
    return [int(token) for token in [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]]
