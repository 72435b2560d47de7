"""The place of a statement: of one signer, one type and one subject only one statement counts.

The place outlives it: what has expired leaves its sequence behind, and nothing earlier takes the place.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Final, NamedTuple, Self

import msgspec

from kvnet.format.hashes import NamespaceId
from kvnet.trust.envelope import StatementType
from kvnet.trust.statement_bodies import AnyStatement
from kvnet.trust.statements import SignedStatement

NOTES: Final = frozenset({StatementType.TAG, StatementType.ATTESTATION, StatementType.REMOVAL})
"""What nobody's safety hangs on."""
NOT_KEPT: Final = frozenset({StatementType.PROVIDER, StatementType.INVITATION})
"""Provider records are renewed before anybody could restart; invitations are secrets."""


class PlaceKey(NamedTuple):
    """What a place is named by.

    Attributes:
        signer: publisher id.
        kind: type of the statement.
        subject: what it is about, `Statement.subject`.
    """

    signer: bytes
    kind: StatementType
    subject: bytes

    @classmethod
    def of(cls, statement: SignedStatement) -> Self:
        """The place that a statement has, or would take."""
        return cls(statement.signer, statement.kind, statement.body.subject)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One place, as it is kept on disk.

    Attributes:
        signer: publisher id.
        kind: value of the `StatementType`.
        subject: of the statement.
        sequence: nothing below it takes the place again.
        hash: BLAKE3 of the envelope, 32 bytes.
        scopes: ids of the namespaces it was told in, ascending.
        envelope: empty once the statement has expired.
    """

    signer: bytes
    kind: str
    subject: bytes
    sequence: int
    hash: bytes
    scopes: tuple[bytes, ...]
    envelope: bytes


class Verdict(StrEnum):
    """What became of a statement; stable, for counters."""

    NEW = "new"
    WIDENED = "widened"
    """Known, but not in this namespace until now."""
    KNOWN = "known"
    OUTRANKED = "outranked"
    FULL = "full"


def namespace_of(body: AnyStatement) -> NamespaceId | None:
    """The namespace that a statement names; None for one of a type that names none."""
    named: bytes | None = getattr(body, "namespace", None)
    return None if named is None else NamespaceId(named)


def scopes_of_body(body: AnyStatement, told_in: Iterable[NamespaceId]) -> frozenset[NamespaceId]:
    """Where a statement may be told: in the namespace it names, otherwise where it was told.

    Args:
        body: what it says.
        told_in: the namespaces it came by, or is said in.

    Returns:
        Nothing for a statement that names another namespace than those.
    """
    named = namespace_of(body)
    allowed = frozenset(told_in)
    return allowed if named is None else allowed & {named}
