"""How to point other programs at this node: their own names of settings, filled in.

Pure functions. The names are those that the programs document; each one's test reads what is written here as the
program does. A key is written out because that is what these programs want; who calls this decides what it is.
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PLACEHOLDER_KEY = "kvnet"
"""For programs that insist on a key when the node wants none; what it says does not matter."""
UNKNOWN_KEY = "API-TOKEN-OF-THE-NODE"
"""Stands for a token that this command cannot see."""
FALLBACK_WINDOW_TOKENS = 32_768
"""For programs that insist on a window when the model does not say; the node refuses what is too long in any case."""
MAX_OUTPUT_TOKENS = 8192
"""Answers longer than this are rare, and what is set aside for them is missing for the prompt."""
CLAUDE_CODE_PROMPT_TOKENS = 24_000
"""What its system prompt and tools take before anything is asked, roughly, with common tokenizers."""
TIMEOUT_MS = 3_600_000
"""A first prefill of a long prompt takes minutes; programs give up after ten by themselves."""


_EVERYWHERE = frozenset({"0.0.0.0", "[::]", "", "*"})  # noqa: S104 - recognised, not bound to
_THIS_MACHINE = frozenset({"127.0.0.1", "localhost", "[::1]"})


@dataclass(frozen=True, slots=True)
class OfferedModel:
    """A model as ``/v1/models`` lists it; ``window_tokens`` is None when unknown."""

    id: str
    window_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What is to be used.

    Attributes:
        url: of the HTTP endpoint, without a path: ``http://127.0.0.1:5863``.
        key: to be sent; a placeholder when the node wants none.
        wants_key: whether the node checks it.
        model: the model to use.
        models: all there are, that one included.
    """

    url: str
    key: str
    wants_key: bool
    model: OfferedModel
    models: Sequence[OfferedModel]

    @property
    def openai_url(self) -> str:
        """The base URL of OpenAI-style clients."""
        return f"{self.url}/v1"


@dataclass(frozen=True, slots=True)
class Snippet:
    """A text to put somewhere.

    Attributes:
        place: a file, or what to do with it.
        format: ``sh``, ``json``, ``yaml``, ``toml`` or ``text``.
        text: ends with a line end.
        instead: it does the same as the one before it.
    """

    place: str
    format: str
    text: str
    instead: bool = False


@dataclass(frozen=True, slots=True)
class Guide:
    """How one program is set up.

    Attributes:
        base_url: as this program wants it.
        environment: variables to set, in order; empty when it reads none.
        snippets: texts to put in place.
        notes: what to know, and what to switch off.
    """

    base_url: str
    environment: Mapping[str, str] = field(default_factory=dict)
    snippets: Sequence[Snippet] = ()
    notes: Sequence[str] = ()


def endpoint_url(addresses: Sequence[str]) -> str:
    """The URL that programs on this machine use, out of the HOST:PORT texts that an endpoint listens on."""
    hosts = [address.rpartition(":") for address in addresses]
    # Whoever listens everywhere listens on this machine too; an address of this machine alone is the safest to name.
    named = ["127.0.0.1" if host in _EVERYWHERE else host for host, _, _ in hosts]
    best = min(range(len(hosts)), key=lambda i: (named[i] not in _THIS_MACHINE, i))
    return f"http://{named[best]}:{hosts[best][2]}"


def guide(client: str, endpoint: Endpoint) -> Guide:
    """How to set up a program of ``CLIENTS``."""
    return CLIENTS[client](endpoint)


def output_tokens(window_tokens: int) -> int:
    """How much of a window to set aside for an answer."""
    return max(min(MAX_OUTPUT_TOKENS, window_tokens // 4), 1)


def _exports(environment: Mapping[str, str], place: str = "in the shell, before starting it") -> Snippet:
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in environment.items()]
    return Snippet(place, "sh", "".join(lines))


def _json(place: str, value: Any, *, instead: bool = False) -> Snippet:
    return Snippet(place, "json", json.dumps(value, indent=2, ensure_ascii=False) + "\n", instead)


def _claude_code(endpoint: Endpoint) -> Guide:
    """Names: https://code.claude.com/docs/en/env-vars and …/model-config."""
    model = endpoint.model.id
    environment = {
        "ANTHROPIC_BASE_URL": endpoint.url,
        "ANTHROPIC_AUTH_TOKEN": endpoint.key,
        "ANTHROPIC_MODEL": model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
        "CLAUDE_CODE_SUBAGENT_MODEL": model,
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK": "1",
        "API_TIMEOUT_MS": str(TIMEOUT_MS),
    }
    if (window := endpoint.model.window_tokens) is not None:
        answer = output_tokens(window)
        # It compacts by the prompt alone; what an answer needs must be free besides.
        environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(window - answer)
        environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(answer)
    notes = [
        "unset ANTHROPIC_API_KEY: with both it warns, or asks which one to use.",
        "The three default models and the subagents' are set so that titles and other side jobs stay on this node.",
        (
            "CLAUDE_CODE_ATTRIBUTION_HEADER=0 leaves out the line that changes at the head of the system prompt; the "
            "node takes it out by itself as well (prompt.remove_billing_line)."
        ),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 stops telemetry, error reports and update checks.",
        "Web search and pictures need Anthropic's own models; requests with them are refused with the reason.",
    ]
    if window is not None and window < CLAUDE_CODE_PROMPT_TOKENS * 2:
        notes.append(
            f"A window of {window:,} tokens is small for it: its own prompt and tools take about "
            f"{CLAUDE_CODE_PROMPT_TOKENS:,}."
        )
    snippets = [_exports(environment), _json("~/.claude/settings.json", {"env": environment}, instead=True)]
    return Guide(endpoint.url, environment, snippets, notes)


def _open_webui(endpoint: Endpoint) -> Guide:
    """Names: https://docs.openwebui.com/getting-started/env-configuration."""
    environment = {
        "ENABLE_OPENAI_API": "true",
        "OPENAI_API_BASE_URL": endpoint.openai_url,
        "OPENAI_API_KEY": endpoint.key,
        "DEFAULT_MODELS": endpoint.model.id,
        "ENABLE_OLLAMA_API": "false",
        "ENABLE_TITLE_GENERATION": "false",
        "ENABLE_TAGS_GENERATION": "false",
        "ENABLE_FOLLOW_UP_GENERATION": "false",
        "ENABLE_AUTOCOMPLETE_GENERATION": "false",
    }
    port = endpoint.url.rpartition(":")[2]
    notes = [
        "These are read at the first start only; later it is Admin Panel > Settings > Connections > OpenAI API.",
        "Every model and named context of the node appears in its list: pick MODEL#NAME and send only the question.",
        "Titles, tags and follow-ups are switched off because each is one more request over the whole conversation.",
        (
            f"In a container use http://host.docker.internal:{port}/v1; where that does not reach this machine's "
            "127.0.0.1 (Docker on Linux), use --network=host."
        ),
    ]
    return Guide(endpoint.openai_url, environment, [_exports(environment)], notes)


def _zed(endpoint: Endpoint) -> Guide:
    """Names: https://zed.dev/docs/ai/use-api-access, section OpenAI-compatible endpoints."""
    models = []
    for model in _chosen_first(endpoint):
        window = model.window_tokens or FALLBACK_WINDOW_TOKENS
        capabilities = {
            "tools": True,
            "images": False,
            "parallel_tool_calls": True,
            "prompt_cache_key": True,
            "chat_completions": True,
            "interleaved_reasoning": True,
            "max_tokens_parameter": False,
        }
        models.append(
            {
                "name": model.id,
                "display_name": model.id,
                "max_tokens": window,
                "max_output_tokens": output_tokens(window),
                "capabilities": capabilities,
            }
        )
    provider = {"api_url": endpoint.openai_url, "available_models": models}
    environment = {"KVNET_API_KEY": endpoint.key}
    notes = [
        "Zed does not ask for the list of models: run this again after adding contexts.",
        "The key belongs into agent: open settings > LLM Providers > kvnet, or into KVNET_API_KEY where Zed starts.",
    ]
    settings = {"language_models": {"openai_compatible": {"kvnet": provider}}}
    return Guide(
        endpoint.openai_url, environment, [_json("~/.config/zed/settings.json", settings), _exports(environment)], notes
    )


def _cursor(endpoint: Endpoint) -> Guide:
    """Names: Cursor Settings > Models > API Keys. Its servers, not the editor, call the URL."""
    fields = {
        "OpenAI API Key": endpoint.key,
        "Override OpenAI Base URL": "https://YOUR-HOST/v1",
        "Add model": endpoint.model.id,
    }
    notes = [
        (
            f"Cursor's servers send the requests, not the editor: {endpoint.openai_url} cannot be reached from there. "
            "It needs a public HTTPS address that leads here (a tunnel or a reverse proxy), in place of YOUR-HOST."
        ),
        "Your prompts and this model's answers then pass through Cursor's servers and the tunnel.",
        "Behind a public address set a token, and name the host, in the node's config.toml as above.",
        (
            "The override holds for all its OpenAI models; tab completion and, by its documentation, agent mode do not "
            "use it."
        ),
    ]
    settings = '[api]\ntoken = "A-LONG-RANDOM-TEXT"\nallowed_hosts = ["YOUR-HOST"]\n'
    snippets = [
        Snippet("Cursor Settings > Models > API Keys", "text", "".join(f"{k}: {v}\n" for k, v in fields.items())),
        Snippet("config.toml in the node's data directory", "toml", settings),
    ]
    return Guide("https://YOUR-HOST/v1", {}, snippets, notes)


def _llm(endpoint: Endpoint) -> Guide:
    """Names: https://llm.datasette.io/en/stable/other-models.html, section OpenAI-compatible models."""
    lines = []
    for model in _chosen_first(endpoint):
        # A text in JSON is one in YAML.
        lines += [f"- model_id: {json.dumps('kvnet/' + model.id)}\n", f"  model_name: {json.dumps(model.id)}\n"]
        lines += [f"  api_base: {json.dumps(endpoint.openai_url)}\n"]
        if endpoint.wants_key:
            lines.append("  api_key_name: kvnet\n")
        lines += ["  supports_tools: true\n", "  supports_schema: true\n"]
    notes = [f"Then: llm -m {shlex.quote('kvnet/' + endpoint.model.id)} 'your question'"]
    if endpoint.wants_key:
        notes.insert(0, f"Store the key once: llm keys set kvnet --value {shlex.quote(endpoint.key)}")
    place = 'extra-openai-models.yaml in the folder that this prints: dirname "$(llm logs path)"'
    return Guide(endpoint.openai_url, {}, [Snippet(place, "yaml", "".join(lines))], notes)


def _openai(endpoint: Endpoint) -> Guide:
    """Names: the ``openai`` packages read both variables by themselves."""
    environment = {"OPENAI_BASE_URL": endpoint.openai_url, "OPENAI_API_KEY": endpoint.key}
    notes = [f"The model is {endpoint.model.id!r}; prompt_cache_key and stream_options are understood."]
    return Guide(endpoint.openai_url, environment, [_exports(environment)], notes)


def _anthropic(endpoint: Endpoint) -> Guide:
    """Names: the ``anthropic`` packages read both variables by themselves."""
    environment = {"ANTHROPIC_BASE_URL": endpoint.url, "ANTHROPIC_API_KEY": endpoint.key}
    notes = [f"The model is {endpoint.model.id!r}; cache_control is understood."]
    return Guide(endpoint.url, environment, [_exports(environment)], notes)


def _chosen_first(endpoint: Endpoint) -> list[OfferedModel]:
    return [endpoint.model, *(model for model in endpoint.models if model.id != endpoint.model.id)]


CLIENTS: Mapping[str, Callable[[Endpoint], Guide]] = {
    "claude-code": _claude_code,
    "open-webui": _open_webui,
    "zed": _zed,
    "cursor": _cursor,
    "llm": _llm,
    "openai": _openai,
    "anthropic": _anthropic,
}
"""Every program there is a guide for, by the name it has on the command line."""
