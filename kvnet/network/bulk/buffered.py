"""TLS over memory buffers: what goes and comes on the socket does so in large pieces.

`ssl.SSLSocket` has OpenSSL call into the kernel for each record of 16 KiB: once to send it, twice to receive it. Here
OpenSSL works in memory, and the socket takes and gives hundreds of KiB with one call. That is a copy more and still
costs less, at both ends: the kernel makes fewer and larger packets of what it gets at once.
"""

import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import Final, cast

PIECE_BYTES: Final = 256 * 1024
"""Bytes taken from the socket with one call."""

FULL_RECORD_BYTES: Final = 5 + 16 * 1024 + 1 + 16
"""A record of 16 KiB on the wire (RFC 8446, section 5.2): header, bytes, their type, and the tag of AES-GCM or
ChaCha20-Poly1305. Nearly all records of a chunk are such."""

SENT_BYTES: Final = 512 * 1024
"""Bytes encrypted in one go and given to the socket with one call."""

_NOTHING: Final = memoryview(b"")


class BufferedTls:
    """One end of a TLS connection. Not blocking: raises what `ssl.SSLSocket` raises.

    Args:
        sock: connected, not blocking.
        context: of the session, or of the listener.
        server_name: what the dialling end sends as SNI; ``None`` at the end that was dialled.

    Attributes:
        tls: what OpenSSL makes of it; callbacks of the context know the connection by it.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server_name: str | None) -> None:
        self._socket = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls: Final = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_name is None, server_hostname=server_name
        )
        self._piece = memoryview(bytearray(PIECE_BYTES))
        self._unsent = _NOTHING
        self._accepted = 0

    def fileno(self) -> int:
        """Of the socket."""
        return self._socket.fileno()

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Of the socket."""
        self._socket.setsockopt(level, option, value)

    def getpeercert(self, binary_form: bool) -> bytes | None:
        """The certificate the peer has shown, as DER."""
        assert binary_form  # noqa: S101 - all that is asked for
        return self.tls.getpeercert(binary_form=True)

    def do_handshake(self) -> None:
        """Go on with the handshake; to be called again when there is more to read or room to write."""
        while True:
            try:
                self.tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                if not self._refill():
                    raise
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self._flush()  # the peer is told why
                raise
            else:
                self._flush()
                return

    def read(self, n_bytes: int) -> bytes:
        """Receive what is there, at most so many bytes.

        Raises:
            ssl.SSLWantReadError: nothing yet.
        """
        while True:
            try:
                return self.tls.read(n_bytes)
            except ssl.SSLWantReadError:
                if not self._refill():
                    raise

    def receive_some(self, view: memoryview, enough_bytes: int) -> int:
        """Receive what is there, at most ``len(view)`` bytes, and no more records once there are `enough_bytes`.

        Raises:
            ssl.SSLError: the peer ended the connection, with or without a word, or TLS failed; `ssl.SSLWantReadError`
                for nothing yet.
            OSError: the connection broke.
        """
        read, size, filled = cast("Callable[[int, memoryview], int]", self.tls.read), len(view), 0
        try:
            while filled < enough_bytes:
                # Asking OpenSSL for a record that is not whole costs as much as decrypting one: what is certainly whole
                # is asked for, and only when the socket gives nothing more, what may be.
                n_whole = self._incoming.pending // FULL_RECORD_BYTES
                if not n_whole and not self.tls.pending() and self._refill():
                    continue
                for _ in range(n_whole or 1):
                    received = read(size, view[filled:])
                    filled += received
                    if filled >= enough_bytes:
                        break
                if not received:
                    raise ssl.SSLZeroReturnError(ssl.SSL_ERROR_ZERO_RETURN, "the peer ended the connection")
        except OSError:
            if not filled:
                raise
        return filled

    def _refill(self) -> bool:
        """Take what has come on the socket; False when that is nothing, or the end: OpenSSL will say so.

        Raises:
            OSError: the connection broke.
        """
        if self._outgoing.pending:
            with contextlib.suppress(ssl.SSLWantWriteError):
                self._flush()
        try:
            received = self._socket.recv_into(self._piece)
        except BlockingIOError:
            return False
        if received:
            self._incoming.write(self._piece[:received])
        else:
            self._incoming.write_eof()
        return received > 0

    def send(self, data: memoryview | bytes) -> int:
        """Send; returns how many bytes were taken.

        Raises:
            ssl.SSLWantWriteError: not now, and then the same bytes must come again.
        """
        self._flush()
        if not self._accepted:
            # A rest that is not worth a call of its own goes along.
            self._accepted = self.tls.write(data if len(data) < 3 * SENT_BYTES // 2 else data[:SENT_BYTES])
            self._flush()
        accepted, self._accepted = self._accepted, 0
        return accepted

    def _flush(self) -> None:
        while self._unsent or self._outgoing.pending:
            if not self._unsent:
                self._unsent = memoryview(self._outgoing.read())
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError as error:
                raise ssl.SSLWantWriteError(ssl.SSL_ERROR_WANT_WRITE, "the socket takes nothing now") from error
            self._unsent = self._unsent[sent:] or _NOTHING

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
