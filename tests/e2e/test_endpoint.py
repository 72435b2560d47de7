"""The HTTP endpoint of a running node, used with the ``openai`` package and with bare HTTP."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from kvnet.exchange.contexts import decode_context
from kvnet.store.names import NameBook
from tests.e2e.conftest import TIMEOUT_S, Kvnet
from tests.mlx.scriptedmodel import write_scripted
from tests.mlx.tinymodels import LLAMA, write_model

pytestmark = [pytest.mark.e2e, pytest.mark.loopback, pytest.mark.mlx]

TINY = "tiny"
WINDOW_TOKENS = 2048
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello there"}]
NEVER_END = {"logit_bias": {"2": -100}, "max_tokens": 1500, "temperature": 0}
"""The tiny model's end token is forbidden."""
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
DOCUMENT = "Rules of the house. " + "One must be quiet after ten, and friendly before. " * 30


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kvnet]:
    """A running node with a random model, a scripted one, and a context computed with the first."""
    folder = tmp_path_factory.mktemp("node")
    runner = Kvnet(folder / "data")
    write_model(folder / "data" / "models" / TINY, {**LLAMA, "max_position_embeddings": WINDOW_TOKENS})
    write_scripted(folder / "data" / "models" / "scripted")
    runner.start("--model", TINY)
    document = folder / "rules.txt"
    document.write_text(DOCUMENT)
    for _ in range(2):
        runner.json("add", str(document), "--name", "rules", "--model", TINY)
        document.write_text(DOCUMENT + "And that is all.")
    yield runner
    runner.end()


@pytest.fixture(scope="module")
def url(node: Kvnet) -> str:
    """The endpoint, as the status says."""
    (found,) = node.json("node", "status")["endpoint"]
    assert isinstance(found, str)
    return found


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    """The client of the ``openai`` package, which sees every failure at once."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=TIMEOUT_S) as made:
        yield made


def post(url: str, body: object, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(f"{url}/v1/chat/completions", content=content, headers=named, timeout=TIMEOUT_S)


def asked(*messages: tuple[str, str], **more: Any) -> dict[str, Any]:
    said = [{"role": role, "content": content} for role, content in messages]
    return {"model": TINY, "messages": said, "max_tokens": 8, "temperature": 0, **more}


def answer_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    text = response.json()["choices"][0]["message"]["content"]
    assert isinstance(text, str)
    return text


# --- Answers ---------------------------------------------------------------------------------------------------------


def test_the_same_request_twice_gives_the_same_text_and_is_reused_but_for_its_last_token(
    client: openai.OpenAI,
) -> None:
    def ask() -> Any:
        return client.chat.completions.create(model=TINY, messages=HELLO, max_tokens=12, temperature=0)

    first, second = ask(), ask()
    assert first.choices[0].message.content
    assert second.choices[0].message.content == first.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens - 1


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=TINY, messages=HELLO, max_tokens=12, temperature=0)
    stream = client.chat.completions.create(
        model=TINY, messages=HELLO, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called(client: openai.OpenAI, *, stream: bool) -> None:
    if stream:
        chunks = client.chat.completions.create(model="scripted", messages=HELLO, tools=[WEATHER], stream=True)
        calls = [call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or []]
        functions: list[Any] = [call.function for call in calls]
    else:
        made = client.chat.completions.create(model="scripted", messages=HELLO, tools=[WEATHER])
        assert made.choices[0].finish_reason == "tool_calls"
        functions = [call.function for call in made.choices[0].message.tool_calls or [] if call.type == "function"]
    ((name, arguments),) = [(each.name, each.arguments) for each in functions if each is not None]
    assert name == "weather"
    assert json.loads(arguments or "") == {"town": "Ulm", "days": 2}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "town"}}])
def test_a_tool_that_has_to_be_called_is_called(client: openai.OpenAI, choice: Any, *, stream: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Ulm"]}},
        "required": ["name"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "town", "parameters": schema}}]
    asked: dict[str, Any] = {"model": "scripted", "messages": HELLO, "tools": tools, "tool_choice": choice}
    if stream:
        chunks = list(client.chat.completions.create(**asked, stream=True))
        calls = [call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or []]
        reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
        assert reasons[-1] == "tool_calls"
    else:
        made = client.chat.completions.create(**asked)
        assert made.choices[0].finish_reason == "tool_calls"
        calls = made.choices[0].message.tool_calls
    [call] = calls
    assert call.function.name == "town"
    assert json.loads(call.function.arguments) == {"name": "Ulm"}


def test_tools_that_may_not_be_called_are_not_in_the_prompt(client: openai.OpenAI) -> None:
    without = client.chat.completions.create(model="scripted", messages=HELLO)
    made = client.chat.completions.create(model="scripted", messages=HELLO, tools=[WEATHER], tool_choice="none")
    assert made.choices[0].message.content == without.choices[0].message.content
    assert made.usage is not None
    assert without.usage is not None
    assert made.usage.prompt_tokens == without.usage.prompt_tokens


def test_an_answer_follows_its_json_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"mood": {"enum": ["good", "bad"]}},
        "required": ["mood"],
        "additionalProperties": False,
    }
    made = client.chat.completions.create(
        model="scripted",
        messages=HELLO,
        max_tokens=60,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "mood", "schema": schema, "strict": True}},
    )
    assert json.loads(made.choices[0].message.content or "")["mood"] in {"good", "bad"}


def test_logprobs_are_told(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model=TINY, messages=HELLO, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    assert made.choices[0].logprobs is not None
    content = made.choices[0].logprobs.content or []
    assert len(content) == 4
    for each in content:
        assert len(each.top_logprobs) == 3
        # Greedy: the likeliest is the one that was made.
        assert (each.token, each.logprob) == (each.top_logprobs[0].token, each.top_logprobs[0].logprob)
        assert each.bytes is None or bytes(each.bytes).decode() == each.token


def test_logprobs_of_text_completions_are_told_in_their_own_form(client: openai.OpenAI) -> None:
    made = client.completions.create(model=TINY, prompt="Once upon", max_tokens=4, temperature=0, logprobs=2)
    told = made.choices[0].logprobs
    assert told is not None
    assert [len(each or []) for each in (told.tokens, told.token_logprobs, told.text_offset)] == [4, 4, 4]
    assert [len(each) for each in told.top_logprobs or []] == [2, 2, 2, 2]


def test_text_completions_take_one_token_and_more(client: openai.OpenAI) -> None:
    for prompt in ("a", "a", "Once upon a time"):
        made = client.completions.create(model=TINY, prompt=prompt, max_tokens=5, temperature=0)
        assert made.choices[0].text
        assert made.usage is not None
        assert made.usage.completion_tokens == 5


def test_a_seed_gives_the_same_choice_again(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str | None:
        made = client.chat.completions.create(model=TINY, messages=HELLO, max_tokens=12, temperature=1, seed=seed)
        return made.choices[0].message.content

    assert ask(7) == ask(7)
    assert ask(7) != ask(8)


def test_headers_say_what_was_reused_and_what_was_removed(url: str) -> None:
    line = "x-anthropic-billing-header: cc_version=2.1; cch=5;\n"
    body = asked(("system", line + "Be brief. " * 20), ("user", "Why?"))
    response = post(url, body)
    again = post(url, body)
    assert "billing line" in response.headers["x-kvnet-removed"]
    assert again.headers["x-kvnet-source"] == "ram"
    assert int(again.headers["x-kvnet-reused-tokens"]) == int(again.headers["x-kvnet-prompt-tokens"]) - 1
    assert again.headers["x-kvnet-request"] != response.headers["x-kvnet-request"]


def test_reuse_can_be_turned_off_for_one_request(url: str) -> None:
    body = asked(("user", "Off and on again, please."))
    kept = answer_of(post(url, body))
    off = post(url, body, x_kvnet_reuse="off")
    assert answer_of(off) == kept
    assert (off.headers["x-kvnet-source"], off.headers["x-kvnet-reused-tokens"]) == ("none", "0")
    assert post(url, body, x_kvnet_reuse="perhaps").status_code == 400


def test_a_private_request_leaves_nothing_to_reuse(url: str) -> None:
    body = asked(("user", "This stays between us, does it not?"))
    assert answer_of(post(url, body, x_kvnet_private="1"))
    assert answer_of(post(url, {**body, "model": f"{TINY}#private"}))
    headers = post(url, body).headers
    # What is reused is the head that every prompt of this template has.
    assert int(headers["x-kvnet-reused-tokens"]) < int(headers["x-kvnet-prompt-tokens"]) - 30


# --- Named contexts --------------------------------------------------------------------------------------------------


def test_a_named_context_is_a_model_and_answers_as_its_text_inline(
    node: Kvnet, url: str, client: openai.OpenAI
) -> None:
    names = {model.id for model in client.models.list()}
    assert {TINY, f"{TINY}#rules", f"{TINY}#rules@1", f"{TINY}#rules@2"} <= names
    assert client.models.retrieve(f"{TINY}#rules@1").id == f"{TINY}#rules@1"
    picked = post(url, asked(("user", "When?"), model=f"{TINY}#rules@1"))
    said = answer_of(picked)
    (version,) = NameBook(node.data_dir / "names").versions("rules")[:1]
    stored = decode_context(version.context).messages
    inline = post(url, asked(*((m["role"], m["content"]) for m in stored), ("user", "When?")), x_kvnet_reuse="off")
    assert said == answer_of(inline)
    assert picked.headers["x-kvnet-prompt-tokens"] == inline.headers["x-kvnet-prompt-tokens"]
    assert picked.headers["x-kvnet-source"] in {"disk", "ram"}
    assert int(picked.headers["x-kvnet-reused-tokens"]) > 1000


def test_unknown_models_and_contexts_are_named_beside_those_that_are_there(client: openai.OpenAI) -> None:
    for name in ("nothing-here", f"{TINY}#nothing", f"{TINY}#rules@9"):
        with pytest.raises(openai.NotFoundError) as raised:
            client.chat.completions.create(model=name, messages=HELLO, max_tokens=2)
        assert raised.value.code == "model_not_found"
        assert f"{TINY}#rules" in raised.value.message
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nothing-here")


def test_no_model_is_the_nodes_own_choice(url: str) -> None:
    body = asked(("user", "Hi"))
    del body["model"]
    response = post(url, body)
    assert answer_of(response)
    assert response.json()["model"] == TINY


# --- Requests at fault -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"model": "tiny", "messages": [', "invalid_json"),
        (b"[1, 2]", "invalid_json"),
        (b"", "invalid_json"),
        (b'{"a":' * 500 + b"1" + b"}" * 500, "invalid_json"),
        (b"[" * 200_000, "invalid_json"),
        (json.dumps(asked(("user", "x " * 2000))).encode(), "context_length_exceeded"),
        (json.dumps(asked(("user", "x"), max_tokens=1_000_000)).encode(), "context_length_exceeded"),
        (json.dumps(asked(("user", "x"), max_tokens=0)).encode(), None),
        (json.dumps(asked(("user", "x"), n=3)).encode(), "unsupported_parameter"),
        (json.dumps(asked()).encode(), "invalid_prompt"),
    ],
)
def test_a_request_at_fault_is_a_clear_400_and_the_next_one_works(url: str, body: bytes, code: str | None) -> None:
    response = post(url, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert answer_of(post(url, asked(("user", "And now?"))))


def test_without_a_length_a_nearly_full_window_is_no_error(url: str) -> None:
    body = asked(("user", "x" * (WINDOW_TOKENS - 60)))
    del body["max_tokens"]
    response = post(url, body)
    assert answer_of(response)


def test_other_names_pages_and_paths_are_turned_away(url: str) -> None:
    assert httpx.get(f"{url}/health", headers={"host": "evil.example"}, timeout=TIMEOUT_S).status_code == 403
    response = post(url, asked(("user", "x")), origin="https://evil.example")
    assert (response.status_code, response.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert httpx.get(f"{url}/v1/nothing", timeout=TIMEOUT_S).status_code == 404
    assert httpx.get(f"{url}/v1/chat/completions", timeout=TIMEOUT_S).status_code == 405


def test_a_body_over_the_limit_is_refused_before_it_is_read(url: str) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(70):
            yield b" " * (1 << 20)

    response = httpx.post(f"{url}/v1/chat/completions", content=endless(), timeout=TIMEOUT_S)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")


# --- Clients that go, engines that end -------------------------------------------------------------------------------


def test_a_client_that_leaves_in_mid_stream_stops_the_work(node: Kvnet, url: str) -> None:
    before = node.json("node", "status")["counters"].get("requests_cancelled", 0)
    body = asked(("user", "Tell me everything."), stream=True, **NEVER_END)
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=TIMEOUT_S) as response:
        next(response.iter_bytes())
    while httpx.get(f"{url}/health", timeout=TIMEOUT_S).json()["running"]:
        pass
    counters = node.json("node", "status")["counters"]
    assert counters["requests_cancelled"] == before + 1
    assert answer_of(post(url, asked(("user", "And now?"))))


def test_an_engine_killed_in_mid_request_fails_that_request_and_the_next_works(node: Kvnet, url: str) -> None:
    assert answer_of(post(url, asked(("user", "Are you there?"))))
    engines = engine_processes(node.asked("status")["pid"])
    body = asked(("user", "Tell me everything."), stream=True, **NEVER_END)
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=TIMEOUT_S) as response:
        lines = response.iter_lines()
        while "content" not in next(lines):
            pass
        # At once: everything takes the engine a second or two.
        for engine in engines:
            os.kill(engine, signal.SIGKILL)
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: ") and line != "data: [DONE]"]
    assert events[-1]["error"]["code"] == "engine_crashed"
    assert answer_of(post(url, asked(("user", "And now?"))))


def engine_processes(pid: int) -> list[int]:
    """The children of a node."""
    listing = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=True).stdout
    return [int(line) for line in listing.split()]


# --- The node's own settings -----------------------------------------------------------------------------------------


def test_a_port_asked_for_and_taken_names_its_owner(kvnet: Kvnet) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ran = kvnet("node", "start", "--listen", "127.0.0.1:0", "--api", f"127.0.0.1:{port}")
    assert (ran.code, ran.stdout) == (60, "")
    assert f"process {os.getpid()}" in ran.stderr
    assert "--api" in ran.stderr


def test_beyond_this_machine_the_endpoint_wants_a_token_and_checks_it(kvnet: Kvnet) -> None:
    ran = kvnet("node", "start", "--listen", "127.0.0.1:0", "--api", "0.0.0.0:0")
    assert (ran.code, ran.stdout) == (2, "")
    assert "api.token" in ran.stderr
    token = "0123456789abcdef"
    (kvnet.data_dir / "config.toml").write_text(f'[api]\ntoken = "{token}"\n')
    started, _ = kvnet.start("--api", "0.0.0.0:0")
    url = started["endpoint"][0].replace("0.0.0.0", "127.0.0.1")
    httpx_get = partial(httpx.get, timeout=TIMEOUT_S)
    assert httpx_get(f"{url}/v1/models").status_code == 401
    assert httpx_get(f"{url}/v1/models", headers={"authorization": "Bearer wrong"}).status_code == 401
    assert httpx_get(f"{url}/v1/models", headers={"authorization": f"Bearer {token}"}).status_code == 200
    assert httpx_get(f"{url}/v1/models", headers={"x-api-key": token}).status_code == 200
    assert httpx_get(f"{url}/health").status_code == 200
    assert token not in kvnet("config", "show").stdout


def test_a_node_that_is_told_to_stop_lets_its_answers_end(kvnet: Kvnet) -> None:
    write_model(kvnet.data_dir / "models" / TINY)
    kvnet.environment["KVNET_API_DRAIN_S"] = str(TIMEOUT_S)
    started, process = kvnet.start()
    (url,) = started["endpoint"]
    body = asked(("user", "Go on"), stream=True, **NEVER_END | {"max_tokens": 100})
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=TIMEOUT_S) as response:
        lines = response.iter_lines()
        while "content" not in next(lines):
            pass
        process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert process.wait(timeout=TIMEOUT_S) == 0
