"""This node's end of all bulk connections: listening for peers that sessions were agreed on with, and dialling them."""

import errno
import hmac
import socket
import ssl
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import trio

from kvnet.errors import NetworkError, PeerUnreachableError, PortInUseError
from kvnet.network.bulk.contexts import listening_context
from kvnet.network.bulk.dialling import dial, take_over
from kvnet.network.bulk.handshake import (
    GREETING,
    HANDSHAKE_S,
    PLAIN_SIZE_BYTES,
    plain_proof,
    receive_plain,
    secure,
)
from kvnet.network.bulk.link import Link
from kvnet.network.bulk.sessions import CIPHER_NONE, CIPHER_TLS, NAME_SIZE_BYTES, TLS_HANDSHAKE, BulkSession
from kvnet.network.libp2p.ports import BoundSocket, open_listeners

if TYPE_CHECKING:
    from trio_typing import TaskStatus

DEFAULT_BULK_PORT: Final = 5865
SESSION_S: Final = 30.0
"""Seconds an agreed session waits for its connection."""

MAX_PENDING_HANDSHAKES: Final = 64
"""Handshakes under way. The oldest is closed for one more: an honest one takes milliseconds, a silent one is old."""

MAX_EXPECTED: Final = 256
"""Agreed sessions whose connection has not come yet."""


@dataclass(frozen=True, slots=True)
class _Expected:
    session: BulkSession
    context: ssl.SSLContext
    arrived: Callable[[Link], None]
    until_s: float


class BulkEndpoint:
    """This node's end of all bulk connections.

    Args:
        listen: texts like those of `network.listen`; None means everywhere on `default_port`, or on any free port when
            that one is taken; empty means to listen nowhere.
        hosts: in place of everywhere, when `listen` is None.
        default_port: see `listen`.
        cipher: ``tls13``, or ``none`` for a cable the owner trusts; both sides must say so.
    """

    def __init__(
        self,
        listen: Sequence[str] | None = None,
        *,
        hosts: Sequence[str] | None = None,
        default_port: int = DEFAULT_BULK_PORT,
        cipher: str = CIPHER_TLS,
    ) -> None:
        self._listen = listen
        self._hosts = hosts
        self._default_port = default_port
        self.cipher = cipher
        self._bound: list[BoundSocket] = []
        self._expected: OrderedDict[bytes, _Expected] = OrderedDict()
        self._chosen: WeakKeyDictionary[ssl.SSLObject, _Expected] = WeakKeyDictionary()
        self._pending: OrderedDict[trio.CancelScope, None] = OrderedDict()
        self._context = listening_context(self._choose)
        self.refused = 0

    # --- listening ---

    @property
    def port(self) -> int:
        """Where peers can dial us; 0: nowhere."""
        return self._bound[0].port if self._bound else 0

    def addresses(self) -> list[tuple[str, int]]:
        """Where this endpoint listens."""
        return [(each.host, each.port) for each in self._bound]

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled.

        Raises:
            PortInUseError: a port that was asked for is taken.
        """
        self._bound = await trio.to_thread.run_sync(self._open)
        try:
            async with trio.open_nursery() as nursery:
                for each in self._bound:
                    each.socket.setblocking(False)
                    nursery.start_soon(self._accept, trio.socket.from_stdlib_socket(each.socket), nursery)
                task_status.started()
                await trio.sleep_forever()
        finally:
            for each in self._bound:
                each.socket.close()
            self._bound = []
            self._expected.clear()

    def _open(self) -> list[BoundSocket]:
        if self._listen is not None:
            return open_listeners(self._listen)
        if self._hosts is None:
            return open_listeners(None, default_port=self._default_port)
        try:
            return open_listeners([_endpoint_text(host, self._default_port) for host in self._hosts])
        except PortInUseError:
            first, *others = self._hosts
            opened = open_listeners([_endpoint_text(first, 0)])
            return [*opened, *open_listeners([_endpoint_text(host, opened[0].port) for host in others])]

    async def _accept(self, listener: trio.socket.SocketType, nursery: trio.Nursery) -> None:
        while True:
            try:
                sock, _ = await listener.accept()
            except OSError as error:
                if error.errno not in _PASSING:
                    raise NetworkError(f"bulk: expected to accept connections, found {error.strerror}") from error
                await trio.sleep(0.1)
                continue
            while len(self._pending) >= MAX_PENDING_HANDSHAKES:
                oldest, _ = self._pending.popitem(last=False)
                oldest.cancel()
            scope = trio.CancelScope(deadline=trio.current_time() + HANDSHAKE_S)
            self._pending[scope] = None
            nursery.start_soon(self._welcome, sock, scope)

    async def _welcome(self, sock: trio.socket.SocketType, scope: trio.CancelScope) -> None:
        raw = take_over(sock)
        link: Link | None = None
        expected: _Expected | None = None
        try:
            with scope:
                link, expected = await self._shake_hands(raw)
        except NetworkError:
            self.refused += 1
        finally:
            self._pending.pop(scope, None)
            if link is None:
                raw.close()
        if link is not None and expected is not None:
            expected.arrived(link)

    async def _shake_hands(self, raw: socket.socket) -> tuple[Link, _Expected]:
        if self.cipher == CIPHER_NONE and await _speaks_plainly(raw):
            return await self._shake_hands_plainly(raw)
        secured = await secure(raw, self._context, self._pin_of_chosen)
        try:
            expected = self._claim(self._chosen[secured.tls].session.name)
        except NetworkError:
            secured.close()
            raise
        return Link(secured), expected

    async def _shake_hands_plainly(self, raw: socket.socket) -> tuple[Link, _Expected]:
        sock = trio.socket.from_stdlib_socket(raw)
        try:
            hello = await receive_plain(sock, PLAIN_SIZE_BYTES)
            expected = self._find(hello[:NAME_SIZE_BYTES], CIPHER_NONE)
            if expected is None:
                raise PeerUnreachableError("expected a session that was agreed on, found none")
            session = expected.session
            proof = plain_proof(session.name, session.peer_certificate, session.own.der)
            if not hmac.compare_digest(hello[NAME_SIZE_BYTES:], proof):
                raise PeerUnreachableError("expected the proof of the agreed session, found another one")
            answer = GREETING + plain_proof(session.name, session.own.der, session.peer_certificate)
            claimed = self._claim(session.name)
            await sock.send(answer)
        except OSError as error:
            raise NetworkError(f"the connection broke in the handshake: {error.strerror}") from error
        return Link(raw), claimed

    def _choose(self, connection: ssl.SSLObject, name: str) -> ssl.SSLContext | None:
        try:
            expected = self._find(bytes.fromhex(name), CIPHER_TLS)
        except ValueError:
            return None
        if expected is None:
            return None
        self._chosen[connection] = expected
        return expected.context

    def _pin_of_chosen(self, connection: ssl.SSLObject) -> bytes | None:
        chosen = self._chosen.get(connection)
        return None if chosen is None else chosen.session.pin

    def _find(self, name: bytes, cipher: str) -> _Expected | None:
        expected = self._expected.get(name)
        if expected is None or expected.until_s <= trio.current_time() or expected.session.cipher != cipher:
            return None
        return expected

    def _claim(self, name: bytes) -> _Expected:
        """A session is for one connection.

        Raises:
            PeerUnreachableError: another connection has it, or it has expired meanwhile.
        """
        expected = self._expected.pop(name, None)
        if expected is None:
            raise PeerUnreachableError("expected a session that was agreed on, found it used")
        return expected

    # --- sessions ---

    def expect(self, session: BulkSession, arrived: Callable[[Link], None]) -> None:
        """Wait for the peer to dial; `arrived` is called on the trio side, at most once.

        Raises:
            NetworkError: the peer's certificate is none.
        """
        now_s = trio.current_time()
        while self._expected:
            name, oldest = next(iter(self._expected.items()))
            if oldest.until_s > now_s and len(self._expected) < MAX_EXPECTED:
                break
            del self._expected[name]
        context = session.context(listens=True)
        self._expected[session.name] = _Expected(session, context, arrived, now_s + SESSION_S)

    def forget(self, name: bytes) -> BulkSession | None:
        """Expect nobody under this name any longer; returns what was expected."""
        expected = self._expected.pop(name, None)
        return expected.session if expected is not None and expected.until_s > trio.current_time() else None

    @property
    def n_expected(self) -> int:
        """Agreed sessions whose connection has not come."""
        return len(self._expected)

    @property
    def n_pending(self) -> int:
        """Handshakes under way."""
        return len(self._pending)

    # --- dialling ---

    async def dial(self, session: BulkSession, hosts: Sequence[str], port: int, *, timeout_s: float) -> Link:
        """Connect to the peer at whichever of its addresses answers first.

        Args:
            session: what was agreed on.
            hosts: its addresses.
            port: its port.
            timeout_s: for all of it.

        Raises:
            PeerUnreachableError: none answers in time; the first reason is in the message.
            PeerRefusedError: somebody else answers, or the peer refuses us.
            NetworkError: the connection broke.
        """
        return await dial(session, hosts, port, timeout_s=timeout_s)


_PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED, errno.EPROTO, errno.EPERM}


def _endpoint_text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _speaks_plainly(raw: socket.socket) -> bool:
    """Whether the peer begins with anything but a TLS handshake record; looks, and takes nothing."""
    try:
        while True:
            try:
                first = raw.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(raw.fileno())
            else:
                return first != TLS_HANDSHAKE
    except OSError as error:
        raise NetworkError(f"the connection broke in the handshake: {error.strerror}") from error
