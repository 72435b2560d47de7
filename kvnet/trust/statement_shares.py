"""How many statements of anybody are kept in a namespace, so that nobody fills it up for the others."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from kvnet.format.hashes import NamespaceId
from kvnet.trust.statement_places import NOTES, PlaceKey

MAX_IN_NAMESPACE: Final = 4096
"""Statements kept for one namespace: what one `GetStatements` can name."""
MAX_OF_SIGNER: Final = 1024
"""Of those, statements of one signer that is known there."""
MAX_NOTES_OF_SIGNER: Final = 512
"""Of those, notes: they never take the place of a revocation or a membership."""
MAX_OF_STRANGER: Final = 16
"""Statements of one signer that is not known in the namespace."""
MAX_OF_STRANGERS: Final = 256
"""Statements of all such signers together in one namespace."""

KnownSigner = Callable[[NamespaceId, bytes], bool]
"""Whether a publisher is a member of a namespace, or believed anyway."""


class Shares:
    """Counts the places by namespace and signer."""

    def __init__(self) -> None:
        self._by_signer: Counter[tuple[NamespaceId, bytes]] = Counter()
        self._notes: Counter[tuple[NamespaceId, bytes]] = Counter()
        self._in_namespace: Counter[NamespaceId] = Counter()

    def count(self, key: PlaceKey, scopes: Iterable[NamespaceId], by: int) -> None:
        """Note that a place has come or gone.

        Args:
            key: which.
            scopes: the namespaces it was told in.
            by: 1 or -1.
        """
        for scope in scopes:
            self._by_signer[scope, key.signer] += by
            self._in_namespace[scope] += by
            if key.kind in NOTES:
                self._notes[scope, key.signer] += by

    def allows(self, key: PlaceKey, scope: NamespaceId, known: KnownSigner) -> bool:
        """Whether a signer may have one place more in a namespace, as far as its own share goes."""
        n_held = self._by_signer[scope, key.signer]
        if not known(scope, key.signer):
            n_strangers = sum(
                n for (where, who), n in self._by_signer.items() if where == scope and n and not known(scope, who)
            )
            return n_held < MAX_OF_STRANGER and n_strangers < MAX_OF_STRANGERS
        if key.kind in NOTES and self._notes[scope, key.signer] >= MAX_NOTES_OF_SIGNER:
            return False
        return n_held < MAX_OF_SIGNER

    def is_full(self, scope: NamespaceId) -> bool:
        """Whether something has to go from a namespace before anything else comes."""
        return self._in_namespace[scope] >= MAX_IN_NAMESPACE

    def gives_way(self, scope: NamespaceId, newcomer: bytes) -> bytes | None:
        """Who loses a place in a full namespace: whoever has the most there; None when the newcomer has as many.

        Args:
            scope: the namespace.
            newcomer: publisher id of the signer that wants one place more.
        """
        n_most, greediest = max((n, who) for (where, who), n in self._by_signer.items() if where == scope)
        return greediest if n_most > self._by_signer[scope, newcomer] + 1 else None
