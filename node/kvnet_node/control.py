"""The running node's end of the control socket, over which verbs have it do the work; see ``control_frames``."""

import contextlib
import logging
import os
import shutil
import socket as stdlib_socket
import stat
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import trio

import kvnet
from kvnet.errors import KvnetError, ProtocolViolationError
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
from kvnet_node.events import Event, Progress, TextDelta
from kvnet_node.failures import failure_of

MAX_SOCKET_PATH_BYTES = 100
"""``sun_path`` holds 104 bytes on macOS and 108 on Linux, the terminating zero included."""
MAX_CONNECTIONS = 64
CALL_LIMIT_S = 10.0
"""For the whole of a call to come: its asker sends it at once. Who only connects must not keep others out."""
SEND_LIMIT_S = 10.0
"""An asker that does not read its events for this long has gone away."""

_log = logging.getLogger(__name__)


async def send_frame(stream: trio.abc.SendStream, value: Any) -> None:
    """Send one value as a frame.

    Raises:
        ProtocolViolationError: it is over ``MAX_FRAME_BYTES``.
    """
    await stream.send_all(encode_frame(value))


class FrameStream:
    """Reads frames from a stream."""

    def __init__(self, stream: trio.abc.ReceiveStream) -> None:
        self._stream = stream
        self._buffer = bytearray()

    async def receive(self) -> bytes | None:
        """The bytes of the next frame; None at a clean end between frames.

        Raises:
            ProtocolViolationError: a length over the limit, or an end inside a frame.
        """
        if not await self._fill(LENGTH_BYTES):
            if self._buffer:
                raise cut_short(len(self._buffer))
            return None
        end = LENGTH_BYTES + frame_length(self._buffer)
        if not await self._fill(end):
            raise cut_short(len(self._buffer))
        frame = bytes(self._buffer[LENGTH_BYTES:end])
        del self._buffer[:end]
        return frame

    async def _fill(self, n_bytes: int) -> bool:
        while len(self._buffer) < n_bytes:
            received = await self._stream.receive_some(65536)
            if not received:
                return False
            self._buffer += received
        return True


class EventOutbox:
    """Events on their way to a slow reader: text is joined, progress of one stage is replaced by the newest.

    What waits is therefore bounded by the generated text and the number of stages, and ``put`` never blocks.
    """

    def __init__(self) -> None:
        self._waiting: list[Event] = []
        self._arrived = trio.Event()

    def put(self, event: Event) -> None:
        """Add an event."""
        last = self._waiting[-1] if self._waiting else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            self._waiting[-1] = TextDelta(last.text + event.text)
        elif isinstance(event, Progress) and isinstance(last, Progress) and last.stage == event.stage:
            self._waiting[-1] = event
        else:
            self._waiting.append(event)
        self._arrived.set()

    def take(self) -> list[Event]:
        """Everything that waits."""
        taken, self._waiting = self._waiting, []
        self._arrived = trio.Event()
        return taken

    async def wait(self) -> None:
        """Return when something waits."""
        await self._arrived.wait()


Handler = Callable[[str, bytes, OnEvent], Awaitable[Any]]
"""Runs an operation: name, JSON of the request, where events go; returns the result as a struct."""


def choose_socket_path(wanted: Path) -> tuple[Path, Path | None]:
    """Where the control socket goes: ``wanted``, or a short path in a new 0700 temporary directory.

    Returns:
        The path, and the temporary directory to remove afterwards (None when ``wanted`` fits).
    """
    if len(os.fsencode(wanted)) <= MAX_SOCKET_PATH_BYTES:
        return wanted, None
    directory = Path(tempfile.mkdtemp(prefix="kvnet-"))
    if len(os.fsencode(directory / "control.sock")) > MAX_SOCKET_PATH_BYTES:
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix="kvnet-", dir="/tmp"))
    return directory / "control.sock", directory


def _remove_stale_socket(path: Path) -> None:
    # Only called by the owner of the data directory's lock, so whatever socket is there belongs to nobody alive.
    try:
        if stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()
    except FileNotFoundError:
        return


@asynccontextmanager
async def control_socket(wanted: Path) -> AsyncIterator[tuple[trio.SocketListener, Path]]:
    """A listening Unix socket that only this user can reach, and its path; removed at the end.

    The caller owns the lock of the data directory.
    """
    path, directory = choose_socket_path(wanted)
    _remove_stale_socket(path)
    socket = stdlib_socket.socket(stdlib_socket.AF_UNIX, stdlib_socket.SOCK_STREAM)
    try:
        # The mode comes from the umask: a chmod afterwards would leave a moment in which others may connect.
        previous = os.umask(0o177)
        try:
            socket.bind(os.fspath(path))
        finally:
            os.umask(previous)
        socket.listen(MAX_CONNECTIONS)
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(socket))
        try:
            yield listener, path
        finally:
            await listener.aclose()
    finally:
        socket.close()
        path.unlink(missing_ok=True)
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)


async def serve_control(listener: trio.SocketListener, handler: Handler) -> None:
    """Answer on a control socket until cancelled; an operation that fails ends its own connection only."""
    limit = trio.CapacityLimiter(MAX_CONNECTIONS)

    async def answer(stream: trio.SocketStream) -> None:
        async with limit:
            await _answer(stream, handler)

    await trio.serve_listeners(answer, [listener])


async def _answer(stream: trio.SocketStream, handler: Handler) -> None:
    frames = FrameStream(stream)
    try:
        async with stream:
            data = None
            with trio.move_on_after(CALL_LIMIT_S):
                data = await frames.receive()
            if data is not None:
                reply = await _run_call(stream, frames, data, handler)
                if reply is not None:
                    await send_frame(stream, reply)
    except* (trio.BrokenResourceError, trio.ClosedResourceError, ProtocolViolationError):
        pass  # the asker went away, or is no kvnet
    except* Exception as failures:  # noqa: BLE001 - the line that keeps a bug in answering from ending the node
        _log.error("an answer on the control socket failed; its connection is closed", exc_info=failures)


async def _run_call(stream: trio.SocketStream, frames: FrameStream, data: bytes, handler: Handler) -> Reply | None:
    """The final reply, or None when the asker went away."""
    outbox = EventOutbox()
    try:
        call = msgspec.json.decode(data, type=Call)
        _check_version(call)
    except (msgspec.MsgspecError, RecursionError, KvnetError) as error:
        return Reply(error=failure_of(_as_kvnet_error(error)))
    async with trio.open_nursery() as sending:

        async def forward_events() -> None:
            while True:
                await outbox.wait()
                await _send_events(stream, outbox)

        sending.start_soon(forward_events)
        reply = await _cancelled_with_asker(frames, call, handler, outbox)
        sending.cancel_scope.cancel()
    # Of an operation that its asker took back too: it may have said what it leaves.
    await _send_events(stream, outbox)
    return reply


async def _cancelled_with_asker(frames: FrameStream, call: Call, handler: Handler, outbox: EventOutbox) -> Reply | None:
    """The reply of an operation; None when its asker sends no more, which cancels it."""
    reply: Reply | None = None
    async with trio.open_nursery() as nursery:

        async def cancel_when_asker_leaves() -> None:
            with contextlib.suppress(trio.BrokenResourceError, ProtocolViolationError):
                await frames.receive()
            nursery.cancel_scope.cancel()

        nursery.start_soon(cancel_when_asker_leaves)
        try:
            result = await handler(call.operation, bytes(call.request), outbox.put)
            reply = Reply(result=msgspec.Raw(msgspec.json.encode(result)))
        except Exception as error:  # noqa: BLE001 - whatever an operation raises is its asker's, not the node's
            reply = Reply(error=failure_of(error))
        nursery.cancel_scope.cancel()
    return reply


async def _send_events(stream: trio.SocketStream, outbox: EventOutbox) -> None:
    # Shielded: half a frame would make the rest of the stream unreadable. A reader that stopped is bounded by time.
    with trio.CancelScope(deadline=trio.current_time() + SEND_LIMIT_S, shield=True) as scope:
        for event in outbox.take():
            await send_frame(stream, Reply(event=msgspec.Raw(msgspec.json.encode(event))))
    if scope.cancelled_caught:
        raise trio.BrokenResourceError("the asker stopped reading")


def _as_kvnet_error(error: Exception) -> KvnetError:
    return error if isinstance(error, KvnetError) else ProtocolViolationError(f"not a control request: {error}")


def _check_version(call: Call) -> None:
    if call.control_version != CONTROL_VERSION:
        raise ProtocolViolationError(
            f"expected control protocol {CONTROL_VERSION} (kvnet {kvnet.__version__}), "
            f"found {call.control_version} (kvnet {call.kvnet_version})",
            hint="the running node and this command are different versions: kvnet node stop, then start it again",
        )
