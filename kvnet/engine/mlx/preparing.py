"""A request body into token ids, exactly as mlx-lm's server would, and the places where other prompts may part from it.

Everything is tokenized once, as a whole.
"""

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

from kvnet.engine.mlx.boundaries import Conversation, Tokenized, boundaries_of, plain_boundaries
from kvnet.engine.mlx.parameters import parse_body
from kvnet.engine.mlx.text import PromptText
from kvnet.engine.prompts import Boundary, JsonObject, PreparedPrompt, PromptKind, PromptRequest
from kvnet.errors import EngineError, PromptError, WindowError
from kvnet.format.limits import MAX_TOKENS


class Preparer:
    """Prepares prompts for a loaded model.

    Args:
        tokenizer: mlx-lm's wrapper.
        text: its chat template.
        live_tokens: of how many tokens of a prompt a live cache holds the K/V.
    """

    def __init__(self, tokenizer: Any, text: PromptText, live_tokens: Callable[[Sequence[int]], int]) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._live_tokens = live_tokens

    def prepare(self, request: PromptRequest) -> PreparedPrompt:
        """See ``Engine.prepare``.

        Raises:
            PromptError: says what was expected and found.
            WindowError: the prompt is longer than any window, and than what crosses to the node.
        """
        try:
            body = parse_body(request.body)
        except ValueError as error:
            raise PromptError(str(error)) from None
        if request.kind == PromptKind.TEXT:
            tokens, joins = self._plain(body.get("prompt"))
            boundaries, stable = plain_boundaries(tokens, joins=joins)
        else:
            tokens, boundaries, stable = self._conversation(body, request.template_inputs, request.marks)
        if len(tokens) > MAX_TOKENS:
            raise WindowError(
                f"no model's window is beyond {MAX_TOKENS:,} tokens; the prompt has {len(tokens):,}",
                hint="shorten the prompt",
            )
        return PreparedPrompt(tuple(tokens), boundaries, stable, min(self._live_tokens(tokens), len(tokens) - 1))

    def _plain(self, prompt: Any) -> tuple[list[int], bool]:
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            [prompt] = prompt
        if isinstance(prompt, str):
            tokens = self._text.tokenize(prompt)
        elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
            tokens = prompt
            if wrong := [token for token in tokens if not 0 <= token < len(self._tokenizer)]:
                raise PromptError(f"prompt: token ids are below {len(self._tokenizer):,}, found {wrong[0]}")
        else:
            raise PromptError("prompt: expected one text, or one list of token ids")
        if not tokens:
            raise PromptError("prompt: expected at least one token, found none")
        return tokens, isinstance(prompt, str)

    def _conversation(
        self, body: dict[str, Any], frozen: JsonObject, marks: tuple[int, ...]
    ) -> tuple[list[int], tuple[Boundary, ...], int]:
        messages = checked_messages(body.get("messages"))
        if not self._tokenizer.has_chat_template:
            tokens = self._without_template(messages, body.get("role_mapping"))
            return tokens, *plain_boundaries(tokens, joins=True)
        inputs = body.get("chat_template_kwargs") or {}
        if not isinstance(inputs, dict):
            raise PromptError("chat_template_kwargs: expected an object")
        tools = body.get("tools") or None
        if tools is not None and not isinstance(tools, list):
            raise PromptError("tools: expected a list")
        # What a context was stored with is what its tokens were made with, whatever the request says.
        inputs = {**inputs, **frozen}

        def render(some: list[dict[str, Any]], answer: bool, with_tools: bool) -> str:
            return self._text.rendered(some, inputs, answer=answer, tools=tools if with_tools else None)

        try:
            fitted = self._text.fitted(messages)
            whole = Tokenized(self._tokenizer, render(fitted, True, True))
        except EngineError as error:
            raise PromptError(error.message, hint=error.hint) from error
        merged = len(messages) - len(fitted)
        talk = Conversation(fitted, merged, marks, tools is not None, whole, render)
        return whole.tokens, *boundaries_of(talk)

    def _without_template(self, messages: list[dict[str, Any]], role_mapping: Any) -> list[int]:
        from mlx_lm.server import convert_chat

        if role_mapping is not None and not isinstance(role_mapping, dict):
            raise PromptError("role_mapping: expected an object")
        return self._text.tokenize(convert_chat(messages, role_mapping))


def checked_messages(found: Any) -> list[dict[str, Any]]:
    """Messages as mlx-lm's server passes them to the template: a copy, contents joined, tool arguments parsed.

    Raises:
        PromptError: says where, what was expected and what was found.
    """
    from mlx_lm.server import process_message_content

    if not isinstance(found, list) or not found:
        what = "none" if found is None or found == [] else type(found).__name__
        raise PromptError(f"messages: expected a list of at least one message, found {what}")
    for i, message in enumerate(found):
        _check_message(f"messages[{i}]", message)
    messages: list[dict[str, Any]] = copy.deepcopy(found)
    try:
        process_message_content(messages)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PromptError(f"messages: {type(error).__name__} in a message's content or tool calls") from error
    return messages


def _check_message(where: str, message: Any) -> None:
    if not isinstance(message, dict):
        raise PromptError(f"{where}: expected an object with role and content, found {type(message).__name__}")
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise PromptError(f"{where}.role: expected a text such as system, user, assistant or tool")
    _check_content(f"{where}.content", message.get("content"))
    calls = message.get("tool_calls")
    if calls is None:
        return
    if not isinstance(calls, list):
        raise PromptError(f"{where}.tool_calls: expected a list, found {type(calls).__name__}")
    for i, call in enumerate(calls):
        _check_call(f"{where}.tool_calls[{i}]", call)


def _check_content(where: str, content: Any) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise PromptError(f"{where}: expected a text or a list of text parts, found {type(content).__name__}")
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            raise PromptError(
                f"{where}[{i}]: expected a part of type text, found {str(kind)[:40]!r}",
                hint="images, audio and files are not supported",
            )
        if not isinstance(part.get("text"), str):
            raise PromptError(f"{where}[{i}].text: expected a text")


def _check_call(where: str, call: Any) -> None:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise PromptError(f"{where}.function: expected an object with name and arguments")
    arguments = function.get("arguments")
    if not isinstance(arguments, str) or not arguments:
        return
    try:
        json.loads(arguments)
    except (ValueError, RecursionError) as error:
        at = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise PromptError(f"{where}.function.arguments: expected JSON, which breaks{at}") from None
