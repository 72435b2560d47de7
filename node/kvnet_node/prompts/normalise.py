"""Taking out of a request what varies by itself and means nothing to the model, before it becomes a prompt.

Some agents put a line for the accounting of their own service at the head of the system prompt::

    x-anthropic-billing-header: cc_version=2.1.39.c39; cc_entrypoint=cli; cch=56445;

One of its values is another one with every request, so that no two requests share more than the first few tokens. The
line stands in the first system block, alone or before the text of the next block, with a line end between or without.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BILLING_LINE = "billing line"
"""What ``Removed.kind`` says of the line for accounting."""

BILLING_NAME = "x-anthropic-billing-header"
"""What the line begins with."""

_SYSTEM_ROLES = ("system", "developer")
# Its name, then NAME=VALUE groups that a semicolon ends; the last one may be ended by the line. Without any such group
# the form is one of the future: then it is the whole line. Text that follows the last group on the same line was glued
# to it and stays.
_GROUP = r"[ \t]*[^;\s=]+=[^;\s]*;"
_LINE_END = r"[ \t]*(?:\r\n|\n|\r|\Z)"
_LINE = re.compile(
    rf"{BILLING_NAME}:"
    rf"(?:(?:{_GROUP})*[ \t]*[^;\s=]+=[^;\s]*{_LINE_END}|(?:{_GROUP})+(?:{_LINE_END}|[ \t]*)|[^\r\n]*{_LINE_END})",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Rules:
    """What may be taken out.

    Attributes:
        billing_line: the line for accounting at the head of the system prompt.
    """

    billing_line: bool = True


@dataclass(frozen=True, slots=True)
class Removed:
    """Something that was taken out: what kind, how many characters, and from where ("system" or "messages").

    The text itself is not kept.
    """

    kind: str
    characters: int
    where: str


@dataclass(frozen=True, slots=True)
class Normalised:
    """A request body to run, and what it lacks of the one that came."""

    body: dict[str, Any]
    removed: tuple[Removed, ...]


def normalise(body: Mapping[str, Any], rules: Rules = Rules()) -> Normalised:
    """Take out of a request body what ``rules`` name.

    Looks only at the head of the system prompt: ``system`` of an Anthropic-style body (a text or blocks) and the first
    of ``messages`` when its role is system or developer (a text or parts). Everything else is left as it is, whatever
    its form: a body that is not well-formed is for its reader to refuse.

    Args:
        body: the JSON body of a request, OpenAI or Anthropic style; not changed.
        rules: what may be taken out.
    """
    copy = dict(body)
    removed: list[Removed] = []
    if rules.billing_line:
        _without_line_in_system(copy, removed)
        _without_line_in_messages(copy, removed)
    return Normalised(copy, tuple(removed))


def describe_removed(removed: Sequence[Removed]) -> str:
    """What was taken out, in words without any of the text: ``billing line (81 characters)``; "" for nothing."""
    return ", ".join(f"{each.kind} ({each.characters} characters)" for each in removed)


def _without_line_in_system(body: dict[str, Any], removed: list[Removed]) -> None:
    content, characters = _without_line(body.get("system"))
    if not characters:
        return
    removed.append(Removed(BILLING_LINE, characters, "system"))
    if content:
        body["system"] = content
    else:
        del body["system"]


def _without_line_in_messages(body: dict[str, Any], removed: list[Removed]) -> None:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not isinstance(messages[0], dict):
        return
    first: dict[str, Any] = messages[0]
    if first.get("role") not in _SYSTEM_ROLES:
        return
    content, characters = _without_line(first.get("content"))
    if not characters:
        return
    removed.append(Removed(BILLING_LINE, characters, "messages"))
    body["messages"] = [{**first, "content": content}, *messages[1:]] if content else messages[1:]


def _without_line(content: Any) -> tuple[Any, int]:
    """The content of a system prompt without the line, and how many characters that took."""
    if isinstance(content, str):
        return _cut(content)
    if not isinstance(content, list):
        return content, 0
    kept: list[Any] = []
    total = 0
    for index, block in enumerate(content):
        text = block.get("text") if isinstance(block, dict) else None
        rest, characters = _cut(text) if isinstance(text, str) else ("", 0)
        total += characters
        if rest.strip() or not (characters or (isinstance(text, str) and not text.strip())):
            # The first text that is more than the line, or no text at all: what follows is not the head any more.
            kept += [{**block, "text": rest} if characters else block, *content[index + 1 :]]
            break
        if not characters:
            kept.append(block)
    return (kept if total else content), total


def _cut(text: str) -> tuple[str, int]:
    start = len(text) - len(text.lstrip())
    end = start
    while match := _LINE.match(text, end):
        end = match.end()
    return text[:start] + text[end:], end - start
