"""``kvnet add``, ``ask`` and ``generate``: computing K/V, and generating with it."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from kvnet.errors import UsageError
from kvnet.format.hashes import ARTIFACT_PREFIX
from kvnet_node.invocation import Context, absolute, chosen_model, positive
from kvnet_node.operations.requests import (
    AddRequest,
    AddResult,
    AskRequest,
    AskResult,
    GenerateRequest,
    GenerateResult,
    Source,
)
from kvnet_node.output import escape, format_bytes, format_count, format_counted, format_seconds

MAX_CHAT_FILE_BYTES = 32 * 1024 * 1024


def add(
    *paths: Path,
    name: str,
    model: str | None = None,
    codec: str = "raw",
    dry_run: bool = False,
    context: Context,
) -> None:
    """Compute the K/V of files as a named context and keep it.

    Run again it computes only from the first changed token on.

    Args:
        paths: files, directories or git repositories.
        name: the context's name: a-z, 0-9, dot, underscore and hyphen.
        model: name or folder of the model; by default model.default, else the only shareable one.
        codec: how chunks are stored: raw, shuffle+zstd-1, or q8, which is lossy; raw,q8 makes an artifact of each.
        dry_run: say what would be done and stop.
    """
    if not paths:
        raise UsageError("kvnet add expects at least one file, directory or git repository", hint="kvnet add --help")
    for path in paths:
        if not path.expanduser().exists():
            raise UsageError(f"expected a file or directory, found nothing at {absolute(path)}")
    request = AddRequest([str(absolute(path)) for path in paths], name, chosen_model(context, model), codec, dry_run)
    result = context.run("add", request, AddResult)
    context.output.result(result, render_add)
    if not dry_run:
        context.output.message(f'ask it something: kvnet ask {result.name} "…"')


def render_add(result: AddResult) -> str:
    """What was added, or would be."""
    # What was skipped has been listed before the work began.
    if result.dry_run:
        wait = (
            f"about {format_seconds(result.prefill_s)} of prefill"
            if result.prefill_known
            else "prefill time unknown until this model was measured: kvnet selftest"
        )
        return (
            f"{format_count(result.tokens)} tokens of {format_counted(result.files, 'file')}, "
            f"{format_count(result.reused_tokens)} of them held already, {format_bytes(result.bytes)} of K/V, {wait}"
        )
    summary = (
        f"{format_count(result.tokens)} tokens of {format_counted(result.files, 'file')}: "
        f"{format_count(result.reused_tokens)} reused, {format_count(result.prefilled_tokens)} prefilled in "
        f"{format_seconds(result.prefill_s)}; {format_bytes(result.bytes)}, {format_bytes(result.new_bytes)} of it new"
    )
    others = "".join(f"\nin {codec}  {artifact}" for codec, artifact in result.others.items())
    return f"{result.name}@{result.version}  {result.artifact}{others}\n{summary}\nticket  {result.ticket}"


def ask(
    name: str,
    question: str,
    /,
    *,
    model: str | None = None,
    max_tokens: int = 256,
    no_reuse: bool = False,
    context: Context,
) -> None:
    """Answer a question over a named context, greedily.

    Args:
        name: the context, NAME or NAME@VERSION.
        question: what to ask.
        model: name or folder of the model; by default the one the context was added with.
        max_tokens: at most this many new tokens.
        no_reuse: compute everything: look nothing up, here or at peers.
    """
    if name.startswith(ARTIFACT_PREFIX):
        raise UsageError(
            "kvnet ask expects the name of a context, found an artifact hash",
            hint="kvnet list shows names; kvnet fetch HASH --name NAME gives one",
        )
    if not question.strip():
        raise UsageError("kvnet ask expects a question, found an empty text")
    chosen = chosen_model(context, model) if model is not None else None
    request = AskRequest(name, question, positive("--max-tokens", max_tokens), no_reuse, chosen)
    _finish(context, context.run("ask", request, AskResult))


def generate(
    *,
    model: str | None = None,
    prompt: str | None = None,
    chat: Annotated[
        Path | None, Parameter(help="a JSON file of OpenAI messages: an array, or an object with messages")
    ] = None,
    max_tokens: int = 256,
    no_reuse: bool = False,
    context: Context,
) -> None:
    """Generate from a prompt or a chat, reusing the longest prefix known here, then among peers.

    Args:
        model: name or folder of the model; by default model.default, else the only shareable one.
        prompt: the text of one user message.
        max_tokens: at most this many new tokens.
        no_reuse: compute everything: look nothing up, here or at peers.
    """
    if (prompt is None) == (chat is None):
        raise UsageError("kvnet generate expects either --prompt or --chat", hint="kvnet generate --help")
    if prompt is not None and not prompt:
        raise UsageError("--prompt expects a text, found an empty one")
    messages = read_chat(chat) if chat is not None else None
    request = GenerateRequest(
        chosen_model(context, model), prompt, messages, positive("--max-tokens", max_tokens), no_reuse
    )
    _finish(context, context.run("generate", request, GenerateResult))


def _finish(context: Context, result: GenerateResult) -> None:
    context.output.result(result, lambda _: "")  # the text has been streamed
    for line in explain(result):
        context.output.message(line)


def explain(result: GenerateResult) -> list[str]:
    """Where an answer's tokens came from, in words: one line per source, then how long it took."""
    lines = [_explain_source(source, result.prompt_tokens) for source in result.sources]
    if not lines:
        lines = [f"nothing of {format_count(result.prompt_tokens)} tokens was reused"]
    lines += [escape(reason) for reason in result.reasons]
    timing = f"first token after {format_seconds(result.ttft_s)} (prefill {format_seconds(result.prefill_s)}"
    timing += _saved(result.saved_s) if result.sources else ""
    if result.waited_s >= WORTH_TELLING_S:
        timing += f"; waited about {format_seconds(result.waited_s)} for the engine"
    end = f"cut at --max-tokens {result.max_tokens}" if result.finish_reason == "length" else result.finish_reason
    timing += f"), {end} after {format_seconds(result.decode_s)} more; policy {result.policy}"
    return [*lines, f"{timing}, {_VERDICTS[result.verdict]}" if result.sources else timing]


WORTH_TELLING_S = 0.5
"""What an answer waited for the engine is told from here on."""

_VERDICTS = {
    "EXACT": "bit-exact numerics (EXACT)",
    "TOLERANT": "other rounding possible (TOLERANT)",
}


def _saved(seconds: float) -> str:
    if seconds == 0:
        return ""
    amount = format_seconds(abs(seconds))
    return f"; reuse saved about {amount}" if seconds > 0 else f"; reuse took about {amount} longer than prefill"


def _explain_source(source: Source, prompt_tokens: int) -> str:
    where = {"ram": "memory", "disk": "this node's disk", "peer": source.peer_name or f"peer {source.peer}"}.get(
        source.source, source.source
    )
    signed = f", signed by {source.signed_by}" if source.signer else ""
    return escape(
        f"{format_count(source.tokens)} of {format_count(prompt_tokens)} tokens from {where} in "
        f"{format_seconds(source.seconds)} ({format_bytes(source.bytes)}){signed}"
    )


def read_chat(path: Path) -> list[dict[str, Any]]:
    """The messages of a chat file.

    Raises:
        UsageError: no such file, too large, or not OpenAI messages.
    """
    try:
        if path.stat().st_size > MAX_CHAT_FILE_BYTES:
            raise UsageError(f"--chat expects a file of at most {MAX_CHAT_FILE_BYTES} bytes, found more in {path}")
        value = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise UsageError(f"--chat expects a readable file: {path}: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise UsageError(f"--chat expects JSON, found something else in {path}: {error}") from error
    messages = value.get("messages") if isinstance(value, dict) else value
    if not (
        isinstance(messages, list)
        and messages
        and all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages)
    ):
        raise UsageError(
            f"--chat expects OpenAI messages, an array or an object with messages, each with a role; {path} has none"
        )
    return messages
