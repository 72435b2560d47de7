"""Secrets that one publisher alone can read."""

import pytest
from nacl.public import SealedBox
from nacl.signing import SigningKey

from kvnet.trust.keys import FIELD_PRIME, is_public_key
from kvnet.trust.sealing import can_be_sealed_for, seal_for
from kvnet.trust.statement_bodies import SEALED_SIZE_BYTES
from tests.unit.trust.members import key

EPHEMERAL = b"e" * 32
SECRET = bytes(range(32))


def test_box_is_opened_by_its_recipient_alone() -> None:
    box = seal_for(key("a").public, SECRET, EPHEMERAL)
    assert box is not None
    assert len(box) == SEALED_SIZE_BYTES
    assert key("a").open_sealed(box) == SECRET
    assert key("b").open_sealed(box) is None


@pytest.mark.parametrize("place", [0, 31, 32, 79])
def test_box_that_was_changed_is_not_opened(place: int) -> None:
    box = seal_for(key("a").public, SECRET, EPHEMERAL)
    assert box is not None
    changed = box[:place] + bytes([box[place] ^ 1]) + box[place + 1 :]
    assert key("a").open_sealed(changed) is None
    assert key("a").open_sealed(b"short") is None


def test_libsodium_opens_and_makes_the_same_boxes() -> None:
    seed = b"a".ljust(32, b".")
    secret_key = SigningKey(seed).to_curve25519_private_key()
    box = seal_for(key("a").public, SECRET, EPHEMERAL)
    assert box is not None
    assert SealedBox(secret_key).decrypt(box) == SECRET
    assert key("a").open_sealed(SealedBox(secret_key.public_key).encrypt(SECRET)) == SECRET


def off_curve() -> bytes:
    """32 bytes that look like a key and are no point of the curve."""
    for y in range(2, 100):
        candidate = y.to_bytes(32, "little")
        if is_public_key(candidate) and not can_be_sealed_for(candidate):
            return candidate
    raise AssertionError("half of all y are on no point")


@pytest.mark.parametrize("member", [b"", bytes(32), (FIELD_PRIME + 5).to_bytes(32, "little"), off_curve()])
def test_nothing_is_sealed_for_a_key_that_nobody_can_have(member: bytes) -> None:
    assert seal_for(member, SECRET, EPHEMERAL) is None
    assert not can_be_sealed_for(member)
