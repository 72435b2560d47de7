"""Secrets that only one publisher key can read: libsodium's sealed box for the Ed25519 key turned into an X25519 key.

The same bytes that libsodium's ``crypto_box_seal`` makes, with the random bytes as an argument: an ephemeral public
key, then ``crypto_box`` under the nonce BLAKE2b-192(ephemeral || recipient). Whoever sealed it is not named in it; the
statement that carries it is signed.
"""

from nacl.bindings import crypto_box, crypto_box_NONCEBYTES, crypto_scalarmult_base
from nacl.encoding import RawEncoder
from nacl.exceptions import CryptoError
from nacl.hash import blake2b
from nacl.signing import VerifyKey

from kvnet.trust.keys import is_public_key

EPHEMERAL_SIZE_BYTES = 32
"""A secret key of X25519, used for one box (RFC 7748, section 5)."""


def seal_for(member: bytes, secret: bytes, ephemeral: bytes) -> bytes | None:
    """A secret in a box that only one publisher can open, with `PublisherKey.open_sealed`.

    Args:
        member: publisher id.
        secret: what goes in.
        ephemeral: 32 fresh random bytes, used for this box alone.

    Returns:
        The box; ``None`` for a publisher id that is no point of the curve, whose key nobody can have.
    """
    recipient = _recipient(member)
    if recipient is None:
        return None
    public = crypto_scalarmult_base(ephemeral)
    nonce = blake2b(public + recipient, digest_size=crypto_box_NONCEBYTES, encoder=RawEncoder)
    return public + crypto_box(secret, nonce, recipient, ephemeral)


def can_be_sealed_for(member: bytes) -> bool:
    """Whether anybody can have the key of this publisher id."""
    return _recipient(member) is not None


def _recipient(member: bytes) -> bytes | None:
    """The X25519 key of a publisher id."""
    if not is_public_key(member):
        return None
    try:
        return bytes(VerifyKey(member).to_curve25519_public_key())
    except CryptoError:
        return None
