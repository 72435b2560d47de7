"""Parameters in the form the engine's server takes."""

from typing import Any

import pytest

from kvnet.engine.prompts import PromptKind
from kvnet_node.api.failures import ApiError
from kvnet_node.api.parameters import cache_key_of, clean_parameters, marks_of, max_tokens_of


def test_null_is_as_if_it_were_not_there_and_the_newer_length_wins() -> None:
    body: dict[str, Any] = {"messages": [], "temperature": None, "n": 1, "max_tokens": 5, "max_completion_tokens": 7}
    assert clean_parameters(PromptKind.CHAT, body) == {"messages": [], "max_tokens": 7}


@pytest.mark.parametrize(
    "more", [{"n": 2}, {"draft_model": "small"}, {"adapters": "x"}, {"functions": [{"name": "f"}]}, {"echo": True}]
)
def test_what_would_be_ignored_is_refused_by_name(more: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as raised:
        clean_parameters(PromptKind.CHAT, {"messages": [], **more})
    assert (raised.value.failure.status, raised.value.failure.param) == (400, next(iter(more)))


def test_a_text_completion_counts_its_logprobs() -> None:
    assert clean_parameters(PromptKind.TEXT, {"prompt": ["a"], "logprobs": 3}) == {
        "prompt": "a", "logprobs": True, "top_logprobs": 3,
    }  # fmt: skip
    assert clean_parameters(PromptKind.TEXT, {"prompt": "a", "logprobs": 0}) == {"prompt": "a", "logprobs": False}


@pytest.mark.parametrize("prompt", [None, 3, [], ["a", "b"], [1, 2]])
def test_a_text_completion_has_one_text(prompt: Any) -> None:
    with pytest.raises(ApiError):
        clean_parameters(PromptKind.TEXT, {"prompt": prompt})


@pytest.mark.parametrize("value", [0, -1, True, "8", 1.5])
def test_a_length_is_a_whole_number_from_1_on(value: Any) -> None:
    with pytest.raises(ApiError):
        max_tokens_of({"max_tokens": value})


def test_marks_and_cache_keys_are_read_from_openai_bodies_too() -> None:
    marked = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "system", "content": [marked]},
        {"role": "user", "content": "q"},
        {"role": "x", "cache_control": {}},
    ]
    assert marks_of({"messages": messages}) == (1, 3)
    assert marks_of({"prompt": "a"}) == ()
    assert cache_key_of({"prompt_cache_key": "k"}) == "k"
    assert cache_key_of({"prompt_cache_key": 3}) == ""
