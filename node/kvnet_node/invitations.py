"""The invitations of this node that are still open, in one file, 0600. A use is on disk before the guest is let in."""

import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Final

import msgspec

from kvnet.errors import ConfigError, StoreError
from kvnet.exchange.enrolment import HeldInvitation
from kvnet.format.hashes import NamespaceId
from kvnet.protocol.enrolment import OpenInvitation
from kvnet.trust.statement_bodies import Invitation
from kvnet_node.namespace_files import check_private
from kvnet_node.paths import write_private

MAX_OPEN: Final = 256
"""Open invitations of one node."""
MAX_FILE_BYTES: Final = 4 * 1024 * 1024


class _Open(msgspec.Struct, frozen=True):
    id: bytes
    secret: bytes
    signer: bytes
    namespace: bytes
    role: str
    label: str
    issued_s: int
    expires_s: int
    uses: int
    used_by: tuple[bytes, ...] = ()


class _File(msgspec.Struct, frozen=True):
    format: int
    invitations: list[_Open]


class InvitationBook:
    """The open invitations of one data directory. Safe to call from several threads.

    Args:
        file: where they are.
        now: seconds since 1970.
    """

    def __init__(self, file: Path, *, now: Callable[[], float] = time.time) -> None:
        self._file = file
        self._now = now
        self._lock = threading.Lock()
        self._open: dict[bytes, _Open] = {}

    def load(self) -> None:
        """Read the file.

        Raises:
            ConfigError: it is not what it should be, or others may read it.
        """
        if not self._file.exists():
            return
        check_private(self._file)
        try:
            with self._file.open("rb") as file:
                read = msgspec.json.decode(file.read(MAX_FILE_BYTES), type=_File)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ConfigError(
                f"expected open invitations in {self._file}, found something else",
                hint="move the file away; what was invited and has not joined needs a new invitation",
            ) from error
        self._open = {each.id: each for each in read.invitations}

    def add(self, invitation: Invitation, *, signer: bytes, label: str) -> None:
        """Keep a new invitation.

        Raises:
            StoreError: too many are open, or it cannot be written.
        """
        with self._lock:
            now_s = self._now()
            still = {each.id: each for each in self._open.values() if each.expires_s > now_s}
            if len(still) >= MAX_OPEN:
                raise StoreError(
                    f"expected at most {MAX_OPEN} open invitations, found as many",
                    hint="wait until some have expired",
                )
            still[invitation.id] = _Open(
                invitation.id,
                invitation.secret,
                signer,
                invitation.namespace,
                invitation.role,
                label,
                invitation.issued,
                invitation.expires,
                invitation.uses,
            )
            self._write(still)

    def find(self, invitation: bytes) -> HeldInvitation | None:
        """The invitation of an id."""
        each = self._open.get(invitation)
        if each is None:
            return None
        opens = OpenInvitation(each.secret, each.expires_s, each.uses, each.used_by)
        return HeldInvitation(opens, NamespaceId(each.namespace), each.role, each.label, each.signer, each.issued_s)

    def use(self, invitation: bytes, publisher: bytes) -> bool:
        """Count a use; it is on disk when this returns.

        Raises:
            StoreError: it cannot be written.
        """
        with self._lock:
            each = self._open.get(invitation)
            if each is None:
                return False
            if publisher in each.used_by:
                return True
            if len(each.used_by) >= each.uses:
                return False
            used = msgspec.structs.replace(each, used_by=(*each.used_by, publisher))
            self._write({**self._open, invitation: used})
            return True

    def withdraw(self, namespace: NamespaceId, used_by: Iterable[bytes]) -> int:
        """Give up the invitations of a namespace that one of these publishers has used.

        Raises:
            StoreError: it cannot be written.
        """
        theirs = frozenset(used_by)
        return self._give_up(lambda each: each.namespace == namespace and not theirs.isdisjoint(each.used_by))

    def withdraw_all(self, namespace: NamespaceId) -> int:
        """Give up all invitations of a namespace.

        Raises:
            StoreError: it cannot be written.
        """
        return self._give_up(lambda each: each.namespace == namespace)

    def withdraw_others(self, namespaces: Collection[NamespaceId]) -> int:
        """Give up all invitations of other namespaces than these.

        Raises:
            StoreError: it cannot be written.
        """
        return self._give_up(lambda each: each.namespace not in namespaces)

    def _give_up(self, doomed: Callable[[_Open], bool]) -> int:
        with self._lock:
            left = {id_: each for id_, each in self._open.items() if not doomed(each)}
            n_gone = len(self._open) - len(left)
            if n_gone:
                self._write(left)
            return n_gone

    def count(self, namespace: NamespaceId) -> int:
        """How many invitations of a namespace can still be used."""
        now_s = self._now()
        return sum(
            each.namespace == namespace and each.expires_s > now_s and len(each.used_by) < each.uses
            for each in self._open.values()
        )

    def _write(self, invitations: dict[bytes, _Open]) -> None:
        try:
            write_private(self._file, msgspec.json.encode(_File(1, list(invitations.values()))))
        except OSError as error:
            raise StoreError(f"{self._file} cannot be written: {error.strerror or error}") from error
        self._open = invitations


def new_secrets() -> tuple[bytes, bytes]:
    """The id and the secret of a new invitation."""
    return secrets.token_bytes(16), secrets.token_bytes(32)
