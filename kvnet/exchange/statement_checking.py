"""What has been told is opened, and what is no good is remembered, so that nobody sends it again and again."""

from collections import Counter
from collections.abc import Callable
from typing import Final

from kvnet.errors import KvnetError
from kvnet.exchange.statement_talk import name_of
from kvnet.format.hashes import NamespaceId
from kvnet.protocol.gossip import Exchanged
from kvnet.trust.envelope import StatementType
from kvnet.trust.statement_places import scopes_of_body
from kvnet.trust.statements import SignedStatement, open_statement, timely

MAX_REFUSED: Final = 4096
"""Statements remembered as no good; as many again for each namespace that they were misplaced in."""


class Opener:
    """Opens envelopes as they were told.

    Args:
        now: seconds since 1970.
        counters: counts what is no good, by its reason.
    """

    def __init__(self, now: Callable[[], float], counters: Counter[str]) -> None:
        self._now = now
        self._counters = counters
        self._refused = Exchanged(MAX_REFUSED)
        # By namespace: what is no good in one that it was told in may be good in the one that it names.
        self._misplaced: dict[NamespaceId, Exchanged] = {}

    def opened(self, envelope: bytes, namespace: NamespaceId) -> SignedStatement | None:
        """The statement in an envelope, if it may count now in the namespace that it was told in."""
        try:
            statement = open_statement(envelope)
        except KvnetError:
            self._refused.add(name_of(envelope))
            self._counters["statements_invalid"] += 1
            return None
        if timely(statement.body, self._now()) is not None:
            # Not remembered as no good: with a clock set right it may be.
            self._counters["statements_untimely"] += 1
            return None
        if statement.kind is StatementType.INVITATION or not scopes_of_body(statement.body, [namespace]):
            self._misplaced.setdefault(namespace, Exchanged(MAX_REFUSED)).add(name_of(envelope))
            self._counters["statements_misplaced"] += 1
            return None
        return statement

    def is_refused(self, name: bytes, namespace: NamespaceId) -> bool:
        """Whether the statement of a short name was found to be no good in a namespace."""
        return name in self._refused or name in self._misplaced.get(namespace, ())

    def refused(self, namespace: NamespaceId) -> list[bytes]:
        """Short names of what was found to be no good in a namespace."""
        return [*self._refused, *self._misplaced.get(namespace, ())]

    def leave(self, namespace: NamespaceId) -> None:
        """Forget a namespace that this node has left."""
        self._misplaced.pop(namespace, None)
