r"""Putting a named context in front of a request, so that both are one prompt.

The context's messages come first, as they were stored, and the request's own after them. A request that brings its
own system text as well has it added to the end of the context's system message, after an empty line: many templates
refuse a second system message, and some leave it out without a word. The prompt is then that of one request with
``CONTEXT + "\n\n" + SYSTEM`` as its system message, and begins with the context's tokens all the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvnet.exchange.contexts import NamedContext
from kvnet_node.api.failures import invalid

SYSTEM_ROLES = frozenset({"system", "developer"})
JOINT = "\n\n"


@dataclass(frozen=True, slots=True)
class Merged:
    """A body with a context in front.

    Attributes:
        body: what to run.
        own_system: how many messages of the request became part of the context's system message.
        shift: by how much every later message has moved.
    """

    body: dict[str, Any]
    own_system: int
    shift: int

    def mark(self, n_messages: int) -> int:
        """A message count of the request, in the merged body."""
        return max(n_messages, self.own_system) + self.shift


def with_context(body: Mapping[str, Any], context: NamedContext) -> Merged:
    """A chat body whose messages begin with those of a named context.

    Raises:
        ApiError: 400: ``messages`` is no list, or a system message holds something other than text.
    """
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise invalid(f"expected messages to be a list, found {type(messages).__name__}", param="messages")
    own = next((i for i, message in enumerate(messages) if _role(message) not in SYSTEM_ROLES), len(messages))
    stored: list[dict[str, Any]] = [dict(message) for message in context.messages]
    if own:
        _add_system(stored, [_text(message) for message in messages[:own]])
    return Merged({**body, "messages": [*stored, *messages[own:]]}, own, len(stored) - own)


def _add_system(stored: list[dict[str, Any]], texts: Sequence[str]) -> None:
    added = JOINT.join(text for text in texts if text)
    for message in stored:
        if message["role"] in SYSTEM_ROLES:
            if added:
                message["content"] = f"{message['content']}{JOINT}{added}"
            return
    stored.insert(0, {"role": "system", "content": added})


def _role(message: Any) -> str:
    role = message.get("role") if isinstance(message, dict) else None
    return role if isinstance(role, str) else ""


def _text(message: Mapping[str, Any]) -> str:
    """The text of a system message: a text, or a list of text parts."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise invalid("expected a system message to hold text, found something else", param="messages")
    return "".join(text for text in texts if isinstance(text, str))
