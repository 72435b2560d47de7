"""The asker's end of the control socket: how a verb has the running node of its data directory do the work.

Plain blocking sockets: most verbs do nothing but ask, and would load trio for that alone.
"""

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

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

LAST_WORDS_S = 60.0
"""Silence after which a node that was told to cancel is left alone; a second Ctrl-C does so at once."""

RECEIVE_BYTES = 65536


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

    The connection is closed at the end, whatever that is; before the result is there, this cancels the operation. A
    Ctrl-C does too, and then waits for what the operation still has to say.

    Raises:
        KvnetError: of the class the operation raised in the node, or ``NodeGoneError``.
    """
    call = encode_frame(Call(CONTROL_VERSION, kvnet.__version__, operation, msgspec.Raw(msgspec.json.encode(request))))
    answer = _Answer(connection)
    with connection:
        try:
            connection.sendall(call)
        except OSError as error:
            raise _broken_off(error) from error
        try:
            while (reply := answer.next()) is not None:
                if reply.event:
                    on_event(_decoded(reply.event))
                elif reply.error is not None:
                    raise error_of(reply.error)
                elif reply.result:
                    return bytes(reply.result)
        except KeyboardInterrupt:
            _take_back(connection, answer, on_event)
            raise
    raise NodeGoneError("the running node ended before the operation did", hint="kvnet node start, then try again")


def _take_back(connection: socket.socket, answer: "_Answer", on_event: OnEvent) -> None:
    """Have the operation cancelled, and show what it says about that."""
    with suppress(OSError, NodeGoneError):
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(LAST_WORDS_S)
        while (reply := answer.next()) is not None and reply.event:
            on_event(_decoded(reply.event))


class _Answer:
    """The frames of a connection. Bytes that arrived stay here when a Ctrl-C ends the wait for more."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()

    def next(self) -> Reply | None:
        """The next frame; None at a clean end.

        Raises:
            NodeGoneError: the node broke off, or said something else.
        """
        try:
            if not self._fill(LENGTH_BYTES):
                if self._buffer:
                    raise cut_short(len(self._buffer))
                return None
            end = LENGTH_BYTES + frame_length(bytes(self._buffer[:LENGTH_BYTES]))
            if not self._fill(end):
                raise cut_short(len(self._buffer))
            reply = msgspec.json.decode(self._buffer[LENGTH_BYTES:end], type=Reply)
        except (OSError, msgspec.MsgspecError, ProtocolViolationError) as error:
            raise _broken_off(error) from error
        del self._buffer[:end]
        return reply

    def _fill(self, n_bytes: int) -> bool:
        while len(self._buffer) < n_bytes:
            received = self._connection.recv(RECEIVE_BYTES)
            if not received:
                return False
            self._buffer += received
        return True


def _decoded(event: msgspec.Raw) -> Progress | TextDelta | Note:
    try:
        return msgspec.json.decode(event, type=Progress | TextDelta | Note)
    except msgspec.MsgspecError as error:
        raise _broken_off(error) from error


def _broken_off(error: Exception) -> NodeGoneError:
    return NodeGoneError(f"the running node broke off: {error}", hint="kvnet node status")
