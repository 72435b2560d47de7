"""Messages into token ids: the chat template, frozen inputs, and where a named context ends.

Everything is tokenized once, as a whole; tokens of two tokenizations are never put together.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from kvnet.engine.prompts import FROZEN_MOMENT, JsonObject
from kvnet.errors import EngineError
from kvnet.format.prefix import common_prefix

# Two questions that differ in their first character. What they share of a rendering, every question shares.
_QUESTIONS = ("What does this say?", "7 lines, please.")
_SYSTEM_PROBE = "kvnetsystemroleprobe"

# Arguments of the rendering itself: stored inputs may come from a peer and must not reach them.
_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "sanitize_control_tokens",
        "padding",
        "processor_kwargs",
        "raise_exception",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
_MAX_TEMPLATE_WORDS = 200
_DATE_CALL = re.compile(r"""strftime_now\(\s*(?P<quote>['"])(?P<format>[^'"\\]*)(?P=quote)\s*\)""")
_ANY_DATE_CALL = re.compile(r"strftime_now\s*\(")


class PromptText:
    """A model's tokenizer and chat template.

    Args:
        tokenizer: mlx-lm's ``TokenizerWrapper``.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def tokenize(self, text: str) -> list[int]:
        """Tokens of plain text, with the tokenizer's own special tokens."""
        return [int(token) for token in self._tokenizer.encode(text)]

    def render(self, messages: Sequence[JsonObject], inputs: JsonObject) -> list[int]:
        """Tokens of a conversation, ready for the answer.

        Raises:
            EngineError: no template, a message that is not text, or the template refuses.
        """
        return self._apply(self.fitted(_plain(messages)), inputs, answer=True)

    def context_tokens(self, messages: Sequence[JsonObject], inputs: JsonObject) -> list[int]:
        """The tokens that every question after ``messages`` shares, at most to the end of their own rendering.

        Raises:
            EngineError: as ``render``.
        """
        plain = _plain(messages)
        inputs = _at_one_moment(inputs)
        first, second = (
            self._apply(self.fitted([*plain, {"role": "user", "content": question}]), inputs, answer=True)
            for question in _QUESTIONS
        )
        cut = common_prefix(first, second)
        try:
            own = self._apply(self.fitted(plain), inputs, answer=False)
        except EngineError:
            # Some templates cannot render messages without a question; then the questions alone decide.
            return first[:cut]
        return first[: min(cut, common_prefix(own, first))]

    @cached_property
    def has_system_role(self) -> bool:
        """Whether the template prints a system message; one that raises or drops it silently does not."""
        probe = [{"role": "system", "content": _SYSTEM_PROBE}, {"role": "user", "content": "a"}]
        try:
            return _SYSTEM_PROBE in self._guarded(probe, {}, tokenize=False, answer=True)
        except EngineError:
            return False

    @cached_property
    def _template_text(self) -> str:
        """The template's text; empty for one that is a program of mlx-lm's."""
        if self._tokenizer.chat_template is None:
            return ""
        return str(self._tokenizer.get_chat_template())

    def fitted(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with system text at the head of the first user message, where the template has no such role."""
        if self.has_system_role or not any(message["role"] == "system" for message in messages):
            return messages
        system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
        others = [message for message in messages if message["role"] != "system"]
        first = next((i for i, message in enumerate(others) if message["role"] == "user"), None)
        if first is None:
            return [{"role": "user", "content": system}, *others]
        merged = {"role": "user", "content": f"{system}\n\n{others[first]['content']}"}
        return [*others[:first], merged, *others[first + 1 :]]

    def _apply(self, messages: list[dict[str, str]], inputs: JsonObject, *, answer: bool) -> list[int]:
        tokens = self._guarded(messages, inputs, tokenize=True, answer=answer)
        return [int(token) for token in tokens]

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def rendered(self, messages: list[dict[str, Any]], inputs: JsonObject, *, answer: bool, tools: Any = None) -> str:
        """The text that a conversation is tokenized as; messages as mlx-lm's server passes them to the template.

        Raises:
            EngineError: no template, or it refuses.
        """
        return str(self._guarded(messages, inputs, tokenize=False, answer=answer, tools=tools))

    def _guarded(
        self, messages: list[dict[str, Any]], inputs: JsonObject, *, tokenize: bool, answer: bool, tools: Any = None
    ) -> Any:
        if not self._tokenizer.has_chat_template:
            raise EngineError(
                "the model has no chat template", hint="use an instruction-tuned model, or a plain prompt"
            )
        arguments = template_arguments(inputs)
        if (moment := arguments.pop(FROZEN_MOMENT, None)) and (template := self._template_text):
            arguments["chat_template"] = freeze_dates(template, moment)
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=tokenize, add_generation_prompt=answer, **arguments
            )
        except TemplateError as error:
            words = (error.message or "")[:_MAX_TEMPLATE_WORDS]
            raise EngineError(f"the chat template refuses these messages: {words}") from error
        except EngineError:
            raise
        except Exception as error:  # templates are programs; any failure of theirs is the model's
            raise EngineError(f"the chat template failed: {type(error).__name__}") from error


def template_arguments(inputs: JsonObject) -> dict[str, Any]:
    """Template inputs as arguments of the rendering; a frozen moment becomes a ``datetime``.

    Raises:
        EngineError: an input would reach the rendering itself, or the moment is not ISO 8601.
    """
    arguments: dict[str, Any] = dict(inputs)
    for name in arguments:
        if name in _RESERVED or not str(name).isidentifier():
            raise EngineError(f"template input {str(name)[:40]!r} is not allowed")
    if FROZEN_MOMENT in arguments:
        try:
            arguments[FROZEN_MOMENT] = datetime.fromisoformat(arguments[FROZEN_MOMENT])
        except (TypeError, ValueError):
            raise EngineError(f"template input {FROZEN_MOMENT!r}: expected an ISO 8601 moment") from None
    return arguments


def freeze_dates(template: str, moment: datetime) -> str:
    """The template with every ``strftime_now("format")`` replaced by what it returns at ``moment``.

    The rendering takes plain data only, so a clock cannot be passed in.

    Raises:
        EngineError: the template computes the format, so that its dates cannot be fixed.
    """
    frozen = _DATE_CALL.sub(lambda call: json.dumps(moment.strftime(call["format"]), ensure_ascii=False), template)
    if _ANY_DATE_CALL.search(frozen):
        raise EngineError("the chat template prints the date in a way that cannot be fixed")
    return frozen


def _at_one_moment(inputs: JsonObject) -> JsonObject:
    if FROZEN_MOMENT in inputs:
        return inputs
    # Renderings that are compared must not straddle midnight.
    return {**inputs, FROZEN_MOMENT: datetime.now().astimezone().replace(microsecond=0).isoformat()}


def _plain(messages: Sequence[JsonObject]) -> list[dict[str, str]]:
    if not messages:
        raise EngineError("expected at least one message, found none")
    return [{"role": _role(message), "content": _content(message.get("content"))} for message in messages]


def _role(message: Mapping[str, Any]) -> str:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise EngineError("a message needs a role: system, user or assistant")
    return role


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if all(isinstance(part, str) for part in parts):
            return "".join(parts)  # type: ignore[arg-type]
    raise EngineError("a message's content must be text; images and other inputs are not token ids")
