"""What every message is, and how it becomes the body of a frame and back."""

from typing import Any

import msgspec

from kvnet.errors import MalformedError, ProtocolViolationError
from kvnet.format import cbor
from kvnet.protocol.framing import MAX_FRAME_BYTES


class BaseMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", kw_only=True):
    """Base of all messages."""


def encode_message(message: BaseMessage) -> bytes:
    """The body of a frame."""
    return cbor.encode_struct(message)


def decode_body(kind: Any, body: bytes, what: str) -> Any:
    """The message in the body of a frame.

    Args:
        kind: a class of messages or a union of them.
        body: as it came, at most `MAX_FRAME_BYTES`.
        what: `kind` in words, for the error.

    Raises:
        ProtocolViolationError: anything else.
    """
    try:
        return cbor.decode_as(kind, body, max_bytes=MAX_FRAME_BYTES, what=what)
    except MalformedError as error:
        # The reason may quote what the peer sent: cut it and escape it.
        raise ProtocolViolationError(f"expected a {what}: {str(error)[:200]!a}") from error
