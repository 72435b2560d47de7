"""Statements are signed, opened and held against the clock.

`open_statement` checks size, shape and signature; `timely` the times. Whether the signer may say it is for
`kvnet.trust.roster` and the policy.
"""

from typing import Final

import msgspec

from kvnet.errors import MalformedError, TrustError
from kvnet.format import cbor
from kvnet.trust.envelope import StatementType, open_envelope, seal
from kvnet.trust.keys import PublisherKey, is_public_key, verify_signature
from kvnet.trust.statement_bodies import (
    BODIES,
    AnyStatement,
    Invitation,
    KeyRotation,
    Membership,
    ProviderRecord,
    Rekey,
    Revocation,
)

CLOCK_SKEW_S: Final = 600
"""Seconds by which the clocks of two machines may differ."""

MAX_STATEMENT_BYTES: Final = 24 * 1024
"""The largest body; a rekeying for 128 members has about 18 KiB, a full page of provider records about 15."""

MAX_PROVIDER_LIFE_S: Final = 2 * 3600
"""Longest life of a provider record: who goes without a word is forgotten after that."""

MAX_INVITATION_LIFE_S: Final = 30 * 24 * 3600
"""Longest life of an invitation."""

_TYPES: Final = {body: kind for kind, body in BODIES.items()}

_MAX_LIFE_S: Final[dict[type[AnyStatement], int]] = {
    ProviderRecord: MAX_PROVIDER_LIFE_S,
    Invitation: MAX_INVITATION_LIFE_S,
}
"""Those that must expire, and how soon."""


class SignedStatement(msgspec.Struct, frozen=True, kw_only=True):
    """A statement whose signature is valid.

    Attributes:
        kind: its type.
        body: what it says.
        signer: publisher id of the key that signed it.
        envelope: the whole envelope, to keep and to hand on.
    """

    kind: StatementType
    body: AnyStatement
    signer: bytes
    envelope: bytes


def sign_statement(body: AnyStatement, key: PublisherKey) -> SignedStatement:
    """A statement of this publisher."""
    kind = _TYPES[type(body)]
    return SignedStatement(kind=kind, body=body, signer=key.public, envelope=seal(kind, cbor.encode_struct(body), key))


def open_statement(envelope: bytes, *, kind: StatementType | None = None) -> SignedStatement:
    """Check size, shape and signature of a statement, in that order.

    Args:
        envelope: as received.
        kind: the type expected; ``None`` for any of `BODIES`.

    Raises:
        MalformedError: too large, or not of the shape of this type.
        TrustError: another type than the one expected, a signature that is not valid, or a body that no honest
            publisher signs.
    """
    if kind is None:
        kind = next((known for known in BODIES if known.recognises(envelope)), None)
        if kind is None:
            raise MalformedError("expected a signed statement of a known type, found other bytes")
    opened = open_envelope(kind, envelope, max_payload_bytes=MAX_STATEMENT_BYTES)
    body = cbor.decode_as(BODIES[kind], opened.payload, max_bytes=MAX_STATEMENT_BYTES, what=f"signed {kind.value}")
    statement = SignedStatement(kind=kind, body=body, signer=opened.signer, envelope=bytes(envelope))
    _check_keys(statement)
    return statement


def timely(body: AnyStatement, now_s: float) -> str | None:
    """Why the times of a statement do not let it count; ``None`` when they do.

    Args:
        body: whose times are looked at.
        now_s: seconds since 1970 on this machine.
    """
    latest_s = now_s + CLOCK_SKEW_S
    # A sequence from the far future would outrank all to come, and so would the one a record tells of.
    dated_s = max(
        body.issued, body.sequence // 1000, body.revocations // 1000 if isinstance(body, ProviderRecord) else 0
    )
    if dated_s > latest_s:
        return f"it is dated {dated_s - now_s:,.0f} s in the future"
    if body.expires and body.expires <= now_s:
        return f"it expired {now_s - body.expires:,.0f} s ago"
    life_s = _MAX_LIFE_S.get(type(body))
    if life_s is not None and not 0 < body.expires - body.issued <= life_s:
        return f"it does not expire within {life_s:,} s of its issue"
    return None


def next_sequence(now_s: float, last: int) -> int:
    """The sequence of a new statement on a subject.

    Args:
        now_s: seconds since 1970.
        last: that of the signer's last statement on it, 0 for none.
    """
    return max(int(now_s * 1000), last + 1)


def rotation_message(old: bytes, new: bytes, sequence: int) -> bytes:
    """What the new key signs in a `KeyRotation`."""
    return b"kvnet 2026-11 key rotation\0" + old + new + sequence.to_bytes(8, "big")


def _check_keys(statement: SignedStatement) -> None:
    body = statement.body
    match body:
        case KeyRotation():
            message = rotation_message(statement.signer, body.new, body.sequence)
            if body.new == statement.signer or not verify_signature(body.new, message, body.new_signature):
                raise TrustError("expected a key rotation that both keys have signed, found one of the old key alone")
        case Membership() if not is_public_key(body.member):
            raise MalformedError("expected the publisher id of a member, found bytes that cannot be one")
        case Rekey() if len({sealed.member for sealed in body.sealed}) != len(body.sealed):
            raise MalformedError("expected each member once in a rekeying, found one twice")
        case Revocation() if body.expires:
            raise MalformedError("expected a revocation that holds for ever, found one that expires")
        case ProviderRecord() if len({entry.artifact for entry in body.entries}) != len(body.entries):
            raise MalformedError("expected each artifact once in a provider record, found one twice")
        case _:
            pass
