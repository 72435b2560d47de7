"""Completions in the engine process, compared with a real ``mlx_lm.server`` on the same model."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import trio

from kvnet.engine.client import EngineClient
from kvnet.engine.completions import Completed, CompletionBody, CompletionRequest
from kvnet.engine.prompts import PromptKind
from kvnet.errors import PromptError, WindowError
from tests.mlx import tinymodels
from tests.mlx.completing import complete, prepare, told
from tests.mlx.conftest import Opener
from tests.mlx.requests import export
from tests.mlx.server import ask_server, mlx_lm_server

pytestmark = pytest.mark.mlx

TALKS: dict[str, list[dict[str, Any]]] = {
    "question": [{"role": "user", "content": "What is a llama?"}],
    "system": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ],
}
SAME: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seed": {"temperature": 1.0, "seed": 7},
    "seed and filters": {"temperature": 1.3, "seed": 11, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "seed and xtc": {"temperature": 1.0, "seed": 3, "xtc_probability": 0.5, "xtc_threshold": 0.01},
    "repetition": {"repetition_penalty": 1.4, "repetition_context_size": 200},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "frequency_context_size": 100},
    "bias": {"logit_bias": {"70": 20.0, "71": 19.5}},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "one token": {"max_tokens": 1},
    "stop": {"stop": ["l", "zz"], "logit_bias": {"111": 6.0, "112": 7.0, "113": 6.5}, "temperature": 1.0, "seed": 5},
}


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[str]:
    with mlx_lm_server(tiny_llama) as address:
        yield address


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", SAME)
async def test_answers_equal_those_of_mlx_lms_server(
    engine: EngineClient, server: str, name: str, stream: bool
) -> None:
    for messages in TALKS.values():
        body = {"messages": messages, "max_tokens": 24, "stream": stream, **SAME[name]}
        body["stream_options"] = {"include_usage": True}
        status, expected = await trio.to_thread.run_sync(ask_server, server, "/v1/chat/completions", body)
        answer = await complete(engine, body)
        assert (status, answer.started.status) == (200, 200)
        assert told(answer.body) == told(expected)
        assert answer.completed.finish_reason == told(expected)["reason"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_text_completions_equal_those_of_mlx_lms_server(engine: EngineClient, server: str, stream: bool) -> None:
    for asked in SAME.values():
        body = {"prompt": "Once upon a time", "max_tokens": 16, "stream": stream, **asked}
        body["stream_options"] = {"include_usage": True}
        _, expected = await trio.to_thread.run_sync(ask_server, server, "/v1/completions", body)
        answer = await complete(engine, body, PromptKind.TEXT)
        assert told(answer.body) == told(expected)


async def test_eight_at_once_each_equal_their_answer_alone(engine: EngineClient) -> None:
    bodies = [
        {"messages": [{"role": "user", "content": f"Number {i}: " + "go on " * i}], "max_tokens": 20, **asked}
        for i, asked in enumerate([*SAME.values()][:8])
    ]
    alone = [told((await complete(engine, body)).body) for body in bodies]
    together: dict[int, dict[str, Any]] = {}

    async def ask(i: int) -> None:
        answer = await complete(engine, {**bodies[i], "stream": i % 2 == 1, "stream_options": {"include_usage": True}})
        together[i] = told(answer.body)

    async with trio.open_nursery() as nursery:
        for i in range(len(bodies)):
            nursery.start_soon(ask, i)
        # Others draw from the common random state; seeds must not notice.
        nursery.start_soon(complete, engine, {"messages": TALKS["question"], "max_tokens": 30, "temperature": 1.0})
    for i, answer in enumerate(alone):
        expected = {**answer, "logprobs": together[i]["logprobs"] if i % 2 else answer["logprobs"]}
        assert together[i] == expected


async def test_live_caches_and_restored_state_give_the_same_answer_and_say_so_in_usage(
    engine: EngineClient, tmp_path: Path
) -> None:
    body = {
        "messages": [{"role": "user", "content": "Tell me of llamas. " * 20}],
        "max_tokens": 16,
        "repetition_penalty": 1.3,
        "repetition_context_size": 500,
    }
    cold = await complete(engine, body)
    n = len(cold.prompt.tokens)
    plan = await export(engine, list(cold.prompt.tokens[:256]), tmp_path / "pack")
    warm = await complete(engine, body, restore=plan, live=True, created_tokens=7)
    again = await complete(engine, body, live=True)
    assert told(cold.body) == told(warm.body) == told(again.body)
    assert (warm.started.restored_tokens, warm.started.live_tokens) == (256, 0)
    assert (again.started.restored_tokens, again.started.live_tokens) == (0, n - 1)
    usage = warm.json["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 256}
    assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (256, 7)
    assert usage["kvnet"] == {"window_tokens": 4096, "tokens_left": 4096 - n - 16}
    assert warm.completed.held_tokens == n + 16
    assert warm.completed.prefilled_tokens == n - 256


async def test_a_stop_text_ends_the_answer_also_where_tokens_do_not_spell_it(engine: EngineClient) -> None:
    body = {"messages": TALKS["question"], "max_tokens": 24, "logit_bias": {str(i): 9.0 for i in range(69, 90)}}
    text = told((await complete(engine, body)).body)["text"]
    assert len(text) > 6
    for stream in (False, True):
        answer = await complete(engine, {**body, "stop": text[2:5], "stream": stream})
        ended = told(answer.body)
        assert (ended["text"], ended["reason"]) == (text[: text.index(text[2:5])], "stop")


async def test_an_answer_of_a_json_schema_is_valid(engine: EngineClient) -> None:
    schema = {
        "type": "object",
        "properties": {"size": {"enum": ["small", "large"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["size", "legs"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema}}
    for seed in range(3):
        body = {"messages": TALKS["question"], "max_tokens": 600, "response_format": form, "temperature": 1.0}
        answer = await complete(engine, {**body, "seed": seed})
        assert answer.completed.finish_reason == "stop"
        value = json.loads(told(answer.body)["text"])
        assert value["size"] in {"small", "large"}
        assert 0 <= value["legs"] <= 9


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"n": 2}, "n is not supported"),
        ({"draft_model": "x"}, "draft_model is not supported"),
        ({"adapters": "x"}, "adapters is not supported"),
        ({"audio": {"voice": "a"}}, "audio is not supported"),
        ({"temperature": -1}, "temperature must be at least 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"stop": ["a", 3]}, "stop must be a text"),
        ({"stop": ""}, "stop must be a text"),
        ({"logit_bias": {"99999": 1}}, "token ids are below"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no such type"}}}}, "schema"),
        ({"response_format": {"type": "xml"}}, "expected a type of text, json_object or json_schema"),
        ({"tools": "all"}, "tools"),
        ({"top_k": True, "temperature": 1.0}, "top_k must be a number"),
        ({"temperature": "0.7"}, 'temperature must be a number, found "0.7"'),
        ({"top_logprobs": True, "logprobs": True}, "top_logprobs must be a number"),
        ({"temperature": 1e308, "top_k": 5}, "temperature must be from 0 to 1,000"),
        ({"temperature": 5e-324}, "temperature must be 0 or at least"),
        ({"presence_penalty": 2**64}, "presence_penalty must be from"),
        ({"frequency_penalty": -(2**70)}, "frequency_penalty must be from"),
        ({"repetition_penalty": 2**63}, "repetition_penalty must be from"),
        ({"repetition_penalty": 1.5, "repetition_context_size": 2**64}, "repetition_context_size must be from"),
        ({"logit_bias": {"5": None}}, "logit_bias: expected numbers"),
        ({"logit_bias": {"5": [1]}}, "logit_bias: expected numbers"),
        ({"logit_bias": {"5": 1e308}}, "logit_bias: expected numbers"),
    ],
)
async def test_what_is_not_supported_is_a_400_that_names_it(
    engine: EngineClient, asked: dict[str, Any], words: str
) -> None:
    body = {"messages": TALKS["question"], **asked}
    if "tools" in asked:
        with pytest.raises(PromptError, match=words):
            await prepare(engine, body)
        return
    answer = await complete(engine, body)
    assert answer.started.status == 400
    error = answer.json["error"]
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    assert answer.completed == Completed((), "", 0, 0.0, 0, 0.0, 0.0)
    assert (await complete(engine, {"messages": TALKS["question"], "max_tokens": 2})).started.status == 200


async def test_null_parameters_are_those_left_out(engine: EngineClient) -> None:
    body = {"messages": TALKS["question"], "max_tokens": 5}
    nulls = dict.fromkeys(("temperature", "stop", "seed", "tools", "response_format", "stream_options", "n"))
    assert told((await complete(engine, {**body, **nulls})).body) == told((await complete(engine, body)).body)


async def test_a_fraction_may_be_written_as_a_whole_number(engine: EngineClient) -> None:
    body = {"messages": TALKS["question"], "max_tokens": 5, "temperature": 1.0, "seed": 7}
    whole, part = ({"xtc_probability": number, "xtc_threshold": number} for number in (0, 0.0))
    assert told((await complete(engine, {**body, **whole})).body) == told(
        (await complete(engine, {**body, **part})).body
    )


async def test_more_than_the_window_is_refused_before_the_answer_starts(engine: EngineClient) -> None:
    for max_tokens in (4090, 10**12):
        with pytest.raises(WindowError, match="window is 4,096 tokens"):
            await complete(engine, {"messages": TALKS["question"], "max_tokens": max_tokens})


async def test_leaving_in_mid_stream_stops_the_work_and_the_next_request_is_answered(engine: EngineClient) -> None:
    body = {"messages": TALKS["question"], "max_tokens": 3000, "stream": True}
    prompt = await prepare(engine, body)
    request = CompletionRequest(PromptKind.CHAT, json.dumps(body).encode(), prompt)
    async with aclosing(engine.complete(request)) as events:
        async for event in events:
            if isinstance(event, CompletionBody):
                break
    # What the stopped answer leaves in RAM tells that it stopped, and how far it came.
    with trio.fail_after(120):
        while not (await engine.live()).n_caches:  # noqa: ASYNC110 - the engine tells nobody of what it keeps
            await trio.sleep(0.01)
    again = await complete(engine, {"messages": TALKS["question"], "max_tokens": 4}, live=True)
    assert again.started.live_tokens == len(prompt.tokens) - 1
    held = (await engine.live()).size_bytes
    assert held < 2500 * engine.info.kv_bytes_per_token


@pytest.fixture
async def tool_engine(opener: Opener, tmp_path: Path) -> AsyncIterator[EngineClient]:
    async with opener(tinymodels.write_model(tmp_path / "tools", template=TOOL_TEMPLATE)) as opened:
        yield opened


TOOL_TEMPLATE = (
    "{% if tools %}{{ '<|start|>tools\n' + (tools | tojson) + '<|end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + (c.function | tojson) + '</tool_call>' }}{% endfor %}"
    "{{ '<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


async def test_prompts_with_tools_have_the_tokens_of_mlx_lms_server(tool_engine: EngineClient, tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "legs", "arguments": '{"of": "llama"}'}}
    body = {
        "messages": [
            {"role": "system", "content": "Count."},
            {"role": "user", "content": "How many legs?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "4"},
        ],
        "tools": [{"type": "function", "function": {"name": "legs", "parameters": {"type": "object"}}}],
        "max_tokens": 8,
    }
    answer = await complete(tool_engine, body)
    text = await tool_engine.text_of(answer.prompt.tokens)
    assert '<tool_call>{"name": "legs", "arguments": {"of": "llama"}}</tool_call>' in text
    with mlx_lm_server(tmp_path / "tools") as address:
        _, expected = await trio.to_thread.run_sync(ask_server, address, "/v1/chat/completions", body)
    assert told(answer.body) == told(expected)
