"""Envelopes: one shape, one signer, one statement type; a foreign COSE library agrees."""

import random
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pycose.algorithms import EdDSA
from pycose.headers import KID, Algorithm, ContentType
from pycose.keys.curves import Ed25519
from pycose.keys.okp import OKPKey
from pycose.messages.sign1message import Sign1Message

from kvnet.errors import KvnetError, MalformedError, TrustError, UnsupportedVersionError
from kvnet.format.limits import MAX_ENVELOPE_BYTES, MAX_MANIFEST_BYTES
from kvnet.format.manifest import encode_manifest
from kvnet.trust.envelope import StatementType, open_envelope, open_manifest, seal
from tests.unit.trust.samples import FRIEND, OWN, make_artifact

MANIFEST = StatementType.MANIFEST
SEED = b"\1" * 32  # of OWN
ARTIFACT = make_artifact()


def foreign_key(signing: bool = False) -> OKPKey:
    return OKPKey(crv=Ed25519, x=OWN.public, d=SEED if signing else b"")


def foreign_envelope(
    payload: bytes,
    *,
    content_type: str = MANIFEST.content_type,
    aad: bytes = MANIFEST.external_aad,
    kid: bytes = OWN.public,
    unprotected: dict[object, object] | None = None,
) -> bytes:
    message: Any = Sign1Message(
        phdr={Algorithm: EdDSA, ContentType: content_type, KID: kid}, uhdr=unprotected or {}, payload=payload
    )
    message.key = foreign_key(signing=True)
    message.external_aad = aad
    return bytes(message.encode(tag=False))


@pytest.mark.parametrize("statement", StatementType)
def test_foreign_cose_library_verifies_our_envelope(statement: StatementType) -> None:
    message: Any = Sign1Message.from_cose_obj(cbor2.loads(seal(statement, b"payload", OWN)), True)
    message.external_aad = statement.external_aad
    message.key = foreign_key()
    assert message.verify_signature()
    assert message.payload == b"payload"
    assert message.phdr == {Algorithm: EdDSA, ContentType: statement.content_type, KID: OWN.public}
    assert message.uhdr == {}


def test_foreign_cose_library_refuses_our_envelope_under_another_statement_type() -> None:
    message: Any = Sign1Message.from_cose_obj(cbor2.loads(seal(MANIFEST, b"payload", OWN)), True)
    message.external_aad = StatementType.REVOCATION.external_aad
    message.key = foreign_key()
    assert not message.verify_signature()


def test_envelope_of_a_foreign_cose_library_is_the_same_to_the_byte() -> None:
    assert foreign_envelope(ARTIFACT.envelope[:100]) == seal(MANIFEST, ARTIFACT.envelope[:100], OWN)


def test_envelope_is_deterministic() -> None:
    assert seal(MANIFEST, b"payload", OWN) == seal(MANIFEST, b"payload", OWN)


@pytest.mark.parametrize("size", [0, 1, 23, 24, 255, 256, 4096, 65535, 65536])
def test_payload_of_any_length_comes_back_with_its_signer(size: int) -> None:
    payload = bytes(size)
    opened = open_envelope(MANIFEST, seal(MANIFEST, payload, OWN), max_payload_bytes=65536)
    assert (opened.payload, opened.signer) == (payload, OWN.public)


def test_signed_manifest_opens() -> None:
    signed = open_manifest(ARTIFACT.envelope)
    assert signed.manifest == ARTIFACT.manifest
    assert signed.manifest_bytes == encode_manifest(ARTIFACT.manifest)
    assert signed.artifact_hash == ARTIFACT.hash
    assert signed.envelope == ARTIFACT.envelope
    assert len(ARTIFACT.envelope) <= MAX_ENVELOPE_BYTES


def test_largest_manifest_fits_an_envelope() -> None:
    assert len(seal(MANIFEST, bytes(MAX_MANIFEST_BYTES), OWN)) <= MAX_ENVELOPE_BYTES


# --- who signed what ------------------------------------------------------------------------------------------


def test_manifest_signed_by_another_key_than_it_claims_is_refused() -> None:
    forged = make_artifact(key=FRIEND, publisher=OWN.public)
    with pytest.raises(TrustError, match="that the manifest names") as refused:
        open_manifest(forged.envelope)
    assert refused.value.exit_code == 30


def test_valid_signature_over_another_manifest_is_refused() -> None:
    other = make_artifact(range(500))
    transplanted = ARTIFACT.envelope[:-64] + other.envelope[-64:]
    with pytest.raises(TrustError, match="a signature that is not valid"):
        open_manifest(transplanted)


def test_signature_of_another_key_under_the_claimed_kid_is_refused() -> None:
    theirs = seal(MANIFEST, encode_manifest(ARTIFACT.manifest), FRIEND)
    with pytest.raises(TrustError, match="a signature that is not valid"):
        open_manifest(ARTIFACT.envelope[:-64] + theirs[-64:])


def test_unsigned_manifest_is_refused() -> None:
    payload = encode_manifest(ARTIFACT.manifest)
    with pytest.raises(TrustError, match="not valid"):
        open_manifest(ARTIFACT.envelope[:-64] + bytes(64))
    for unsigned in (payload, ARTIFACT.envelope[:-66] + b"\x40", ARTIFACT.envelope[:-66]):
        with pytest.raises(MalformedError):
            open_manifest(unsigned)


def test_signature_of_another_statement_type_is_refused() -> None:
    payload = encode_manifest(ARTIFACT.manifest)
    with pytest.raises(TrustError, match="expected a signed manifest, found a signed revocation"):
        open_manifest(seal(StatementType.REVOCATION, payload, OWN))
    # Dressed up as a manifest: the header is right, the signature was made for something else.
    dressed = foreign_envelope(payload, aad=StatementType.REVOCATION.external_aad)
    with pytest.raises(TrustError, match="not valid"):
        open_manifest(dressed)


def test_relayed_bytes_are_judged_by_their_signature_and_not_by_who_sent_them() -> None:
    assert open_manifest(bytes(bytearray(ARTIFACT.envelope))).manifest.publisher == OWN.public


@given(st.integers(0, len(ARTIFACT.envelope) - 1), st.integers(1, 255))
def test_any_changed_byte_is_refused(position: int, difference: int) -> None:
    changed = bytearray(ARTIFACT.envelope)
    changed[position] ^= difference
    with pytest.raises((TrustError, MalformedError)):
        open_manifest(bytes(changed))


# --- shape ----------------------------------------------------------------------------------------------------


def variants() -> dict[str, bytes]:
    good = foreign_envelope(b"payload")
    fields = cbor2.loads(good)
    payload_start = good.index(b"\xa0") + 1
    return {
        "empty": b"",
        "one byte": b"\x84",
        "header only": good[: payload_start - 1],
        "nothing after the header": good[:payload_start],
        "trailing byte": good + b"\0",
        "truncated": good[:-1],
        "tagged": b"\xd2" + good,
        "three items": b"\x83" + good[1:],
        "indefinite array": b"\x9f" + good[1:] + b"\xff",
        "unprotected header": foreign_envelope(b"payload", unprotected={KID: OWN.public}),
        "other content type": foreign_envelope(b"payload", content_type="application/octet-stream"),
        "longer payload head than needed": good[:payload_start] + b"\x58\x07" + good[payload_start + 1 :],
        "eight-byte payload head": good[:payload_start] + b"\x5b" + bytes(7) + b"\x07" + good[payload_start + 1 :],
        "indefinite payload": good[:payload_start] + b"\x5f\x47payload\xff" + good[-66:],
        "text payload": good[:payload_start] + b"\x67" + good[payload_start + 1 :],
        "no payload": cbor2.dumps([fields[0], {}, None, fields[3]]),
        "long signature": cbor2.dumps([fields[0], {}, b"payload", fields[3] + b"\0"]),
        "short kid": foreign_envelope(b"payload", kid=OWN.public[:-1]),
        "protected as a map": cbor2.dumps([cbor2.loads(fields[0]), {}, b"payload", fields[3]]),
    }


@pytest.mark.parametrize("variant", variants())
def test_envelope_of_another_shape_is_refused(variant: str) -> None:
    with pytest.raises(MalformedError, match="COSE_Sign1"):
        open_envelope(MANIFEST, variants()[variant], max_payload_bytes=100)


def test_envelope_above_its_size_is_refused_unread() -> None:
    with pytest.raises(MalformedError, match="at most"):
        open_manifest(bytes(1 << 20))


def test_payload_above_its_size_is_refused() -> None:
    with pytest.raises(MalformedError, match="expected a manifest of at most 6 bytes, found 7"):
        open_envelope(MANIFEST, seal(MANIFEST, b"payload", OWN), max_payload_bytes=6)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x81" * 4000,
        b"\xa1\x00" * 2000,
        b"\xc1" * 4000,
        b"\x9f" * 4000,
        b"\x81" * 500 + b"\x00",
        b"\xa1\x61a" * 500 + b"\x00",
        b"\x5b" + b"\xff" * 8,
        b"\x9b\x00\x00\x00\xff\xff\xff\xff\xff",
    ],
)
def test_nested_or_oversized_cbor_in_a_validly_signed_manifest_is_refused(payload: bytes) -> None:
    with pytest.raises(MalformedError):
        open_manifest(seal(MANIFEST, payload, OWN))


@pytest.mark.parametrize("unit", [b"\x81", b"\xa1\x00", b"\xc1", b"\x9f"])
def test_hundred_thousand_levels_of_nesting_sent_as_an_envelope_are_refused(unit: bytes) -> None:
    with pytest.raises(MalformedError):
        open_manifest(unit * 100_000)


def test_manifest_of_a_later_version_is_told_apart_from_garbage() -> None:
    document = cbor2.loads(encode_manifest(ARTIFACT.manifest))
    later = cbor2.dumps(document | {"version": 2}, canonical=True)
    with pytest.raises(UnsupportedVersionError):
        open_manifest(seal(MANIFEST, later, OWN))


def test_ten_thousand_random_envelopes_raise_nothing_but_our_errors() -> None:
    rng = random.Random(1)
    good = ARTIFACT.envelope
    for _ in range(10_000):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            start = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[start] = rng.randrange(256)
                case 1:
                    del data[start : start + rng.randrange(1, 40)]
                case 2:
                    data[start:start] = rng.randbytes(rng.randrange(1, 40))
                case _:
                    data[start:] = rng.randbytes(rng.randrange(80))
            if not data:
                break
        if bytes(data) != good:
            with pytest.raises(KvnetError):
                open_manifest(bytes(data))


def test_thousands_of_damaged_manifests_with_a_valid_signature_raise_nothing_but_our_errors() -> None:
    rng = random.Random(2)
    good = encode_manifest(ARTIFACT.manifest)
    accepted = 0
    for _ in range(10_000):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            open_manifest(seal(MANIFEST, bytes(data), OWN))
            accepted += 1
        except KvnetError:
            continue
    # What was changed may be a hash or a text; it is then another manifest, of the same publisher.
    assert accepted < 10_000
