"""The asker's end of the control socket: how a verb has the running node of its data directory do the work.

Plain blocking sockets: most verbs do nothing but ask, and would load trio for that alone.
"""

import os
import socket
from pathlib import Path
from typing import IO, Any

import msgspec

import kvnet
from kvnet.errors import KvnetError, ProtocolViolationError
from kvnet.store.lock import DataDirLock
from kvnet_node.control_frames import (
    CONTROL_VERSION,
    LENGTH_BYTES,
    Call,
    OnEvent,
    Reply,
    cut_short,
    encode_frame,
    frame_length,
)
from kvnet_node.events import Note, Progress, TextDelta
from kvnet_node.failures import error_of


class NodeGoneError(KvnetError):
    """The running node ended before the operation did."""

    code = "node_gone"


def call_running_node(data_dir: Path, operation: str, request: Any, on_event: OnEvent) -> bytes | None:
    """Have the running node of a data directory run an operation.

    Returns:
        The JSON of its result; None when no node answers.

    Raises:
        KvnetError: as `call_node`.
    """
    owner = DataDirLock(data_dir).owner()
    if owner is None or not owner.control_socket:
        return None
    connection = connect_control(Path(owner.control_socket))
    return call_node(connection, operation, request, on_event) if connection is not None else None


def connect_control(path: Path) -> socket.socket | None:
    """A connection to the node listening there; None when nobody does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(os.fspath(path))
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise
    return connection


def call_node(connection: socket.socket, operation: str, request: Any, on_event: OnEvent) -> bytes:
    """Have the node at the other end run an operation; returns the JSON of its result.

    The connection is closed at the end, whatever that is; before the result is there, this cancels the operation.

    Raises:
        KvnetError: of the class the operation raised in the node, or ``NodeGoneError``.
    """
    call = encode_frame(Call(CONTROL_VERSION, kvnet.__version__, operation, msgspec.Raw(msgspec.json.encode(request))))
    with connection, connection.makefile("rb") as answer:
        try:
            connection.sendall(call)
        except OSError as error:
            raise _broken_off(error) from error
        while (reply := _next_reply(answer)) is not None:
            if reply.event:
                on_event(_decoded(reply.event))
            elif reply.error is not None:
                raise error_of(reply.error)
            elif reply.result:
                return bytes(reply.result)
    raise NodeGoneError("the running node ended before the operation did", hint="kvnet node start, then try again")


def _next_reply(answer: IO[bytes]) -> Reply | None:
    """The next frame; None at a clean end."""
    try:
        head = answer.read(LENGTH_BYTES)
        if not head:
            return None
        if len(head) < LENGTH_BYTES:
            raise cut_short(len(head))
        length = frame_length(head)
        data = answer.read(length)
        if len(data) < length:
            raise cut_short(LENGTH_BYTES + len(data))
        return msgspec.json.decode(data, type=Reply)
    except (OSError, msgspec.MsgspecError, ProtocolViolationError) as error:
        raise _broken_off(error) from error


def _decoded(event: msgspec.Raw) -> Progress | TextDelta | Note:
    try:
        return msgspec.json.decode(event, type=Progress | TextDelta | Note)
    except msgspec.MsgspecError as error:
        raise _broken_off(error) from error


def _broken_off(error: Exception) -> NodeGoneError:
    return NodeGoneError(f"the running node broke off: {error}", hint="kvnet node status")
