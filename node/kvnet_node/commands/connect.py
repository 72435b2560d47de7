"""``kvnet connect``: how to point another program at this node."""

from typing import Any, Literal

from kvnet_node.connecting import PLACEHOLDER_KEY, UNKNOWN_KEY, Endpoint, Guide, OfferedModel, Snippet, guide
from kvnet_node.invocation import Context, chosen_model
from kvnet_node.operations.requests import ConnectRequest, ConnectResult
from kvnet_node.output import escape

Client = Literal["claude-code", "open-webui", "zed", "cursor", "llm", "openai", "anthropic"]


def connect(client: Client, /, *, model: str | None = None, context: Context) -> None:
    """Print exactly what another program has to be told to use this node.

    Args:
        client: the program.
        model: MODEL or MODEL#NAME of /v1/models; by default the node's own choice.
    """
    result = context.run("connect", ConnectRequest(_model(context, model)), ConnectResult)
    # The token is this command's to read, as config.toml is its user's: no result carries it.
    key = context.config().api_token or UNKNOWN_KEY if result.wants_token else PLACEHOLDER_KEY
    endpoint = Endpoint(
        url=result.url,
        key=key,
        wants_key=result.wants_token,
        model=OfferedModel(result.model.id, result.model.window_tokens),
        models=[OfferedModel(each.id, each.window_tokens) for each in result.models],
    )
    made = guide(client, endpoint)
    context.output.result(record(client, endpoint, made), lambda _: render(made))
    if key == UNKNOWN_KEY:
        context.output.message(
            f"put the node's api.token in place of {UNKNOWN_KEY}: it is not in this command's settings"
        )
    if not result.running:
        context.output.message("the node is not running: kvnet node start")


def _model(context: Context, model: str | None) -> str | None:
    """The model to ask for; a folder is made absolute, a context stays behind its ``#``."""
    name, mark, rest = (model or "").partition("#")
    chosen = chosen_model(context, name or None)
    return f"{chosen or ''}{mark}{rest}" or None


def record(client: str, endpoint: Endpoint, made: Guide) -> dict[str, Any]:
    """The guide as one JSON object."""
    return {
        "type": "connect",
        "client": client,
        "base_url": made.base_url,
        "key": endpoint.key,
        "key_checked": endpoint.wants_key,
        "model": endpoint.model.id,
        "window_tokens": endpoint.model.window_tokens,
        "models": [model.id for model in endpoint.models],
        "environment": dict(made.environment),
        "snippets": [_snippet(each) for each in made.snippets],
        "notes": list(made.notes),
    }


def _snippet(each: Snippet) -> dict[str, Any]:
    return {"place": each.place, "format": each.format, "text": each.text, "instead": each.instead}


def render(made: Guide) -> str:
    """The guide as text: each snippet under a comment that says where it goes, then the notes."""
    parts = []
    for each in made.snippets:
        parts.append(f"# {'or, instead: ' if each.instead else ''}{each.place}")
        parts.append(escape(each.text, keep_newlines=True))
    return "\n".join([*parts, *(f"- {escape(note)}" for note in made.notes)])
