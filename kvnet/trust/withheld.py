"""Revocations that are known to exist and have not arrived: somebody holds them back. Pure.

A provider record says which revocation is its signer's latest in a namespace, and how many there are. Who knows earlier
ones only, or fewer, has been told less than there is; the signer's artifacts are not used until they have arrived.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from kvnet.format.hashes import NamespaceId

MAX_WITHHELD: Final = 1024
"""Signers of whom one is missing; no more are remembered at a time."""


class Extent(NamedTuple):
    """How far somebody's revocations go in a namespace.

    Attributes:
        latest: sequence of the latest; 0 for none.
        number: how many there are.
    """

    latest: int = 0
    number: int = 0

    def covers(self, other: "Extent") -> bool:
        """Whether whoever has as much misses nothing of the other."""
        return self.latest >= other.latest and self.number >= other.number


NO_REVOCATIONS: Final = Extent()
"""Of whoever has revoked nothing, or of whom nothing is known."""


class Withheld:
    """The revocations that are missing."""

    def __init__(self) -> None:
        self._missing: dict[tuple[NamespaceId, bytes], Extent] = {}

    def __len__(self) -> int:
        return len(self._missing)

    def told_of(self, namespace: NamespaceId, signer: bytes, told: Extent, known: Extent) -> bool:
        """A record says that revocations exist.

        Args:
            namespace: that the record is of.
            signer: of the record.
            told: of its revocations there.
            known: of those that are known here.

        Returns:
            Whether one is missing that was not known to be.
        """
        key = (namespace, signer)
        before = self._missing.get(key)
        if known.covers(told) or (before is not None and before.covers(told)):
            return False
        if before is None and len(self._missing) >= MAX_WITHHELD:
            return False
        # Each at its highest: a record that was said earlier may come later.
        self._missing[key] = Extent(*map(max, zip(told, before or NO_REVOCATIONS, strict=True)))
        return True

    def arrived(self, signer: bytes, known: Callable[[bytes, NamespaceId], Extent]) -> None:
        """A revocation of a signer has come.

        Args:
            signer: whose.
            known: of a signer in a namespace, as far as it is known here.
        """
        for key, wanted in list(self._missing.items()):
            if key[1] == signer and known(signer, key[0]).covers(wanted):
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
