"""What is printed for other programs is what they read."""

import json
import subprocess
import tomllib
from typing import Any, get_args

import pytest

from kvnet_node.commands.connect import Client, record, render
from kvnet_node.connecting import (
    CLIENTS,
    PLACEHOLDER_KEY,
    Endpoint,
    Guide,
    OfferedModel,
    Snippet,
    endpoint_url,
    guide,
    output_tokens,
)

yaml = pytest.importorskip("yaml")
URL = "http://127.0.0.1:5863"
MODEL = OfferedModel("org/Model-4bit#it's docs", 131_072)
OTHER = OfferedModel("other")


def endpoint(*, key: str = PLACEHOLDER_KEY, wants_key: bool = False, model: OfferedModel = MODEL) -> Endpoint:
    return Endpoint(URL, key, wants_key, model, [OTHER, model])


def snippet(made: Guide, format_: str) -> Snippet:
    (found,) = [each for each in made.snippets if each.format == format_]
    return found


def in_a_shell(text: str) -> dict[str, str]:
    """The environment that these lines make."""
    done = subprocess.run(["/bin/sh", "-c", f"{text}\nenv -0"], capture_output=True, text=True, check=True, env={})
    return dict(each.split("=", 1) for each in done.stdout.split("\0") if each)


def test_every_client_has_a_guide_and_nothing_else_does() -> None:
    assert set(get_args(Client)) == set(CLIENTS)


@pytest.mark.parametrize("client", CLIENTS)
def test_every_guide_names_the_address_the_model_and_what_to_know(client: str) -> None:
    made = guide(client, endpoint())
    shown = render(made)
    assert made.notes
    assert made.base_url in shown
    assert MODEL.id in json.dumps(record(client, endpoint(), made))
    assert shown == render(guide(client, endpoint()))


@pytest.mark.parametrize("client", [name for name in CLIENTS if name not in ("cursor", "llm")])
def test_a_shell_makes_the_same_environment_of_it(client: str) -> None:
    made = guide(client, endpoint(key="a b'c$"))
    found = in_a_shell(snippet(made, "sh").text)
    assert {name: found[name] for name in made.environment} == made.environment


@pytest.mark.parametrize("client", [name for name in CLIENTS if name != "cursor"])
def test_the_address_is_the_endpoint_s(client: str) -> None:
    expected = URL if client in ("claude-code", "anthropic") else f"{URL}/v1"
    assert guide(client, endpoint()).base_url == expected


def test_claude_code_finds_the_same_in_its_settings_file() -> None:
    made = guide("claude-code", endpoint(key="secret", wants_key=True))
    settings = json.loads(snippet(made, "json").text)
    assert settings == {"env": made.environment}
    assert settings["env"]["ANTHROPIC_BASE_URL"] == URL
    assert settings["env"]["ANTHROPIC_AUTH_TOKEN"] == "secret"
    assert all(isinstance(value, str) for value in settings["env"].values())


def test_no_job_of_claude_code_asks_for_a_model_that_is_not_here() -> None:
    environment = guide("claude-code", endpoint()).environment
    models = {name: value for name, value in environment.items() if name.endswith("_MODEL")}
    assert {"ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"} <= set(models)
    assert set(models.values()) == {MODEL.id}


def test_prompt_and_answer_of_claude_code_fit_into_the_window() -> None:
    environment = guide("claude-code", endpoint()).environment
    sizes = [int(environment[f"CLAUDE_CODE_MAX_{what}_TOKENS"]) for what in ("CONTEXT", "OUTPUT")]
    assert sum(sizes) == MODEL.window_tokens
    unknown = guide("claude-code", endpoint(model=OTHER)).environment
    assert not any("TOKENS" in name for name in unknown)


def test_a_window_too_small_for_claude_code_is_said() -> None:
    notes = guide("claude-code", endpoint(model=OfferedModel("m", 8192))).notes
    assert any("8,192 tokens is small" in note for note in notes)


def test_zed_lists_every_model_with_its_window() -> None:
    settings = json.loads(snippet(guide("zed", endpoint()), "json").text)
    provider: dict[str, Any] = settings["language_models"]["openai_compatible"]["kvnet"]
    assert provider["api_url"] == f"{URL}/v1"
    assert [model["name"] for model in provider["available_models"]] == [MODEL.id, OTHER.id]
    assert [model["max_tokens"] for model in provider["available_models"]] == [131_072, 32_768]


def test_llm_reads_its_models_and_asks_for_a_key_only_when_there_is_one() -> None:
    models = yaml.safe_load(snippet(guide("llm", endpoint()), "yaml").text)
    assert [model["model_name"] for model in models] == [MODEL.id, OTHER.id]
    assert all(model["api_base"] == f"{URL}/v1" for model in models)
    assert all("api_key_name" not in model for model in models)
    with_key = guide("llm", endpoint(key="secret", wants_key=True))
    assert all(model["api_key_name"] == "kvnet" for model in yaml.safe_load(snippet(with_key, "yaml").text))
    assert any("llm keys set kvnet --value secret" in note for note in with_key.notes)


def test_cursor_is_told_that_its_servers_cannot_reach_this_machine() -> None:
    made = guide("cursor", endpoint())
    assert any("servers" in note and "cannot be reached" in note for note in made.notes)
    assert tomllib.loads(snippet(made, "toml").text)["api"]["allowed_hosts"] == ["YOUR-HOST"]
    assert "Override OpenAI Base URL: https://YOUR-HOST/v1" in snippet(made, "text").text


@pytest.mark.parametrize(
    ("addresses", "url"),
    [
        (["127.0.0.1:5863"], URL),
        (["0.0.0.0:7000"], "http://127.0.0.1:7000"),
        (["[::]:7000"], "http://127.0.0.1:7000"),
        (["192.168.1.9:7000", "127.0.0.1:7001"], "http://127.0.0.1:7001"),
        (["192.168.1.9:7000"], "http://192.168.1.9:7000"),
        (["[::1]:7000"], "http://[::1]:7000"),
    ],
)
def test_programs_on_this_machine_use_the_nearest_address(addresses: list[str], url: str) -> None:
    assert endpoint_url(addresses) == url


@pytest.mark.parametrize(("window", "tokens"), [(131_072, 8192), (4096, 1024), (1, 1)])
def test_an_answer_takes_at_most_a_quarter_of_the_window(window: int, tokens: int) -> None:
    assert output_tokens(window) == tokens
