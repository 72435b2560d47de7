"""Where the endpoint listens: loopback, or further with a token; on the port that was asked for, or with a word."""

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from kvnet.errors import ConfigError, PortInUseError
from kvnet.network.libp2p.ports import BoundSocket, open_listeners

MIN_TOKEN_CHARS = 16
"""Of a token that guards more than this machine: at 5 bits a character beyond guessing over a network."""


@dataclass(frozen=True, slots=True)
class Listening:
    """Open sockets of the endpoint.

    Attributes:
        sockets: bound and listening.
        addresses: HOST:PORT of each.
        moved: why it is another port than the default one; "" when it is not.
    """

    sockets: tuple[socket.socket, ...]
    addresses: tuple[tuple[str, int], ...]
    moved: str = ""

    @property
    def urls(self) -> list[str]:
        """What clients are given, each ending before ``/v1``."""
        return [f"http://{f'[{host}]' if ':' in host else host}:{port}" for host, port in self.addresses]


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of ``127.0.0.1:5863``, ``localhost:5863``, ``[::1]:5863`` or ``5863`` alone, which is loopback.

    Raises:
        ConfigError: it is none of these; other names than ``localhost`` are none.
    """
    host, _, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    host = "127.0.0.1" if host in {"", "localhost"} else "0.0.0.0" if host == "*" else host  # noqa: S104 - asked for
    try:
        ipaddress.ip_address(host)
        number = int(port) if port.isascii() and port.isdigit() else -1
    except ValueError:
        number = -1
    if not 0 <= number <= 65535:
        raise ConfigError(
            f"expected HOST:PORT for the endpoint (api.listen), found {text[:100]!r}", hint="such as 127.0.0.1:5863"
        )
    return host, number


def check_exposure(addresses: Sequence[tuple[str, int]], token: str) -> None:
    """Refuse to listen beyond this machine without a token.

    Raises:
        ConfigError: there is none, or one that could be guessed.
    """
    beyond = [host for host, _ in addresses if not ipaddress.ip_address(host).is_loopback]
    if beyond and len(token) < MIN_TOKEN_CHARS:
        found = f"one of {len(token)} characters" if token else "none"
        raise ConfigError(
            f"the endpoint listens beyond this machine ({beyond[0]}) only with an api.token of at least "
            f"{MIN_TOKEN_CHARS} characters, found {found}",
            hint='openssl rand -hex 24 makes one; put it into config.toml: [api] token = "…"',
        )


def open_endpoint(listen: Sequence[str], *, asked: bool, token: str) -> Listening:
    """Open the endpoint's sockets.

    A port that was asked for and is taken is an error. The default one, taken, gives way to any free one, and
    ``moved`` says so: another node, or another program, must not keep this one from starting.

    Args:
        listen: HOST:PORT texts.
        asked: whether they were asked for.
        token: what clients must send.

    Raises:
        ConfigError: an address is malformed, or reaches further than it may.
        PortInUseError: a port asked for is taken; names its owner where the system tells.
        NetworkError: an address cannot be listened on.
    """
    addresses = [parse_address(text) for text in listen]
    check_exposure(addresses, token)
    try:
        return _opened(open_listeners([_text(host, port) for host, port in addresses]))
    except PortInUseError as error:
        if asked:
            raise PortInUseError(
                f"the endpoint cannot listen: {error.message}",
                hint="stop that process, or listen elsewhere with --api HOST:PORT or api.listen",
            ) from error
        free = _opened(open_listeners([_text(host, 0) for host, _ in addresses]))
        return Listening(free.sockets, free.addresses, error.message)


def _opened(bound: Sequence[BoundSocket]) -> Listening:
    return Listening(tuple(each.socket for each in bound), tuple((each.host, each.port) for each in bound))


def _text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
