"""What kvnet expects of mlx-lm's server, name by name."""

import inspect
from importlib import import_module
from types import ModuleType

import pytest

from kvnet.engine.mlx import runtime, server_parts
from kvnet.errors import EngineError

runtime.import_mlx_lm()

import mlx_lm.server as theirs  # noqa: E402

pytestmark = pytest.mark.mlx
generate = import_module("mlx_lm.generate")
MODULES = {name: import_module(name) for name in server_parts.NAMES}


def names_of(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_this_version_has_every_part() -> None:
    server_parts.check_parts(MODULES)


@pytest.mark.parametrize("name", ["APIHandler", "_make_sampler"])
def test_a_version_that_lacks_a_part_is_refused_by_name(name: str) -> None:
    lacking = ModuleType("mlx_lm.server")
    for kept in set(server_parts.NAMES["mlx_lm.server"]) - {name}:
        setattr(lacking, kept, getattr(theirs, kept))
    with pytest.raises(EngineError, match=rf"mlx-lm 0\.32\.\d+ lacks mlx_lm\.server\.{name}") as refused:
        server_parts.check_parts({**MODULES, "mlx_lm.server": lacking})
    assert "0.32" in refused.value.hint


def test_the_handler_is_called_with_what_it_takes() -> None:
    assert names_of(theirs.APIHandler.handle_completion) == ["self", "request", "stop_words"]
    assert names_of(theirs.APIHandler.generate_response)[:3] == ["self", "text", "finish_reason"]
    assert names_of(theirs.APIHandler.completion_usage_response)[1:] == [
        "prompt_token_count",
        "completion_token_count",
        "prompt_cache_count",
    ]
    assert names_of(theirs.process_message_content) == ["messages", "keep_images"]
    assert names_of(theirs.convert_chat) == ["messages", "role_mapping"]


def test_the_handler_starts_an_answer_by_naming_its_headers() -> None:
    for method in (theirs.APIHandler._set_completion_headers, theirs.APIHandler._set_stream_headers):
        source = inspect.getsource(method)
        assert source.index("send_response(") < source.index('"Content-type"') < source.index("_set_cors_headers()")


def test_values_have_the_fields_that_are_read_and_written() -> None:
    assert {"sampling", "logits", "stop_words", "max_tokens", "logprobs", "top_logprobs", "seed"} <= set(
        names_of(theirs.GenerationArguments)
    )
    assert {"temperature", "top_p", "top_k", "min_p", "xtc_probability", "xtc_threshold"} == set(
        names_of(theirs.SamplingArguments)
    )
    assert names_of(theirs.GenerationContext)[:6] == [
        "has_tool_calling",
        "has_thinking",
        "tool_parser",
        "text_sm",
        "initial_state",
        "prompt",
    ]
    assert names_of(theirs.Response) == ["text", "token", "logprob", "finish_reason", "top_tokens"]


def test_samplers_and_stops_take_what_they_are_given() -> None:
    assert names_of(theirs._make_sampler) == ["args", "tokenizer"]
    assert names_of(theirs._make_logits_processors) == ["args"]
    assert names_of(generate.make_stop_sequences) == ["tokenizer", "stop_words"]
    assert names_of(generate.make_text_state_machine) == ["tokenizer", "stop_words"]
    assert names_of(generate.GenerationBatch) == [
        "model",
        "uids",
        "inputs",
        "prompt_cache",
        "tokens",
        "samplers",
        "fallback_sampler",
        "logits_processors",
        "stop_sequences",
        "max_tokens",
    ]
