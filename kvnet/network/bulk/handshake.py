"""From a connected socket to a link whose peer is the one that was agreed on. On the trio loop: it waits for a peer."""

import hashlib
import hmac
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from kvnet.errors import NetworkError, PeerRefusedError
from kvnet.network.bulk.buffered import BufferedTls
from kvnet.network.bulk.certificates import pin_of

HANDSHAKE_S: Final = 5.0
"""Seconds a handshake may take; a peer that is silent costs a socket for so long, and no thread."""

GREETING: Final = b"kvnet-bulk-1\n"
"""The listening side's first bytes. In TLS 1.3 a client is done before the server has looked at its certificate: it
learns of a refusal only when it reads."""

PLAIN_SIZE_BYTES: Final = 16 + 32
_PLAIN_CONTEXT: Final = b"kvnet-bulk-plain-1"


async def _step(sock: BufferedTls, call: Callable[[], None]) -> None:
    while True:
        try:
            call()
            return
        except ssl.SSLWantReadError:
            await trio.lowlevel.wait_readable(sock.fileno())
        except ssl.SSLWantWriteError:
            await trio.lowlevel.wait_writable(sock.fileno())


def require_pin(sock: BufferedTls, pin: bytes) -> None:
    """Compare the certificate that the peer has shown.

    Raises:
        PeerRefusedError: it is not the one that was agreed on; nothing was read or written.
    """
    shown = sock.getpeercert(binary_form=True)
    if shown is None or not hmac.compare_digest(pin_of(shown), pin):
        raise PeerRefusedError("expected the certificate that was agreed on, found another one", reason="certificate")


async def secure(
    sock: socket.socket, context: ssl.SSLContext, pin_for: Callable[[ssl.SSLObject], bytes | None]
) -> BufferedTls:
    """Do the TLS handshake of a peer that has dialled. The caller limits its time, and closes `sock` when this fails.

    Args:
        sock: connected, not blocking; it is not usable by itself afterwards.
        context: of the listener.
        pin_for: the pin of the peer, asked after the handshake; ``None`` when nobody is expected.

    Raises:
        PeerRefusedError: the peer refuses us, or is not the one that was agreed on.
        NetworkError: the connection broke.
    """
    wrapped = BufferedTls(sock, context, None)
    await _establish(wrapped, lambda: pin_for(wrapped.tls), listens=True)
    return wrapped


async def secure_dialled(sock: socket.socket, context: ssl.SSLContext, pin: bytes, name: str) -> BufferedTls:
    """Do the TLS handshake with a peer that was dialled; otherwise as `secure`.

    Args:
        sock: connected, not blocking; it is not usable by itself afterwards.
        context: of the session.
        pin: of the peer.
        name: what to send as SNI.
    """
    wrapped = BufferedTls(sock, context, name)
    await _establish(wrapped, lambda: pin, listens=False)
    return wrapped


async def _establish(wrapped: BufferedTls, find_pin: Callable[[], bytes | None], *, listens: bool) -> None:
    try:
        await _step(wrapped, wrapped.do_handshake)
        pin = find_pin()
        if pin is None:
            raise PeerRefusedError("expected a session that was agreed on, found none", reason="session")
        require_pin(wrapped, pin)
        await _greet(wrapped, listens)
    except BaseException as error:
        wrapped.close()
        if isinstance(error, ssl.SSLError):
            raise PeerRefusedError(f"the handshake failed: {error.reason or 'TLS failed'}", reason="tls") from error
        if isinstance(error, OSError):
            raise NetworkError(f"the connection broke in the handshake: {error.strerror}") from error
        raise


async def _greet(sock: BufferedTls, listens: bool) -> None:
    if listens:
        await _step(sock, lambda: _require_whole(sock.send(GREETING)))
        return
    greeting = bytearray()

    def receive() -> None:
        while len(greeting) < len(GREETING):
            part = sock.read(len(GREETING) - len(greeting))
            if not part:
                raise PeerRefusedError("the peer ended the connection after the handshake", reason="tls")
            greeting.extend(part)

    await _step(sock, receive)
    if greeting != GREETING:
        raise PeerRefusedError("expected a greeting after the handshake, found something else", reason="greeting")


def _require_whole(sent: int) -> None:
    if sent != len(GREETING):
        raise NetworkError("expected to send a greeting, the connection takes nothing")


def plain_proof(name: bytes, own_certificate: bytes, peer_certificate: bytes) -> bytes:
    """What shows, without TLS, that its sender took part in the control session: both certificates, in this order.

    The certificates went over the control session alone, so nobody else knows them.
    """
    return hashlib.sha256(_PLAIN_CONTEXT + name + pin_of(own_certificate) + pin_of(peer_certificate)).digest()


Receive = Callable[[int], Awaitable[bytes]]


async def receive_plain(sock: trio.socket.SocketType, n_bytes: int) -> bytes:
    """Receive exactly so many bytes.

    Raises:
        NetworkError: the peer ended the connection.
    """
    received = bytearray()
    while len(received) < n_bytes:
        part = await sock.recv(n_bytes - len(received))
        if not part:
            raise NetworkError("the peer ended the connection in the handshake")
        received += part
    return bytes(received)
