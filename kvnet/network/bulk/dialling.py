"""Dialling: to the peer of an agreed session, at whichever of its addresses answers first, over IPv4 or IPv6."""

import contextlib
import errno
import hmac
import ipaddress
import socket
import sys
from collections.abc import Sequence
from typing import Final

import trio

from kvnet.errors import NetworkError, PeerUnreachableError
from kvnet.network.bulk.handshake import GREETING, HANDSHAKE_S, plain_proof, receive_plain, secure_dialled
from kvnet.network.bulk.link import Link
from kvnet.network.bulk.sessions import CIPHER_NONE, BulkSession

DIAL_STAGGER_S: Final = 0.25
"""Seconds before the next address is tried beside the first."""

MAX_DIALLED: Final = 8
"""Addresses tried for one connection."""


async def dial(session: BulkSession, hosts: Sequence[str], port: int, *, timeout_s: float) -> Link:
    """See `BulkEndpoint.dial`."""
    if not hosts or not port:
        raise PeerUnreachableError("expected an address of the peer to dial, it has told none")
    try:
        with trio.fail_after(timeout_s):
            raw = await _connect_first(list(dict.fromkeys(hosts))[:MAX_DIALLED], port)
            try:
                with trio.fail_after(HANDSHAKE_S):
                    return await _introduce(raw, session)
            except BaseException:
                raw.close()
                raise
    except trio.TooSlowError as error:
        raise PeerUnreachableError(
            f"expected an answer on port {port} within {timeout_s:g} s, found none",
            hint="A firewall may drop it; the control connection is used meanwhile.",
        ) from error


async def _introduce(raw: socket.socket, session: BulkSession) -> Link:
    if session.cipher != CIPHER_NONE:
        return Link(await secure_dialled(raw, session.context(listens=False), session.pin, session.server_name))
    sock = trio.socket.from_stdlib_socket(raw)
    expected = GREETING + plain_proof(session.name, session.peer_certificate, session.own.der)
    try:
        await sock.send(session.name + plain_proof(session.name, session.own.der, session.peer_certificate))
        answer = await receive_plain(sock, len(expected))
    except OSError as error:
        raise NetworkError(f"the connection broke in the handshake: {error.strerror}") from error
    if not hmac.compare_digest(answer, expected):
        raise NetworkError("expected the peer's proof of the agreed session, found something else")
    return Link(raw)


def take_over(sock: trio.socket.SocketType) -> socket.socket:
    """The plain socket inside, ready for a link."""
    raw = socket.socket(fileno=sock.detach())
    raw.setblocking(False)
    with contextlib.suppress(OSError):
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return raw


async def _connect_first(hosts: Sequence[str], port: int) -> socket.socket:
    """Dial the addresses, each a little after the one before; the first that answers wins."""
    won: list[socket.socket] = []
    failures: list[OSError] = []

    async def attempt(host: str, delay_s: float, nursery: trio.Nursery) -> None:
        await trio.sleep(delay_s)
        sock = trio.socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            await sock.connect((host, port))
        except OSError as error:
            failures.append(error)
            sock.close()
        except BaseException:
            sock.close()
            raise
        else:
            won.append(take_over(sock))
            nursery.cancel_scope.cancel()

    try:
        async with trio.open_nursery() as nursery:
            for number, host in enumerate(hosts):
                nursery.start_soon(attempt, host, number * DIAL_STAGGER_S, nursery)
    except BaseException:
        for each in won:
            each.close()
        raise
    for late in won[1:]:
        late.close()
    if won:
        return won[0]
    raise dial_failure(hosts, port, failures, platform=sys.platform)


def dial_failure(
    hosts: Sequence[str], port: int, failures: Sequence[OSError], *, platform: str
) -> PeerUnreachableError:
    """Why nobody answered, in words.

    macOS lets a program reach the local network only with the user's consent. Without it a neighbour has "no route to
    host" although the router answers.
    """
    first = failures[0] if failures else None
    reason = first.strerror if first is not None and first.strerror else "no answer"
    blocked = platform == "darwin" and any(each.errno == errno.EHOSTUNREACH for each in failures)
    if blocked and any(_is_local(host) for host in hosts):
        return PeerUnreachableError(
            f"expected to reach {hosts[0]} port {port}, found: {reason}; macOS may block the local network for this "
            "program",
            hint="Open System Settings > Privacy & Security > Local Network and allow the terminal (or kvnet) there.",
        )
    return PeerUnreachableError(f"expected an answer at {hosts[0]} port {port}, found: {reason}")


def _is_local(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return address.is_private and not address.is_loopback
