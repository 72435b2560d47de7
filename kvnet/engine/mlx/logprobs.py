"""Log probabilities in OpenAI's form; mlx-lm's server tells ids and the tokenizer's own spelling instead."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToldTokens:
    """The tokens of an answer as mlx-lm's handler has them.

    Attributes:
        ids: the token ids made.
        logprobs: their log probabilities; empty when they were not asked for.
        tops: for each, the likeliest tokens with ``id`` and ``logprob``; empty when none were asked for.
    """

    ids: Sequence[int]
    logprobs: Sequence[float]
    tops: Sequence[Sequence[JsonObject]]


def chat_logprobs(told: ToldTokens, tokenizer: Any) -> JsonObject:
    """``logprobs`` of a chat completion: each token made, with the likeliest in its place, the likeliest first."""
    content: list[JsonObject] = []
    for index, (token, logprob) in enumerate(zip(told.ids, told.logprobs, strict=True)):
        tops = [_entry(top["id"], top["logprob"], tokenizer) for top in _ordered(told, index)]
        content.append({**_entry(token, logprob, tokenizer), "top_logprobs": tops})
    return {"content": content, "refusal": None}


def text_logprobs(told: ToldTokens, tokenizer: Any) -> JsonObject:
    """``logprobs`` of a text completion: parallel lists."""
    texts = [_text(token, tokenizer) for token in told.ids]
    offsets = [sum(map(len, texts[:index])) for index in range(len(texts))]
    tops = [_by_text(_ordered(told, index), tokenizer) for index in range(len(told.ids))]
    return {
        "tokens": texts,
        "token_logprobs": list(told.logprobs),
        "top_logprobs": tops if told.tops else None,
        "text_offset": offsets,
    }


def _ordered(told: ToldTokens, index: int) -> list[JsonObject]:
    return sorted(told.tops[index], key=lambda top: -top["logprob"]) if told.tops else []


def _by_text(tops: Sequence[JsonObject], tokenizer: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for top in tops:
        text = _text(top["id"], tokenizer)
        found[_nameless(top["id"]) if text in found else text] = top["logprob"]
    return found


def _entry(token: int, logprob: float, tokenizer: Any) -> JsonObject:
    text = str(tokenizer.decode([token]))
    # A part of a character has no text of its own, and which bytes it is the tokenizer does not tell.
    whole = bool(text) and "\ufffd" not in text
    return {
        "id": token,
        "token": _text(token, tokenizer),
        "bytes": list(text.encode()) if whole else None,
        "logprob": logprob,
    }


def _text(token: int, tokenizer: Any) -> str:
    text = str(tokenizer.decode([token]))
    if text and "\ufffd" not in text:
        return text
    return tokenizer.convert_ids_to_tokens([token])[0] or _nameless(token)


def _nameless(token: int) -> str:
    return f"token_id:{token}"
