"""What this node says itself: with a sequence that outranks all it has said before."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvnet.trust.keys import PublisherKey
from kvnet.trust.namespace import Namespace
from kvnet.trust.statement_bodies import AnyStatement, Revocation
from kvnet.trust.statement_book import StatementBook
from kvnet.trust.statement_places import NOT_KEPT
from kvnet.trust.statement_ranks import Ranks
from kvnet.trust.statements import CLOCK_SKEW_S, SignedStatement, next_sequence, sign_statement

MakeBody = Callable[[int, int], AnyStatement]
"""Gets the sequence and the time of issue (seconds since 1970) and returns the body; called again when the sequence was
too low."""


@dataclass(frozen=True, slots=True)
class Saying:
    """A statement to be said.

    Attributes:
        make_body: of it.
        namespaces: where to tell a statement that names no namespace itself; None for all of this node's.
        key: one of this node's; None for the signing key.
    """

    make_body: MakeBody
    namespaces: Sequence[Namespace] | None = None
    key: PublisherKey | None = None


class StatementSigner:
    """Signs statements.

    Args:
        book: what counts already.
        ranks: the same of what is not kept.
        now: seconds since 1970.
    """

    def __init__(self, book: StatementBook, ranks: Ranks, now: Callable[[], float]) -> None:
        self._book = book
        self._ranks = ranks
        self._now = now

    def sign(self, make_body: MakeBody, key: PublisherKey) -> SignedStatement:
        """A statement that takes the place of what this key has said before on its subject."""
        now_s = self._now()
        draft = sign_statement(make_body(int(now_s * 1000), int(now_s)), key)
        rank = self._ranks if draft.kind in NOT_KEPT else self._book
        last = rank.sequence(draft.kind, draft.body.subject, draft.signer)
        if isinstance(draft.body, Revocation):
            # One number stands for all of a signer's revocations in its provider records.
            latest = self._book.revocations(draft.signer)
            last = last if self._is_ahead(latest) else max(last, latest)
        sequence = next_sequence(now_s, last)
        return draft if sequence == draft.body.sequence else sign_statement(make_body(sequence, int(now_s)), key)

    def _is_ahead(self, sequence: int) -> bool:
        """Whether a sequence is from a time when this machine's clock was ahead: nobody else has taken it."""
        return sequence // 1000 > self._now() + CLOCK_SKEW_S
