"""Publisher keys: Ed25519 with one written rule for what a valid signature is.

RFC 8032 leaves room, and libraries use it differently: the same signature may be valid in one and not in another.
Here a signature is valid when all of these hold:

1. the public key is 32 bytes and the signature 64;
2. S, the second half read little-endian, is below the group order L;
3. A (the public key) and R (the first half) are canonical: their y is below p, and the sign bit is 0 where x is 0;
4. neither A nor R has small order;
5. both are points of the curve, and the equation without cofactor holds: encode([S]B - [k]A) equals R byte for byte.

1 to 4 are checked here with integers, 5 by libsodium. No two nodes can disagree about a signature, and nobody can turn
one valid signature into another without the key.
"""

import base64
import binascii
import hmac

from nacl.exceptions import BadSignatureError, CryptoError
from nacl.public import SealedBox
from nacl.signing import SigningKey, VerifyKey

from kvnet.errors import UsageError
from kvnet.format.hashes import derive_key

# RFC 8032, section 5.1: private key, public key, signature.
SEED_SIZE_BYTES = 32
PUBLIC_KEY_SIZE_BYTES = 32
SIGNATURE_SIZE_BYTES = 64

FIELD_PRIME = 2**255 - 19
"""p of RFC 8032, section 5.1."""
GROUP_ORDER = 2**252 + 27742317777372353535851937790883648493
"""L of RFC 8032, section 5.1."""

_SIGN_BIT = 1 << 255
_ORDER_8_Y = int.from_bytes(bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"), "little")
SMALL_ORDER_Y = frozenset({0, 1, FIELD_PRIME - 1, _ORDER_8_Y, FIELD_PRIME - _ORDER_8_Y})
"""The y of the eight points whose order divides 8: order 4 (0), 1 (1), 2 (-1), and 8 (the last two).

x is 0 exactly where y is 1 or -1, so refusing these y also refuses "-0", the other non-canonical form."""

TEXT_PREFIX = "kvpub1"
"""Every publisher's text begins so."""
_TEXT_CHECKSUM_BYTES = 3  # 32 + 3 bytes are exactly 56 characters of base32, with no bits left over
_TEXT_LENGTH = 56
_TEXT_CONTEXT = "kvnet 2026-11 publisher text"


class PublisherKey:
    """A publisher's secret key. It is not the peer key: publishers outlive machines.

    Args:
        seed: 32 random bytes, the Ed25519 private key of RFC 8032.

    Raises:
        UsageError: the seed is not 32 bytes.
    """

    __slots__ = ("_signing_key", "public")

    def __init__(self, seed: bytes) -> None:
        if len(seed) != SEED_SIZE_BYTES:
            raise UsageError(f"expected a seed of {SEED_SIZE_BYTES} bytes for a publisher key, found {len(seed)}")
        self._signing_key = SigningKey(bytes(seed))
        self.public: bytes = bytes(self._signing_key.verify_key)
        """The publisher id: the 32-byte public key."""

    def sign(self, message: bytes) -> bytes:
        """The 64-byte signature of a message. Sign statements with `kvnet.trust.envelope.seal`, never bare bytes."""
        return self._signing_key.sign(message).signature

    def open_sealed(self, box: bytes) -> bytes | None:
        """What `kvnet.trust.sealing.seal_for` sealed for this key; ``None`` when it is for another, or was changed."""
        try:
            return SealedBox(self._signing_key.to_curve25519_private_key()).decrypt(box)
        except CryptoError:
            return None

    def __repr__(self) -> str:
        return f"PublisherKey({publisher_text(self.public)})"


def is_public_key(data: bytes) -> bool:
    """Whether these bytes are a canonical encoding that is not of small order; not whether they are on the curve."""
    return len(data) == PUBLIC_KEY_SIZE_BYTES and _is_good_point(data)


def verify_signature(public: bytes, message: bytes, signature: bytes) -> bool:
    """Whether a signature is valid by the rule of this module; wrong lengths are simply not valid.

    Args:
        public: the publisher id, 32 bytes.
        message: what was signed.
        signature: 64 bytes.
    """
    if len(signature) != SIGNATURE_SIZE_BYTES or not is_public_key(public):
        return False
    if int.from_bytes(signature[32:], "little") >= GROUP_ORDER or not _is_good_point(signature[:32]):
        return False
    try:
        VerifyKey(public).verify(message, signature)
    except BadSignatureError:
        return False
    return True


def _is_good_point(encoded: bytes) -> bool:
    y = int.from_bytes(encoded, "little") & ~_SIGN_BIT
    return y < FIELD_PRIME and y not in SMALL_ORDER_Y


def publisher_text(public: bytes) -> str:
    """The text form of a publisher id, for people to copy: ``kvpub1`` and 56 characters, the last 5 a checksum.

    Raises:
        UsageError: `public` is not 32 bytes.
    """
    if len(public) != PUBLIC_KEY_SIZE_BYTES:
        raise UsageError(f"expected a publisher id of {PUBLIC_KEY_SIZE_BYTES} bytes, found {len(public)}")
    return TEXT_PREFIX + base64.b32encode(public + _checksum(public)).decode("ascii").lower()


def parse_publisher_text(text: str) -> bytes:
    """The publisher id in a text made by `publisher_text`; case and surrounding white space do not matter.

    Raises:
        UsageError: it is not such a text, a character is wrong, or no key can look like that.
    """
    stripped = text.strip().lower()
    hint = "`kvnet key show` on the publisher's machine prints it; copy it whole"
    if not stripped.startswith(TEXT_PREFIX):
        raise UsageError(f"expected a publisher id beginning {TEXT_PREFIX}, found {_shown(stripped)}", hint=hint)
    body = stripped.removeprefix(TEXT_PREFIX)
    if len(body) != _TEXT_LENGTH:
        raise UsageError(f"expected {_TEXT_LENGTH} characters after {TEXT_PREFIX}, found {len(body)}", hint=hint)
    try:
        data = base64.b32decode(body.upper())
    except (binascii.Error, ValueError) as error:
        raise UsageError("expected only the letters a-z and the digits 2-7 in a publisher id", hint=hint) from error
    public, checksum = data[:PUBLIC_KEY_SIZE_BYTES], data[PUBLIC_KEY_SIZE_BYTES:]
    if not hmac.compare_digest(checksum, _checksum(public)):
        raise UsageError("expected a publisher id whose checksum fits, found one with a wrong character", hint=hint)
    if not is_public_key(public):
        raise UsageError("expected an Ed25519 public key in a publisher id, found bytes that cannot be one", hint=hint)
    return public


def _checksum(public: bytes) -> bytes:
    return derive_key(_TEXT_CONTEXT, public)[:_TEXT_CHECKSUM_BYTES]


def _shown(text: str) -> str:
    shortened = text if len(text) <= 16 else text[:16] + "…"
    return repr(shortened)
