"""The asker's end of the control socket: how a verb has the running node of its data directory do the work.

Plain blocking sockets: most verbs do nothing but ask, and would load trio for that alone.
"""

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import kvnet
from kvnet.errors import NodeGoneError, NodeSilentError, ProtocolViolationError
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
SAY_AFTER_S = 1.0
"""When nothing has come by then, it is said that the running node's answer is waited for."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Patience:
    """How the answer of the running node is waited for.

    Attributes:
        limit_s: silence after which the node is taken for hung; None: it may be silent for as long as it runs.
        say: told in words that the answer is waited for, once, when nothing has come after ``say_after_s``.
        say_after_s: seconds.
    """

    limit_s: float | None = None
    say: Say | None = None
    say_after_s: float = SAY_AFTER_S


ENDLESS = Patience()

_KEEPING = frozenset({"add", "fetch"})
"""Of these, what was done before an interruption is kept."""


def call_running_node(
    data_dir: Path, operation: str, request: Any, on_event: OnEvent, patience: Patience = ENDLESS
) -> bytes | None:
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
    if connection is None:
        return None
    return call_node(connection, operation, request, on_event, patience, pid=owner.pid)


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


def call_node(
    connection: socket.socket,
    operation: str,
    request: Any,
    on_event: OnEvent,
    patience: Patience = ENDLESS,
    *,
    pid: int = 0,
) -> bytes:
    """Have the node at the other end run an operation; returns the JSON of its result.

    The connection is closed at the end, whatever that is; before the result is there, this cancels the operation. A
    Ctrl-C does too, and then waits for what the operation still has to say.

    Raises:
        NodeGoneError: the node ended, or broke off.
        NodeSilentError: it said nothing for as long as ``patience`` allows.
        KvnetError: of the class the operation raised in the node.
    """
    call = encode_frame(Call(CONTROL_VERSION, kvnet.__version__, operation, msgspec.Raw(msgspec.json.encode(request))))
    answer = _Answer(connection, operation, patience, pid)
    with connection:
        try:
            connection.settimeout(patience.limit_s)
            connection.sendall(call)
        except TimeoutError as error:
            raise _silent(pid, patience.limit_s) from error
        except OSError as error:
            raise _ended(operation) from error
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
    raise _ended(operation)


def _take_back(connection: socket.socket, answer: "_Answer", on_event: OnEvent) -> None:
    """Have the operation cancelled, and show what it says about that."""
    with suppress(OSError, NodeGoneError, NodeSilentError):
        connection.shutdown(socket.SHUT_WR)
        answer.wait_at_most(LAST_WORDS_S)
        while (reply := answer.next()) is not None and reply.event:
            on_event(_decoded(reply.event))


class _Answer:
    """The frames of a connection. Bytes that arrived stay here when a Ctrl-C ends the wait for more."""

    def __init__(self, connection: socket.socket, operation: str, patience: Patience, pid: int) -> None:
        self._connection = connection
        self._operation = operation
        self._limit_s = patience.limit_s
        self._say, self._say_after_s = patience.say, patience.say_after_s
        self._pid = pid
        self._buffer = bytearray()

    def wait_at_most(self, limit_s: float) -> None:
        """From now on so much silence is borne, and nothing is said of it."""
        self._limit_s, self._say = limit_s, None

    def next(self) -> Reply | None:
        """The next frame; None at a clean end.

        Raises:
            NodeGoneError: the node ended, broke off, or said something else.
            NodeSilentError: it was silent for too long.
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
        except OSError as error:
            raise _ended(self._operation) from error
        except (msgspec.MsgspecError, ProtocolViolationError) as error:
            raise _broken_off(error) from error
        del self._buffer[:end]
        return reply

    def _fill(self, n_bytes: int) -> bool:
        while len(self._buffer) < n_bytes:
            received = self._receive()
            if not received:
                return False
            self._buffer += received
        return True

    def _receive(self) -> bytes:
        say, self._say, limit_s = self._say, None, self._limit_s
        if say is not None:
            with suppress(TimeoutError):
                return self._receive_within(self._say_after_s)
            say(f"waiting for the answer of the running node{_process(self._pid)}")
            # What was waited already is part of it.
            limit_s = max(limit_s - self._say_after_s, self._say_after_s) if limit_s is not None else None
        try:
            return self._receive_within(limit_s)
        except TimeoutError as error:
            raise _silent(self._pid, self._limit_s) from error

    def _receive_within(self, seconds: float | None) -> bytes:
        self._connection.settimeout(seconds)
        return self._connection.recv(RECEIVE_BYTES)


def _decoded(event: msgspec.Raw) -> Progress | TextDelta | Note:
    try:
        return msgspec.json.decode(event, type=Progress | TextDelta | Note)
    except msgspec.MsgspecError as error:
        raise _broken_off(error) from error


def _broken_off(error: Exception) -> NodeGoneError:
    return NodeGoneError(f"the running node broke off: {error}", hint="kvnet node status")


def _ended(operation: str) -> NodeGoneError:
    again = "goes on from what was kept" if operation in _KEEPING else "can be given again"
    return NodeGoneError(
        "the running node ended before the operation did", hint=f"`kvnet node start`; then the same command {again}"
    )


def _silent(pid: int, limit_s: float | None) -> NodeSilentError:
    step = f"`ps -o stat,etime,args -p {pid}` shows it; `kill -9 {pid}` ends it, then" if pid else "end it, then"
    return NodeSilentError(
        f"expected an answer of the running node{_process(pid)} within {limit_s:.0f} s, found none",
        hint=f"it is stopped, hangs, or has far too much to do: {step} `kvnet node start`",
    )


def _process(pid: int) -> str:
    return f" (process {pid})" if pid else ""
