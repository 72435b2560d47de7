"""Revocations that are known to exist and have not arrived: somebody holds them back. Pure.

A provider record says which revocation is its signer's latest in a namespace. Who knows only earlier ones, or none, has
been told less than there is; the signer's artifacts are not used until it has arrived.
"""

from collections.abc import Callable
from typing import Final

from kvnet.format.hashes import NamespaceId

MAX_WITHHELD: Final = 1024
"""Signers of whom one is missing; no more are remembered at a time."""


class Withheld:
    """The revocations that are missing."""

    def __init__(self) -> None:
        self._missing: dict[tuple[NamespaceId, bytes], int] = {}

    def __len__(self) -> int:
        return len(self._missing)

    def told_of(self, namespace: NamespaceId, signer: bytes, latest: int, known: int) -> bool:
        """A record says that a revocation exists.

        Args:
            namespace: that the record is of.
            signer: of the record.
            latest: sequence of its latest revocation there.
            known: sequence of the latest that is known here.

        Returns:
            Whether one is missing that was not known to be.
        """
        key = (namespace, signer)
        before = self._missing.get(key, 0)
        if latest <= max(known, before) or (not before and len(self._missing) >= MAX_WITHHELD):
            return False
        self._missing[key] = latest
        return True

    def arrived(self, signer: bytes, latest: Callable[[bytes, NamespaceId], int]) -> None:
        """A revocation of a signer has come.

        Args:
            signer: whose.
            latest: sequence of the latest of a signer that is known in a namespace.
        """
        for key, wanted in list(self._missing.items()):
            if key[1] == signer and latest(signer, key[0]) >= wanted:
                del self._missing[key]

    def leave(self, namespace: NamespaceId) -> None:
        """Forget what is missing in a namespace."""
        self._missing = {key: wanted for key, wanted in self._missing.items() if key[0] != namespace}

    def publishers(self) -> dict[bytes, frozenset[bytes]]:
        """By namespace, of whom a revocation is missing."""
        found: dict[bytes, set[bytes]] = {}
        for namespace, signer in self._missing:
            found.setdefault(namespace, set()).add(signer)
        return {namespace: frozenset(signers) for namespace, signers in found.items()}
