"""Listening sockets: opened by us and by nobody else at the same time, or an error that names the owner.

py-libp2p opens its listeners with SO_REUSEPORT, so two processes can listen on one port without noticing and dials
reach either of them. Here the sockets are bound without it and handed to the transport.
"""

import errno
import ipaddress
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvnet.errors import NetworkError, PortInUseError, UsageError

DEFAULT_PORT = 5864
"""The port kvnet listens on unless told otherwise: "KVNT" has no number, this one was free of a registered use."""

WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 — listening everywhere is the documented default

_BACKLOG = 128
_SAME_PORT_ATTEMPTS = 32
_MULTIADDR = re.compile(r"^/(ip4|ip6)/([^/]+)/tcp/(\d+)$")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What one listen text asks for: these addresses, all on one port (0: any free one)."""

    hosts: tuple[str, ...]
    port: int


@dataclass(frozen=True, slots=True)
class BoundSocket:
    """A listening socket and where it listens."""

    host: str
    port: int
    socket: socket.socket

    @property
    def multiaddr(self) -> str:
        """The address as multiaddr text, without a peer id."""
        return f"/{'ip6' if ':' in self.host else 'ip4'}/{self.host}/tcp/{self.port}"


def parse_listen(text: str) -> Endpoint:
    """Read where to listen from ``/ip4/127.0.0.1/tcp/0``, ``127.0.0.1:0``, ``[::1]:5864``, ``:5864`` or ``5864``.

    Raises:
        UsageError: it is none of these.
    """
    multiaddr = _MULTIADDR.match(text)
    if multiaddr is not None:
        host, port = multiaddr[2], multiaddr[3]
    else:
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
    hosts = (host,) if host and host != "*" else WILDCARDS
    try:
        for each in hosts:
            ipaddress.ip_address(each)
        number = int(port)
    except ValueError:
        number = -1
    if not 0 <= number <= 65535:
        raise UsageError(
            f"expected an address to listen on, found {text!r}",
            hint="Write it like 127.0.0.1:5864, [::1]:5864, :5864 or /ip4/0.0.0.0/tcp/5864.",
        )
    return Endpoint(hosts, number)


def open_listeners(listen: Sequence[str] | None, *, default_port: int = DEFAULT_PORT) -> list[BoundSocket]:
    """Open the sockets a node listens on. Does blocking I/O, only for a moment.

    Args:
        listen: texts for `parse_listen`; None means all interfaces on `default_port`, or on any free port when that
            one is taken.
        default_port: the port used when `listen` is None.

    Raises:
        PortInUseError: a port that was asked for is taken; names its owner when that can be found out.
        NetworkError: the address cannot be listened on.
    """
    if listen is None:
        try:
            return _open_endpoint(Endpoint(WILDCARDS, default_port))
        except PortInUseError:
            return _open_endpoint(Endpoint(WILDCARDS, 0))
    opened: list[BoundSocket] = []
    try:
        for text in listen:
            opened += _open_endpoint(parse_listen(text))
    except BaseException:
        _close(opened)
        raise
    return opened


def _open_endpoint(endpoint: Endpoint) -> list[BoundSocket]:
    if endpoint.port or len(endpoint.hosts) == 1:
        return _open_on_port(endpoint.hosts, endpoint.port)
    for _ in range(_SAME_PORT_ATTEMPTS):
        first = _open_one(endpoint.hosts[0], 0)
        try:
            return [first, *_open_on_port(endpoint.hosts[1:], first.port)]
        except PortInUseError:
            first.socket.close()
    raise NetworkError(f"expected a port that is free on {' and '.join(endpoint.hosts)}, found none")


def _open_on_port(hosts: tuple[str, ...], port: int) -> list[BoundSocket]:
    opened: list[BoundSocket] = []
    for host in hosts:
        try:
            opened.append(_open_one(host, port))
        except PortInUseError:
            _close(opened)
            raise
        except NetworkError:
            # A machine without IPv6 still listens on IPv4; one without the only address asked for does not.
            if host != "::":
                _close(opened)
                raise
    return opened


def _open_one(host: str, port: int) -> BoundSocket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise NetworkError(f"expected this machine to know {host}, found: {error}") from error
    try:
        # SO_REUSEADDR lets a restarted node take its port back at once; it does not share a port that is listened on.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise _port_in_use(host, port) from error
        hint = "Ports below 1024 need privileges; choose a higher one." if error.errno == errno.EACCES else ""
        raise NetworkError(f"expected to listen on {host} port {port}, found: {error.strerror}", hint=hint) from error
    return BoundSocket(host, sock.getsockname()[1], sock)


def _close(opened: Sequence[BoundSocket]) -> None:
    for each in opened:
        each.socket.close()


def _port_in_use(host: str, port: int) -> PortInUseError:
    owner = port_owner(port)
    found = f"it is taken by {owner}" if owner else "it is taken by a process that cannot be named"
    return PortInUseError(
        f"expected port {port} on {host} to be free, {found}",
        hint="Stop that process, or listen elsewhere with --listen.",
    )


def port_owner(port: int) -> str | None:
    """Who listens on a TCP port, as ``"command (process 123)"``; None when the system does not tell."""
    return _owner_from_proc(port) if sys.platform == "linux" else _owner_from_lsof(port)


def _owner_from_proc(port: int) -> str | None:
    inodes = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _listening_inodes(table, port)}
    if not inodes:
        return None
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and _holds(process, inodes):
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
            return f"{command[:120] or 'a process'} (process {process.name})"
    return None


def _listening_inodes(table: str, port: int) -> list[str]:
    try:
        lines = Path("/proc/net", table).read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return []
    rows = [line.split() for line in lines]
    # Columns of proc(5) /proc/net/tcp: local address, state (0A is LISTEN), inode.
    return [row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port]


def _holds(process: Path, inodes: set[str]) -> bool:
    try:
        return any(str(fd.readlink()) in inodes for fd in (process / "fd").iterdir())
    except OSError:
        return False  # another user's process, or one that has just ended


def _owner_from_lsof(port: int) -> str | None:
    try:
        listing = subprocess.run(
            ["lsof", "-nP", f"-iTCP:{port}", "-sTCP:LISTEN", "-Fpc"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    fields = {line[0]: line[1:] for line in reversed(listing.splitlines()) if line}
    return f"{fields.get('c', 'a process')} (process {fields['p']})" if "p" in fields else None
