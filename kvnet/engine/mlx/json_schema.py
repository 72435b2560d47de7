"""``response_format``: an answer that must be JSON, or JSON of a schema, through llguidance.

llguidance says which tokens may come next; all others get a logit of minus infinity with ``mx.where``. Its own kernel
for MLX runs on Metal alone.
"""

import json
import threading
from collections.abc import Sequence
from typing import Any

import llguidance.hf
import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from kvnet.errors import EngineError

WHITESPACE = r"[ \n\r\t]{0,64}"
"""Between JSON tokens. Bounded: some models would indent for ever."""

_OBJECT = {"type": "object"}


class JsonGrammars:
    """Grammars over one model's tokens.

    Args:
        tokenizer: mlx-lm's wrapper.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._built: LLTokenizer | None = None

    def grammar_of(self, response_format: Any) -> str | None:
        """The grammar that ``response_format`` asks for; ``None`` when any text will do.

        Raises:
            ValueError: it is not a format, or its schema cannot be honoured; says why.
        """
        schema = _schema_of(response_format)
        if schema is None:
            return None
        try:
            grammar = LLMatcher.grammar_from_json_schema(
                json.dumps(schema), defaults={"whitespace_pattern": WHITESPACE}
            )
        except ValueError as error:
            raise ValueError(f"response_format: {_first_line(str(error))}") from None
        broken, words = LLMatcher.validate_grammar_with_warnings(grammar, self._tokens())
        if broken:
            raise ValueError(f"response_format: the schema cannot be honoured: {_first_line(words[0])}")
        return grammar

    def mask(self, grammar: str, *, after: Sequence[int] = ()) -> "JsonMask":
        """A mask for one answer; ``after`` are the tokens that end its reasoning, before which anything goes."""
        return JsonMask(LLMatcher(self._tokens(), grammar), after)

    def _tokens(self) -> LLTokenizer:
        # Takes most of a second for a large vocabulary, so once, and only when it is asked for.
        with self._lock:
            if self._built is None:
                self._built = llguidance.hf.from_tokenizer(
                    self._tokenizer._tokenizer, eos_token=sorted(int(token) for token in self._tokenizer.eos_token_ids)
                )
            return self._built


class JsonMask:
    """A logits processor of one answer. It never raises: what goes wrong is kept for ``failure``."""

    def __init__(self, matcher: LLMatcher, after: Sequence[int]) -> None:
        self._matcher = matcher
        self._after = list(after)
        self._recent: list[int] = []
        self._began = False
        self._failure: Exception | None = None

    def failure(self) -> Exception | None:
        """What went wrong; the answer is then not to be trusted."""
        return self._failure

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Logits (1, vocabulary) with forbidden tokens at minus infinity; ``tokens`` are those of prompt and answer."""
        if self._failure is not None:
            return logits
        try:
            return self._masked(tokens, logits)
        except Exception as error:  # noqa: BLE001 - the batch decodes other answers too
            self._failure = error
            return logits

    def _masked(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if not self._began:
            self._began = True
        elif not self._take(_number(tokens[-1])):
            return logits
        if self._after:
            return logits
        # Once the JSON is complete this allows the end alone.
        allowed = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        mask = np.zeros(logits.shape[-1], np.bool_)
        mask[: len(allowed)] = allowed[: len(mask)]
        return mx.where(mx.array(mask), logits, mx.array(-mx.inf, logits.dtype))

    def _take(self, token: int) -> bool:
        """Follows the answer by a token; returns whether a mask makes sense now."""
        if self._after:
            self._recent = [*self._recent, token][-len(self._after) :]
            if self._recent == self._after:
                self._after = []
            return not self._after
        if not self._matcher.is_stopped() and not self._matcher.consume_token(token):
            raise EngineError(f"the answer left its JSON grammar: {_first_line(self._matcher.get_error())}")
        return True


def _number(value: Any) -> int:
    return int(value.item())


def _schema_of(response_format: Any) -> Any:
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return _OBJECT
    if kind == "json_schema":
        named = response_format.get("json_schema")
        schema = named.get("schema") if isinstance(named, dict) else None
        if isinstance(schema, dict | bool):
            return schema
        raise ValueError("response_format: expected a JSON schema in json_schema.schema")
    raise ValueError("response_format: expected a type of text, json_object or json_schema")


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:300]
