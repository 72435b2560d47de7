"""Names of peers, apart from any transport."""

from functools import lru_cache
from typing import NewType

from kvnet.errors import UsageError

PeerId = NewType("PeerId", bytes)
"""Raw bytes of a libp2p peer id: for Ed25519 an identity multihash of 38 bytes that contains the public key."""

MAX_PEER_ID_BYTES = 42
"""The longest the libp2p peer-id specification allows: an identity multihash of a key of at most 40 encoded bytes."""

_BASE58_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_BASE58_VALUES = {character: value for value, character in enumerate(_BASE58_ALPHABET)}


@lru_cache(1024)
def peer_text(peer: PeerId) -> str:
    """The usual text of a peer id: base58btc, without a multibase prefix (``12D3Koo…`` for Ed25519)."""
    number = int.from_bytes(peer, "big")
    digits: list[str] = []
    while number:
        number, digit = divmod(number, 58)
        digits.append(_BASE58_ALPHABET[digit])
    # Every leading zero byte is one "1", as numbers have no leading zeros.
    leading = len(peer) - len(peer.lstrip(b"\0"))
    return "1" * leading + "".join(reversed(digits))


def parse_peer_text(text: str) -> PeerId:
    """The peer id in a text made by `peer_text`.

    Raises:
        UsageError: it is not base58 of 1 to 42 bytes.
    """
    # 42 bytes are at most 58 characters; the bound keeps the arithmetic small.
    if not 0 < len(text) <= 58 or any(character not in _BASE58_VALUES for character in text):
        raise UsageError(f"expected a peer id in base58 of at most 58 characters, found {text[:64]!r}")
    number = 0
    for character in text:
        number = number * 58 + _BASE58_VALUES[character]
    leading = len(text) - len(text.lstrip("1"))
    data = b"\0" * leading + number.to_bytes((number.bit_length() + 7) // 8, "big")
    if len(data) > MAX_PEER_ID_BYTES:
        raise UsageError(f"expected a peer id of at most {MAX_PEER_ID_BYTES} bytes, found {len(data)}")
    return PeerId(data)


def short_peer_text(peer: PeerId) -> str:
    """The last 8 characters of the text, for lines where the beginning, equal for all peers, says nothing."""
    return "…" + peer_text(peer)[-8:]
