"""One connection as its thread sees it: blocking calls that another thread can interrupt.

`close()` does not wake a blocked receive, `shutdown()` under TLS looks like a clean end, and two threads on one
`SSLSocket` can lock each other out. So one thread does all reading and writing on a socket that never blocks, and
waits in `poll` for it and for a pipe through which others wake it.
"""

import contextlib
import errno
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import trio

from kvnet.errors import NetworkError, PeerUnreachableError
from kvnet.network.bulk.buffered import BufferedTls
from kvnet.protocol.framing import LENGTH_SIZE_BYTES, frame_length

MANY_BYTES: Final = 128 * 1024
"""Bytes worth waking for while a chunk arrives."""

RECEIVE_PIECE_BYTES: Final = 256 * 1024
"""Bytes received at a time: hashed before they have left the processor's cache."""

_HELD_BACK_BYTES: Final = 32 * 1024
"""More than OpenSSL may have taken from the socket and not given out: a record that is not whole."""

_WANT_READ: Final = (ssl.SSLWantReadError, BlockingIOError)


class LinkStopped(NetworkError):  # noqa: N818 - nobody has made a mistake
    """The connection was given up by this side."""

    code = "stopped"


class Link:
    """A connected socket whose handshake is done. All methods but `wake` and `stop` belong to its one thread.

    Args:
        sock: not blocking; a plain one when the owner trusts the cable.
    """

    def __init__(self, sock: socket.socket | BufferedTls) -> None:
        self._socket = sock
        self._receive = sock.receive_some if isinstance(sock, BufferedTls) else partial(_receive_plain, sock)
        self._woken, self._waker = os.pipe()
        for end in (self._woken, self._waker):
            os.set_blocking(end, False)
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)
        self._wake_poll = select.poll()
        self._wake_poll.register(self._woken, select.POLLIN)
        self._poll.register(sock, select.POLLIN)
        self._events = select.POLLIN
        # Holds `_closed` and the pipe still while `wake` writes; held for a write or a close, never while waiting.
        self._lock = threading.Lock()
        self._least = 1
        self._stopping = False
        self._closed = False
        self.on_wake: Callable[[], None] = _nothing
        """Called in the link's thread after `wake`."""

    # --- from any thread ---

    def wake(self) -> None:
        """Have `on_wake` called soon."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
                    os.write(self._waker, b"w")

    def stop(self) -> None:
        """Make every call of the thread, running or to come, raise `LinkStopped`."""
        self._stopping = True
        self.wake()

    # --- in the thread ---

    def check(self) -> None:
        """Whether to go on.

        Raises:
            LinkStopped: `stop` was called.
        """
        if self._stopping:
            raise LinkStopped("the connection was given up")

    def receive_some(self, view: memoryview) -> int:
        """Receive what is there now, at most ``len(view)`` bytes and little more than a piece; 0: nothing yet.

        Raises:
            NetworkError: the connection ended or broke.
        """
        try:
            return self._receive(view, min(len(view), RECEIVE_PIECE_BYTES))
        except _WANT_READ:
            return 0
        except OSError as error:
            raise _broken(error) from error

    def receive_into(self, view: memoryview, *, silence_s: float) -> None:
        """Fill `view`.

        Raises:
            NetworkError: the connection ended or broke, or nothing came for `silence_s` seconds.
        """
        filled = 0
        while filled < len(view):
            received = self.receive_some(view[filled:])
            filled += received
            if not received and not self.wait_readable(silence_s):
                raise PeerUnreachableError(f"expected bytes within {silence_s:g} s, found silence")

    def receive_frame(self, *, silence_s: float) -> bytes:
        """Receive the body of a frame; its length is checked before anything is kept for it.

        Raises:
            NetworkError: as for `receive_into`.
            ProtocolViolationError: a length beyond the limit.
        """
        header = bytearray(LENGTH_SIZE_BYTES)
        self.receive_into(memoryview(header), silence_s=silence_s)
        body = bytearray(frame_length(bytes(header)))
        self.receive_into(memoryview(body), silence_s=silence_s)
        return bytes(body)

    def send_some(self, view: memoryview) -> int:
        """Send a part of `view`; 0: not now, and then the same bytes must come again.

        Raises:
            NetworkError: the connection broke.
        """
        try:
            return self._socket.send(view)
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError, BlockingIOError):
            return 0
        except OSError as error:
            raise _broken(error) from error

    def send_all(self, view: memoryview, *, stall_s: float) -> None:
        """Send all of `view`.

        Raises:
            NetworkError: the connection broke, or the peer took nothing for `stall_s` seconds.
        """
        sent = 0
        while sent < len(view):
            self.check()
            now = self.send_some(view[sent:])
            sent += now
            if not now and not self.wait_writable(stall_s):
                raise PeerUnreachableError(f"expected the peer to take bytes within {stall_s:g} s, it did not")

    def wait_readable(self, timeout_s: float, expected_bytes: int = 1) -> bool:
        """Wait until there may be something to receive; False when the time is over.

        Args:
            timeout_s: how long.
            expected_bytes: how many will certainly come unless the peer stops; when they are many, waking for the first
                of them is not worth it. What has come is there to receive after the time is over, too.
        """
        least = MANY_BYTES if expected_bytes >= MANY_BYTES + _HELD_BACK_BYTES else 1
        if least != self._least:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            self._least = least
        return self._wait(select.POLLIN, timeout_s)

    def wait_writable(self, timeout_s: float) -> bool:
        """Wait until something may be sent; False when the time is over."""
        return self._wait(select.POLLOUT, timeout_s)

    def wait_both(self, timeout_s: float) -> bool:
        """Wait until something can be received or sent; False when the time is over."""
        return self._wait(select.POLLIN | select.POLLOUT, timeout_s)

    def pause(self, seconds: float) -> None:
        """Let time pass, and leave the socket alone.

        Raises:
            LinkStopped: `stop` was called.
        """
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            self.wait_woken(left_s)

    def wait_woken(self, timeout_s: float) -> None:
        """Wait until somebody calls `wake`, at most so long, and leave the socket alone.

        Raises:
            LinkStopped: `stop` was called.
        """
        self.check()
        if self._wake_poll.poll(timeout_s * 1000):
            self._take_wakes()

    def _wait(self, events: int, timeout_s: float) -> bool:
        """Wait for one of the events of the socket, or until woken: the caller looks what has changed."""
        if events != self._events:
            self._poll.modify(self._socket, events)
            self._events = events
        self.check()
        ready = self._poll.poll(timeout_s * 1000)
        if any(descriptor == self._woken for descriptor, _ in ready):
            self._take_wakes()
        return bool(ready)

    def _take_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)
        self.check()
        self.on_wake()

    def close(self) -> None:
        """Close socket and pipe."""
        with self._lock:  # nobody may write to a number that is another file's by now
            if not self._closed:
                self._closed = self._stopping = True
                self._socket.close()
                os.close(self._woken)
                os.close(self._waker)


def run_soon(token: trio.lowlevel.TrioToken, call: Callable[[], None]) -> None:
    """Have something called on the trio side, from a connection's thread."""
    with contextlib.suppress(trio.RunFinishedError):  # nobody is left to tell
        token.run_sync_soon(call, idempotent=True)


def _nothing() -> None:
    pass


def _receive_plain(sock: socket.socket, view: memoryview, enough_bytes: int) -> int:
    """As `BufferedTls.receive_some`, of a connection without encryption."""
    filled = 0
    try:
        while filled < enough_bytes and (received := sock.recv_into(view[filled:])):
            filled += received
    except OSError:
        if not filled:
            raise
    else:
        if not filled:
            raise NetworkError("expected more bytes, the peer ended the connection")
    return filled


def _broken(error: OSError) -> NetworkError:
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return NetworkError("expected more bytes, the peer ended the connection")
    if isinstance(error, ssl.SSLError):
        return NetworkError(f"the connection broke: {error.reason or 'TLS failed'}")
    name = errno.errorcode.get(error.errno or 0, "unknown")
    return NetworkError(f"the connection broke: {error.strerror or name}")
