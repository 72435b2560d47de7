"""Signed statements about members, with as little as a test has to say."""

from kvnet.trust.keys import PublisherKey
from kvnet.trust.sealing import seal_for
from kvnet.trust.statement_bodies import KeyRotation, Membership, Rekey, SealedSecret
from kvnet.trust.statements import SignedStatement, rotation_message, sign_statement
from tests.unit.trust.samples import MINE


def key(name: str) -> PublisherKey:
    """The publisher key of a name."""
    return PublisherKey(name.encode().ljust(32, b"."))


def lets_in(
    signer: str, member: str, at: int, *, label: str | None = None, role: str = "colleague", namespace: bytes = MINE.id
) -> SignedStatement:
    """A membership."""
    body = Membership(
        sequence=at * 1000,
        issued=at,
        expires=0,
        namespace=namespace,
        member=key(member).public,
        peers=(b"peer of " + member.encode(),),
        role=role,  # type: ignore[arg-type]
        label=member if label is None else label,
    )
    return sign_statement(body, key(signer))


def rekeys(
    signer: str, at: int, *, out: str = "", stay: str = "", secret: bytes = b"s" * 32, namespace: bytes = MINE.id
) -> SignedStatement:
    """A rekeying; every letter is a name."""
    sealed = []
    for name in stay:
        box = seal_for(key(name).public, secret, (name + signer).encode().ljust(32, b"e"))
        assert box is not None
        sealed.append(SealedSecret(member=key(name).public, box=box))
    body = Rekey(
        sequence=at * 1000,
        issued=at,
        expires=0,
        namespace=namespace,
        removed=tuple(key(name).public for name in out),
        sealed=tuple(sealed),
    )
    return sign_statement(body, key(signer))


def rotates(old: str, new: str, at: int) -> SignedStatement:
    """A key rotation."""
    sequence = at * 1000
    signature = key(new).sign(rotation_message(key(old).public, key(new).public, sequence))
    body = KeyRotation(sequence=sequence, issued=at, expires=0, new=key(new).public, new_signature=signature)
    return sign_statement(body, key(old))
