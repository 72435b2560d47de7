"""The files in which one data directory keeps its namespaces.

::

    mine.kvns                this node's own; new artifacts go here
    kept-ID.kvns             what was mine before
    swarm-NAME.kvns          shared with colleagues
    former-ID-MILLIS.kvns    one of them under a lookup secret that was replaced then
    scopes.json              founder, inviter and addresses of each, by id

Every file is 0600.
"""

import contextlib
import re
import secrets
import stat
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

import msgspec

from kvnet.errors import ConfigError, IntegrityError, MalformedError, StoreError, UnsupportedVersionError, UsageError
from kvnet.format.hashes import NamespaceId
from kvnet.trust.namespace import (
    MAX_NAMESPACE_FILE_BYTES,
    Namespace,
    decode_namespace_file,
    encode_namespace_file,
)
from kvnet_node.paths import keep_private

MINE: Final = "mine"
MAX_STANDINGS_BYTES: Final = 256 * 1024
FORMER_LIFE_S: Final = 30 * 24 * 3600
"""Seconds for which a former lookup secret leads sleeping members to the new one."""
MAX_FORMER: Final = 16
"""Former secrets kept on disk, the newest; a clock that is wrong for a day deletes none."""

_FORMER_FILE: Final = re.compile(r"former-[0-9a-f]{16}-(\d{1,15})\.kvns")


class Known(msgspec.Struct, frozen=True):
    """What is known of a namespace besides its secrets.

    Attributes:
        founder: publisher id of who made it; empty while nobody has been invited.
        inviter: publisher id of who let this node in; empty when it made it itself.
        addresses: where members were when this node joined.
        joined_s: seconds since 1970.
    """

    founder: bytes = b""
    inviter: bytes = b""
    addresses: tuple[str, ...] = ()
    joined_s: int = 0


class _File(msgspec.Struct, frozen=True):
    format: int
    namespaces: dict[str, Known]


class NamespaceFiles:
    """Reads and writes them; what belongs together, and in which order it is written, is `SwarmFiles`' to say.

    Args:
        directory: made 0700 at first use.
        now: seconds since 1970.
    """

    def __init__(self, directory: Path, now: Callable[[], float]) -> None:
        self._directory = directory
        self._now = now
        self._scopes = directory / "scopes.json"
        self.mine = directory / "mine.kvns"

    def swarm(self, name: str) -> Path:
        """Where the secrets of a swarm are."""
        return self._directory / f"swarm-{name}.kvns"

    def kept(self, namespace: NamespaceId) -> Path:
        """Where the secrets of what was ``mine`` are kept."""
        return self._directory / f"kept-{namespace.hex()[:16]}.kvns"

    @staticmethod
    def is_swarm(path: Path) -> bool:
        """Whether it is a swarm whose secrets are there: neither ``mine`` nor what was mine before."""
        return path.name.startswith("swarm-")

    # --- secrets ------------------------------------------------------------------------------------------------------

    def read(self) -> dict[NamespaceId, tuple[Path, Namespace]]:
        """Every namespace that is there, ``mine`` first; it is made when there is none.

        Raises:
            ConfigError: others may read a file, or it is damaged.
            UnsupportedVersionError: a version this build does not read.
            StoreError: ``mine`` cannot be written.
        """
        if not self.mine.exists():
            self.write(self.mine, fresh_namespace(MINE))
        kept, swarms = (sorted(self._directory.glob(f"{kind}-*.kvns")) for kind in ("kept", "swarm"))
        found: dict[NamespaceId, tuple[Path, Namespace]] = {}
        for path in [self.mine, *kept, *swarms]:
            namespace = read_namespace(path)
            found.setdefault(namespace.id, (path, namespace))
        return found

    @staticmethod
    def write(path: Path, namespace: Namespace) -> None:
        """Write the secrets of a namespace, whole or not at all.

        Raises:
            StoreError: it cannot be written.
        """
        keep_private(path, encode_namespace_file(namespace))

    @staticmethod
    def remove(path: Path) -> None:
        """Delete a file that may be gone already.

        Raises:
            StoreError: it cannot be deleted.
        """
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(
                f"expected to delete {path}, found that it cannot be: {error.strerror or error}"
            ) from error

    # --- former lookup secrets ----------------------------------------------------------------------------------------

    def read_former(self, there: Collection[NamespaceId]) -> tuple[Namespace, ...]:
        """Those whose time is not over, the newest first.

        What is too old is passed over and kept: this clock may be wrong today. What there are too many of, or whose
        namespace is gone, is removed.

        Raises:
            ConfigError: others may read a file, or it is damaged.
            UnsupportedVersionError: a version this build does not read.
        """
        found: list[tuple[int, Path]] = []
        for path in self._directory.glob("former-*.kvns"):
            match = _FORMER_FILE.fullmatch(path.name)
            if match:
                found.append((int(match[1]), path))
        former: list[Namespace] = []
        n_kept = 0
        for millis, path in sorted(found, reverse=True):
            namespace = read_namespace(path)
            if namespace.id not in there or n_kept >= MAX_FORMER:
                with contextlib.suppress(OSError):  # where nothing can be written it is passed over all the same
                    path.unlink()
                continue
            n_kept += 1
            if self._now() - millis / 1000 <= FORMER_LIFE_S:
                former.append(Namespace(namespace.name, namespace.prefix_secret, namespace.lookup_secret, former=True))
        return tuple(former)

    def write_former(self, namespace: Namespace) -> None:
        """Keep a namespace as one whose lookup secret is replaced now.

        Raises:
            StoreError: it cannot be written.
        """
        millis = int(self._now() * 1000)
        self.write(self._directory / f"former-{namespace.id.hex()[:16]}-{millis}.kvns", namespace)

    # --- what else is known -------------------------------------------------------------------------------------------

    def read_known(self) -> dict[str, Known]:
        """What is known of namespaces besides their secrets, by id in hexadecimal.

        Raises:
            ConfigError: the file is not what it should be.
        """
        try:
            with self._scopes.open("rb") as file:
                data = file.read(MAX_STANDINGS_BYTES + 1)
        except FileNotFoundError:
            return {}
        try:
            if len(data) > MAX_STANDINGS_BYTES:
                raise msgspec.ValidationError("too large")
            return msgspec.json.decode(data, type=_File).namespaces
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ConfigError(
                f"expected what is known of namespaces in {self._scopes}, found something else",
                hint="move the file away; then join again with new invitations, or invite again",
            ) from error

    def write_known(self, known: dict[str, Known]) -> None:
        """Write that down in place of what was known.

        Raises:
            StoreError: it cannot be written.
        """
        keep_private(self._scopes, msgspec.json.format(msgspec.json.encode(_File(1, known))) + b"\n")


def fresh_namespace(name: str) -> Namespace:
    """A namespace with new secrets."""
    return Namespace(name, secrets.token_bytes(32), secrets.token_bytes(32))


def read_bounded(path: Path) -> bytes:
    """The bytes of a namespace file, or one more than it may have.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return file.read(MAX_NAMESPACE_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error


def read_namespace(path: Path) -> Namespace:
    """The namespace in a file of this node.

    Raises:
        ConfigError: others may read the file, or it is damaged.
        UnsupportedVersionError: a version this build does not read.
    """
    check_private(path)
    try:
        return decode_namespace_file(read_bounded(path))
    except UnsupportedVersionError:
        raise
    except (MalformedError, IntegrityError) as error:
        raise ConfigError(
            f"expected the secrets of a namespace in {path}, found it damaged: {error.message}",
            hint="put a backup of it back; or move it away, and join again with a new invitation of a member",
        ) from error


def check_private(path: Path) -> None:
    """Refuse a file with a secret that others may read.

    Raises:
        ConfigError: they may.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(
            f"{path} holds a secret and others may read it (mode {mode:04o}, expected 0600)",
            hint=f"chmod 600 {path}; if others may have read it, make a new one",
        )
