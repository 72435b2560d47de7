"""The ``anthropic`` package against a running node, set up as ``kvnet connect`` says."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types import Message, MessageParam, ToolParam

from tests.e2e.conftest import TIMEOUT_S, Kvnet
from tests.mlx.scriptedmodel import REASONING, write_scripted

pytestmark = [pytest.mark.e2e, pytest.mark.loopback, pytest.mark.mlx]

HELLO: list[MessageParam] = [{"role": "user", "content": "Hello"}]
WEATHER: ToolParam = {
    "name": "weather",
    "description": "The weather of a town.",
    "input_schema": {"type": "object", "properties": {"town": {"type": "string"}, "days": {"type": "integer"}}},
}
LONG = "The order of these words does not matter here, only that there are many of them. " * 12


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kvnet]:
    """A running node with one scripted model."""
    folder = tmp_path_factory.mktemp("node")
    runner = Kvnet(folder / "data")
    write_scripted(folder / "data" / "models" / "scripted")
    runner.start()
    yield runner
    runner.end()


@pytest.fixture(scope="module")
def settings(node: Kvnet) -> dict[str, Any]:
    """What ``kvnet connect claude-code`` prints."""
    return node.json("connect", "claude-code")


@pytest.fixture
def client(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[anthropic.Anthropic]:
    """The client, set up by the printed environment alone."""
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    for name, value in settings["environment"].items():
        monkeypatch.setenv(name, value)
    with anthropic.Anthropic(max_retries=0, timeout=TIMEOUT_S) as made:
        yield made


@pytest.fixture(scope="module")
def model(settings: dict[str, Any]) -> str:
    """The model that the printed settings name."""
    name = settings["environment"]["ANTHROPIC_MODEL"]
    assert isinstance(name, str)
    return name


def kinds(message: Message) -> list[str]:
    return [block.type for block in message.content]


def test_a_message_is_answered(client: anthropic.Anthropic, model: str) -> None:
    message = client.messages.create(model=model, max_tokens=16, messages=HELLO)
    (block,) = message.content
    assert block.type == "text"
    assert (block.text, message.stop_reason, message.model) == ("Good day to you", "end_turn", model)
    assert message.usage.output_tokens == 4


def test_a_streamed_message_is_the_same(client: anthropic.Anthropic, model: str) -> None:
    with client.messages.stream(model=model, max_tokens=16, messages=HELLO) as stream:
        texts = list(stream.text_stream)
        message = stream.get_final_message()
    assert "".join(texts) == "Good day to you"
    assert len(texts) > 1
    assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", 4)


def test_an_answer_cut_short_says_so(client: anthropic.Anthropic, model: str) -> None:
    message = client.messages.create(model=model, max_tokens=2, messages=HELLO)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 2)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_is_called_and_its_result_answered(client: anthropic.Anthropic, model: str, streamed: bool) -> None:
    def ask(history: list[MessageParam]) -> Message:
        if not streamed:
            return client.messages.create(model=model, max_tokens=32, messages=history, tools=[WEATHER])
        with client.messages.stream(model=model, max_tokens=32, messages=history, tools=[WEATHER]) as stream:
            return stream.get_final_message()

    history: list[MessageParam] = [{"role": "user", "content": "Weather in Ulm?"}]
    message = ask(history)
    assert kinds(message) == ["thinking", "text", "tool_use"]
    thinking, text, call = message.content
    assert thinking.type == "thinking"
    assert text.type == "text"
    assert call.type == "tool_use"
    assert (thinking.thinking, text.text) == (REASONING, "One moment")
    assert (call.name, call.input, message.stop_reason) == ("weather", {"town": "Ulm", "days": 2}, "tool_use")
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    told = ask([*history, message.to_param(), {"role": "user", "content": [result]}])
    (answer,) = told.content
    assert answer.type == "text"
    assert (answer.text, told.stop_reason) == ("It rains in Ulm", "end_turn")
    # All of the first prompt is in the second one.
    assert (told.usage.cache_read_input_tokens or 0) > 0


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_that_must_be_called_is_called(client: anthropic.Anthropic, model: str, streamed: bool) -> None:
    towns: dict[str, Any] = {"town": {"enum": ["Ulm", "Bonn"]}}
    tool: ToolParam = {
        "name": "town",
        "input_schema": {"type": "object", "properties": towns, "required": ["town"], "additionalProperties": False},
    }
    wanted: Any = {"model": model, "max_tokens": 64, "messages": HELLO, "tools": [WEATHER, tool]}
    wanted["tool_choice"] = {"type": "tool", "name": "town"}
    if streamed:
        with client.messages.stream(**wanted) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**wanted)
    (call,) = message.content
    assert call.type == "tool_use"
    assert (call.name, message.stop_reason) == ("town", "tool_use")
    assert call.input in ({"town": "Ulm"}, {"town": "Bonn"})


def test_an_answer_follows_a_schema(client: anthropic.Anthropic, model: str) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    schema["additionalProperties"] = False
    message = client.messages.create(
        model=model, max_tokens=64, messages=HELLO, output_config={"format": {"type": "json_schema", "schema": schema}}
    )
    (block,) = message.content
    assert block.type == "text"
    assert json.loads(block.text)["n"] in (1, 2)


@pytest.mark.parametrize(("stop", "text"), [(" day", "Good"), ("oo", "G"), ("to you", "Good day ")])
def test_the_stop_sequence_that_was_met_is_named(client: anthropic.Anthropic, model: str, stop: str, text: str) -> None:
    message = client.messages.create(model=model, max_tokens=16, messages=HELLO, stop_sequences=["nowhere", stop])
    (block,) = message.content
    assert block.type == "text"
    assert (block.text, message.stop_reason, message.stop_sequence) == (text, "stop_sequence", stop)


def test_cached_tokens_are_counted_apart(client: anthropic.Anthropic, model: str) -> None:
    def ask(question: str) -> Message:
        return client.messages.create(
            model=model,
            max_tokens=4,
            system=[{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
            messages=[{"role": "user", "content": question}],
        )

    first, second = ask("Who?").usage, ask("Why?").usage
    assert (first.cache_read_input_tokens or 0) < len(LONG) // 2
    assert (second.cache_read_input_tokens or 0) > len(LONG) // 2
    for usage in (first, second):
        parts = (usage.input_tokens, usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0)
        counted = client.messages.count_tokens(
            model=model, system=LONG, messages=[{"role": "user", "content": "Who?"}]
        ).input_tokens
        assert sum(parts) == counted


def test_tokens_are_counted_with_tools_and_all(client: anthropic.Anthropic, model: str) -> None:
    plain = client.messages.count_tokens(model=model, messages=HELLO).input_tokens
    with_tools = client.messages.count_tokens(model=model, messages=HELLO, tools=[WEATHER], system="s").input_tokens
    # The template writes <s>, then <|start|>user\nHello<|end|>\n, <|start|>assistant\n and one mark.
    assert plain == 1 + (1 + 5 + 5 + 1 + 1) + (1 + 10) + 1
    assert with_tools > plain + 100


def test_a_claude_model_that_is_not_here_is_answered_by_the_node_s_own(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model="claude-opus-5", max_tokens=16, messages=HELLO)
    assert message.model == "claude-opus-5"
    assert kinds(message) == ["text"]


def test_a_cache_is_warmed_without_an_answer(client: anthropic.Anthropic, model: str) -> None:
    message = client.messages.create(model=model, max_tokens=0, system=f"warm {LONG}", messages=HELLO)
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)
    again = client.messages.create(model=model, max_tokens=4, system=f"warm {LONG}", messages=HELLO)
    assert (again.usage.cache_read_input_tokens or 0) > len(LONG) // 2


def test_a_named_context_is_a_model(node: Kvnet, client: anthropic.Anthropic, model: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text(LONG)
    node.json("add", str(tmp_path / "notes.txt"), "--name", "notes")
    printed = node.json("connect", "claude-code", "--model", f"{model}#notes")
    assert (printed["model"], printed["environment"]["ANTHROPIC_MODEL"]) == (f"{model}#notes",) * 2
    message = client.messages.create(model=printed["model"], max_tokens=16, messages=HELLO)
    (block,) = message.content
    assert block.type == "text"
    assert block.text == "Good day to you"
    assert (message.usage.cache_read_input_tokens or 0) > len(LONG) // 2
    plain = client.messages.count_tokens(model=model, messages=HELLO).input_tokens
    assert client.messages.count_tokens(model=printed["model"], messages=HELLO).input_tokens > plain + len(LONG)


def test_an_unknown_model_is_not_found(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(model="nobody", max_tokens=4, messages=HELLO)
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


def test_a_picture_is_refused_by_name(client: anthropic.Anthropic, model: str) -> None:
    picture: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.0: pictures are not supported"):
        client.messages.create(model=model, max_tokens=4, messages=[{"role": "user", "content": [picture]}])


@pytest.mark.parametrize("streamed", [False, True])
def test_a_prompt_beyond_the_window_is_refused_before_it_starts(
    client: anthropic.Anthropic, model: str, streamed: bool
) -> None:
    history: list[MessageParam] = [{"role": "user", "content": "x" * 5000}]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(model=model, max_tokens=4, messages=history, stream=streamed)


def test_an_answer_longer_than_the_window_is_refused_with_the_figures(client: anthropic.Anthropic, model: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"exceed context limit: \d+ \+ 4096 > 4096"):
        client.messages.create(model=model, max_tokens=4096, messages=HELLO)


def test_failures_outside_requests_have_anthropic_s_form_too(settings: dict[str, Any]) -> None:
    url = settings["environment"]["ANTHROPIC_BASE_URL"]
    broken = httpx.post(
        f"{url}/v1/messages", content=b"{", headers={"content-type": "application/json"}, timeout=TIMEOUT_S
    )
    assert (broken.status_code, broken.json()["type"]) == (400, "error")
    assert broken.json()["error"]["type"] == "invalid_request_error"
    foreign = httpx.post(f"{url}/v1/messages", json={}, headers={"origin": "https://example.org"}, timeout=TIMEOUT_S)
    assert (foreign.status_code, foreign.json()["error"]["type"]) == (403, "permission_error")
    wrong = httpx.get(f"{url}/v1/messages", timeout=TIMEOUT_S)
    assert (wrong.status_code, wrong.json()["type"]) == (405, "error")
    nothing = httpx.post(f"{url}/v1/messages/batches", json={}, timeout=TIMEOUT_S)
    assert (nothing.status_code, nothing.json()["error"]["type"]) == (404, "not_found_error")


def test_models_are_listed_for_anthropic_s_client(client: anthropic.Anthropic, model: str) -> None:
    assert model in [each.id for each in client.models.list()]


def test_the_printed_settings_work_for_the_openai_client(node: Kvnet, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = node.json("connect", "openai")
    for name, value in printed["environment"].items():
        monkeypatch.setenv(name, value)
    with openai.OpenAI(max_retries=0, timeout=TIMEOUT_S) as made:
        answer = made.chat.completions.create(
            model=printed["model"], max_tokens=16, messages=[{"role": "user", "content": "Hello"}]
        )
    assert answer.choices[0].message.content == "Good day to you"


def test_a_token_is_printed_and_checked(tmp_path: Path) -> None:
    write_scripted(tmp_path / "data" / "models" / "scripted")
    runner = Kvnet(tmp_path / "data")
    (tmp_path / "data" / "config.toml").write_text('[api]\ntoken = "a secret"\n')
    try:
        runner.start()
        environment = runner.json("connect", "anthropic")["environment"]
        with anthropic.Anthropic(
            base_url=environment["ANTHROPIC_BASE_URL"], api_key=environment["ANTHROPIC_API_KEY"], max_retries=0
        ) as made:
            assert made.messages.count_tokens(model="default", messages=HELLO).input_tokens > 0
        with (
            anthropic.Anthropic(base_url=environment["ANTHROPIC_BASE_URL"], api_key="x", max_retries=0) as wrong,
            pytest.raises(anthropic.AuthenticationError) as caught,
        ):
            wrong.messages.count_tokens(model="default", messages=HELLO)
        assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    finally:
        runner.end()
