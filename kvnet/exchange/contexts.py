"""Named contexts: the messages and frozen template inputs that travel with an artifact, as RFC 8785 JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import rfc8785

from kvnet.errors import MalformedError

ROLES = ("system", "user", "assistant", "tool")

MAX_MESSAGES = 4096
"""Messages of one context; far above a conversation."""

MAX_TEMPLATE_INPUTS = 64
"""Frozen template inputs of one context."""


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    content: str


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    template_inputs: Annotated[dict[str, str], msgspec.Meta(max_length=MAX_TEMPLATE_INPUTS)]


@dataclass(frozen=True, slots=True)
class NamedContext:
    """What a question is asked over.

    Attributes:
        messages: chat messages with ``role`` and ``content``, in order.
        template_inputs: inputs of the chat template that would vary by themselves, frozen.
    """

    messages: tuple[Mapping[str, str], ...]
    template_inputs: Mapping[str, str]

    def with_question(self, question: str) -> list[Mapping[str, str]]:
        """The messages, and the question as one more from the user."""
        return [*self.messages, {"role": "user", "content": question}]


def document_context(text: str, template_inputs: Mapping[str, str]) -> NamedContext:
    """A context that is one system message holding ``text``."""
    return NamedContext(({"role": "system", "content": text},), dict(template_inputs))


def encode_context(context: NamedContext) -> bytes:
    """The one encoding of a context: RFC 8785 JSON, UTF-8."""
    messages: Sequence[Any] = [dict(message) for message in context.messages]
    return rfc8785.dumps({"messages": messages, "template_inputs": dict(context.template_inputs)})


def decode_context(data: bytes) -> NamedContext:
    """A context from bytes whose hash has been checked.

    Raises:
        MalformedError: not such a document, or not its one encoding.
    """
    try:
        document = msgspec.json.decode(data, type=_Document)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedError(f"expected the messages of a named context, found something else: {error}") from error
    unknown = sorted({message.role for message in document.messages} - set(ROLES))
    if unknown:
        raise MalformedError(f"expected messages with the roles {', '.join(ROLES)}, found {unknown[0][:32]!r}")
    context = NamedContext(
        tuple({"role": message.role, "content": message.content} for message in document.messages),
        dict(document.template_inputs),
    )
    if encode_context(context) != data:
        raise MalformedError("expected the messages of a named context in RFC 8785 JSON, found another encoding")
    return context
