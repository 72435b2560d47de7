"""What a verb and the running node say to each other over the control socket.

One Unix socket, 0600, one operation per connection. Each direction carries frames of a big-endian 32-bit length and
that many bytes of JSON. The asker sends one request; the node answers with any number of events and one result or
error. An asker that goes away cancels its operation.
"""

import struct
from collections.abc import Callable
from typing import Any

import msgspec

from kvnet.errors import ProtocolViolationError
from kvnet_node.events import Event
from kvnet_node.failures import Failure

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""A chat with a long history fits; a runaway length does not."""
CONTROL_VERSION = 1

LENGTH_BYTES = 4
_LENGTH = struct.Struct(">I")

OnEvent = Callable[[Event], None]


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the asker sends."""

    control_version: int
    kvnet_version: str
    operation: str
    request: msgspec.Raw


_ABSENT = msgspec.Raw()
"""Raw JSON cannot be optional; what is not there is this very object, which is left out when written."""


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """One frame of the answer; exactly one field is set, and a result or an error is the last."""

    event: msgspec.Raw = _ABSENT
    result: msgspec.Raw = _ABSENT
    error: Failure | None = None


def encode_frame(value: Any) -> bytes:
    """One value as a frame.

    Raises:
        ProtocolViolationError: it is over ``MAX_FRAME_BYTES``.
    """
    data = msgspec.json.encode(value)
    if len(data) > MAX_FRAME_BYTES:
        raise ProtocolViolationError(f"expected at most {MAX_FRAME_BYTES} bytes in one frame, found {len(data)}")
    return _LENGTH.pack(len(data)) + data


def frame_length(head: bytes | bytearray) -> int:
    """How many bytes follow the first ``LENGTH_BYTES`` of a frame.

    Raises:
        ProtocolViolationError: over ``MAX_FRAME_BYTES``.
    """
    (length,) = _LENGTH.unpack_from(head)
    if length > MAX_FRAME_BYTES:
        raise ProtocolViolationError(f"expected at most {MAX_FRAME_BYTES} bytes in one frame, found {length}")
    return int(length)


def cut_short(n_bytes: int) -> ProtocolViolationError:
    """The error for an end inside a frame after so many of its bytes."""
    return ProtocolViolationError(f"expected a whole frame, found the end after {n_bytes} bytes")
