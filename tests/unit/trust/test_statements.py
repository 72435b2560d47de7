"""Statements: what is written of each type, what is refused, and when it counts."""

import json
import random
from pathlib import Path
from typing import Any

import cbor2
import msgspec
import pytest

from kvnet.errors import KvnetError, MalformedError, TrustError
from kvnet.format import cbor
from kvnet.format.hashes import blake3_hash
from kvnet.trust.envelope import StatementType, seal
from kvnet.trust.keys import PublisherKey
from kvnet.trust.statement_bodies import (
    BODIES,
    MAX_MEMBERS,
    MAX_PAGES,
    PAGE_ARTIFACTS,
    AnyStatement,
    Attestation,
    HeldEntry,
    Invitation,
    KeyRotation,
    Membership,
    ProviderRecord,
    Rekey,
    Revocation,
    SealedSecret,
    Statement,
    Tag,
)
from kvnet.trust.statements import (
    CLOCK_SKEW_S,
    MAX_INVITATION_LIFE_S,
    MAX_PROVIDER_LIFE_S,
    MAX_STATEMENT_BYTES,
    next_sequence,
    open_statement,
    sign_statement,
    timely,
)
from scripts.regenerate_vectors import example_statements

VECTORS: Any = json.loads((Path(__file__).parents[2] / "vectors" / "statements.json").read_text())
ANN, BOB = PublisherKey(bytes([1]) * 32), PublisherKey(bytes([2]) * 32)
EXAMPLES = example_statements(ANN, BOB)
NOW_S = 1_800_000_000


def example(kind: type[Statement]) -> Any:
    return next(body for body in EXAMPLES.values() if isinstance(body, kind))


def changed(body: AnyStatement, **fields: object) -> AnyStatement:
    return msgspec.structs.replace(body, **fields)


def opened_with(body: AnyStatement, **fields: object) -> AnyStatement:
    """What a reader makes of a body with other fields, signed all the same."""
    document = cbor2.loads(cbor.encode_struct(body)) | fields
    kind = next(kind for kind, known in BODIES.items() if known is type(body))
    return open_statement(seal(kind, cbor2.dumps(document, canonical=True), ANN)).body


# --- golden vectors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", VECTORS["valid"], ids=lambda vector: vector["name"])
def test_golden_statements_are_read_and_written_again_byte_for_byte(vector: dict[str, str]) -> None:
    statement = open_statement(bytes.fromhex(vector["envelope"]))
    assert statement.kind.value == vector["type"]
    assert statement.signer.hex() == VECTORS["signer"] == ANN.public.hex()
    assert statement.body.subject.hex() == vector["subject"]
    assert cbor.encode_struct(statement.body).hex() == vector["payload"]
    assert blake3_hash(statement.envelope).hex() == vector["hash"]
    assert sign_statement(statement.body, ANN) == statement


@pytest.mark.parametrize("vector", VECTORS["refused"], ids=lambda vector: vector["name"])
def test_golden_statements_that_are_not_sound_are_refused(vector: dict[str, str]) -> None:
    with pytest.raises((MalformedError, TrustError)):
        open_statement(bytes.fromhex(vector["envelope"]))


def test_every_type_of_statement_has_a_golden_vector() -> None:
    assert {vector["type"] for vector in VECTORS["valid"]} == {kind.value for kind in BODIES}


# --- who, and of what type --------------------------------------------------------------------------------------------


def test_a_statement_of_another_type_than_expected_is_refused() -> None:
    envelope = sign_statement(example(Tag), ANN).envelope
    assert open_statement(envelope, kind=StatementType.TAG).kind is StatementType.TAG
    with pytest.raises(TrustError, match="expected a signed removal, found a signed tag"):
        open_statement(envelope, kind=StatementType.REMOVAL)


@pytest.mark.parametrize("told_as", BODIES)
@pytest.mark.parametrize("name", EXAMPLES)
def test_mix_and_match_a_body_signed_as_another_type_never_counts(name: str, told_as: StatementType) -> None:
    body = EXAMPLES[name]
    envelope = seal(told_as, cbor.encode_struct(body), ANN)
    if BODIES[told_as] is type(body):
        assert open_statement(envelope).body == body
        return
    with pytest.raises(MalformedError):
        open_statement(envelope)


def test_wrong_key_the_signature_is_that_of_the_key_that_is_named() -> None:
    envelope = sign_statement(example(Tag), ANN).envelope
    with pytest.raises(TrustError):
        open_statement(envelope.replace(ANN.public, BOB.public))


def test_other_bytes_are_no_statement() -> None:
    for data in (b"", b"\x84", b"hello", seal(StatementType.MANIFEST, b"\xa0", ANN)):
        with pytest.raises(MalformedError, match="signed statement of a known type"):
            open_statement(data)


def test_a_statement_that_is_too_large_is_refused_before_its_signature_is_looked_at() -> None:
    envelope = seal(StatementType.TAG, bytes(MAX_STATEMENT_BYTES + 1), ANN)
    with pytest.raises(MalformedError, match="at most"):
        open_statement(envelope[:-64] + bytes(64))


def test_the_largest_bodies_fit() -> None:
    keys = (bytes(32),) * 24
    entry = HeldEntry(artifact=bytes(32), n_tokens=2**32 - 1, codec="c" * 64, size_bytes=2**63 - 1, keys=keys)
    page = changed(
        example(ProviderRecord),
        addresses=("/" + "a" * 254,) * 8,
        entries=tuple(msgspec.structs.replace(entry, artifact=bytes([n]) * 32) for n in range(PAGE_ARTIFACTS)),
    )
    sealed = tuple(SealedSecret(member=bytes([n]) * 32, box=bytes(80)) for n in range(MAX_MEMBERS))
    for body in (page, changed(example(Rekey), removed=(bytes(32),) * 64, sealed=sealed)):
        assert open_statement(sign_statement(body, ANN).envelope).body == body


# --- what no honest publisher signs -----------------------------------------------------------------------------------


def test_a_rotation_counts_only_with_the_signature_of_the_new_key() -> None:
    rotation = example(KeyRotation)
    assert open_statement(sign_statement(rotation, ANN).envelope).body == rotation
    for other in (
        changed(rotation, new_signature=bytes(64)),
        changed(rotation, sequence=rotation.sequence + 1),
        changed(rotation, new=PublisherKey(bytes([9]) * 32).public),
    ):
        with pytest.raises(TrustError, match="both keys"):
            open_statement(sign_statement(other, ANN).envelope)
    with pytest.raises(TrustError, match="both keys"):
        open_statement(sign_statement(rotation, BOB).envelope)


def test_a_revocation_holds_for_ever() -> None:
    with pytest.raises(MalformedError, match="for ever"):
        opened_with(example(Revocation), expires=NOW_S + 100)


def test_members_are_keys_and_each_is_sealed_for_once() -> None:
    with pytest.raises(MalformedError, match="publisher id of a member"):
        opened_with(example(Membership), member=b"\xff" * 32)
    once = {"member": bytes(32), "box": bytes(80)}
    with pytest.raises(MalformedError, match="each member once"):
        opened_with(example(Rekey), sealed=[once, once])


def test_a_page_names_each_artifact_once() -> None:
    entry = cbor2.loads(cbor.encode_struct(example(ProviderRecord)))["entries"][0]
    with pytest.raises(MalformedError, match="each artifact once"):
        opened_with(example(ProviderRecord), entries=[entry, entry])


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Revocation, {"target": bytes(31)}),
        (Revocation, {"kind": "everything"}),
        (Revocation, {"reason": "r" * 201}),
        (Revocation, {"sequence": -1}),
        (Revocation, {"sequence": 2**63}),
        (Revocation, {"issued": 2**40}),
        (Revocation, {"version": 2}),
        (Revocation, {"more": 1}),
        (ProviderRecord, {"page": MAX_PAGES}),
        (ProviderRecord, {"peer": b""}),
        (ProviderRecord, {"addresses": ["no address"]}),
        (ProviderRecord, {"addresses": ["/a"] * 9}),
        (Invitation, {"uses": 0}),
        (Invitation, {"role": "boss"}),
        (Membership, {"label": "l" * 65}),
        (Tag, {"name": "Not A Name"}),
        (Tag, {"number": 0}),
        (Attestation, {"claim": "perhaps"}),
        (Attestation, {"max_difference": "-" * 33}),
    ],
)
def test_values_outside_their_bounds_are_refused(kind: type[Statement], fields: dict[str, object]) -> None:
    with pytest.raises(MalformedError):
        opened_with(example(kind), **fields)


def test_subjects_tell_apart_what_is_told_of() -> None:
    subjects = [body.subject for body in EXAMPLES.values()]
    assert len(set(subjects)) == len(subjects) - 1, "a removal and an attestation are of one artifact, and of two types"
    with pytest.raises(NotImplementedError):
        _ = Statement(sequence=0, issued=0, expires=0).subject


# --- times ------------------------------------------------------------------------------------------------------------


def test_clocks_may_differ_by_ten_minutes() -> None:
    body = example(Tag)
    assert timely(body, body.issued - CLOCK_SKEW_S) is None
    too_early = timely(body, body.issued - CLOCK_SKEW_S - 1)
    assert too_early == "it is dated 601 s in the future"


def test_fast_forward_a_sequence_from_the_far_future_counts_for_nothing() -> None:
    body = changed(example(Tag), sequence=(NOW_S + 10_000) * 1000)
    assert timely(body, NOW_S) == "it is dated 10,000 s in the future"
    assert timely(body, NOW_S + 10_000) is None


def test_a_record_that_tells_of_a_revocation_from_the_far_future_counts_for_nothing() -> None:
    body = changed(example(ProviderRecord), revocations=2**63 - 1)
    assert "in the future" in str(timely(body, NOW_S))


def test_what_has_expired_counts_no_more() -> None:
    body = changed(example(Tag), expires=NOW_S + 50)
    assert timely(body, NOW_S + 49) is None
    assert timely(body, NOW_S + 50) == "it expired 0 s ago"
    assert timely(changed(body, expires=0), 2**39) is None


@pytest.mark.parametrize(
    ("kind", "life_s"), [(ProviderRecord, MAX_PROVIDER_LIFE_S), (Invitation, MAX_INVITATION_LIFE_S)]
)
def test_records_and_invitations_expire_before_long(kind: type[Statement], life_s: int) -> None:
    body = example(kind)
    assert timely(changed(body, expires=body.issued + life_s), NOW_S) is None
    for expires in (0, body.issued + life_s + 1):
        assert "does not expire within" in str(timely(changed(body, expires=expires), NOW_S))


def test_sequences_go_up_even_when_the_clock_does_not() -> None:
    assert next_sequence(NOW_S, 0) == NOW_S * 1000
    assert next_sequence(NOW_S, NOW_S * 1000) == NOW_S * 1000 + 1
    assert next_sequence(NOW_S - 100, NOW_S * 1000) == NOW_S * 1000 + 1


# --- whatever comes ---------------------------------------------------------------------------------------------------


def damaged(rng: random.Random, good: bytes) -> bytes:
    data = bytearray(good)
    for _ in range(rng.randrange(1, 6)):
        start = rng.randrange(len(data) or 1)
        match rng.randrange(4):
            case 0 if data:
                data[start] = rng.randrange(256)
            case 1:
                del data[start : start + rng.randrange(1, 40)]
            case 2:
                data[start:start] = rng.randbytes(rng.randrange(1, 40))
            case _:
                data[start:] = rng.randbytes(rng.randrange(80))
    return bytes(data)


@pytest.mark.parametrize(
    "count",
    [pytest.param(10_000, id="ten thousand"), pytest.param(1_000_000, id="a million", marks=pytest.mark.nightly)],
)
def test_random_envelopes_raise_nothing_but_our_errors(count: int) -> None:
    rng = random.Random(3)
    good = [sign_statement(body, ANN).envelope for body in EXAMPLES.values()]
    for _ in range(count):
        data = damaged(rng, rng.choice(good))
        if data not in good:
            with pytest.raises(KvnetError):
                open_statement(data)


@pytest.mark.parametrize(
    "count",
    [pytest.param(3_000, id="three thousand"), pytest.param(300_000, id="more", marks=pytest.mark.nightly)],
)
def test_damaged_bodies_with_a_valid_signature_raise_nothing_but_our_errors(count: int) -> None:
    rng = random.Random(4)
    good = list(EXAMPLES.values())
    kinds = {body: kind for kind, body in BODIES.items()}
    for _ in range(count):
        body = rng.choice(good)
        envelope = seal(kinds[type(body)], damaged(rng, cbor.encode_struct(body)), ANN)
        try:
            statement = open_statement(envelope)
        except KvnetError:
            continue
        # What is still a body is written again as it came.
        assert sign_statement(statement.body, ANN).envelope == envelope
