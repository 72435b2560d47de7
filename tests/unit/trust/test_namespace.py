"""Namespaces and the file that carries them."""

import random

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnet.errors import IntegrityError, KvnetError, MalformedError, UnsupportedVersionError, UsageError
from kvnet.format.hashes import keyed_artifact, lookup_key, namespace_id
from kvnet.format.prefix import PUBLIC_PREFIX_SECRET, prefix_root
from kvnet.trust.namespace import (
    PUBLIC,
    PUBLIC_LOOKUP_SECRET,
    Namespace,
    decode_namespace_file,
    encode_namespace_file,
)
from tests.unit.trust.samples import FINGERPRINT, MINE, OTHER, make_artifact

FILE = encode_namespace_file(MINE)
NAMES = st.from_regex(r"\A[a-z0-9][a-z0-9._-]{0,63}\Z")
SECRETS = st.binary(min_size=32, max_size=32).filter(any)


def changed(**fields: object) -> bytes:
    return cbor2.dumps(cbor2.loads(FILE) | fields, canonical=True)


@given(NAMES, SECRETS, SECRETS)
def test_file_reads_back(name: str, prefix_secret: bytes, lookup_secret: bytes) -> None:
    namespace = Namespace(name, prefix_secret, lookup_secret)
    assert decode_namespace_file(encode_namespace_file(namespace)) == namespace


def test_secrets_are_not_shown() -> None:
    for shown in (repr(MINE), str(MINE), f"{MINE!r}"):
        assert "p" * 32 not in shown
        assert "l" * 32 not in shown


def test_id_follows_from_the_prefix_secret_alone() -> None:
    rotated = Namespace("renamed", MINE.prefix_secret, OTHER.lookup_secret)
    assert rotated.id == MINE.id == namespace_id(MINE.prefix_secret)
    assert MINE.id != OTHER.id


def test_wire_names_follow_from_the_lookup_secret() -> None:
    artifact = make_artifact()
    assert MINE.keyed_artifact(artifact.hash) == keyed_artifact(MINE.lookup_secret, artifact.hash)
    assert MINE.lookup_key(artifact.keys[0]) == lookup_key(MINE.lookup_secret, artifact.keys[0])
    assert MINE.prefix_root(FINGERPRINT.hash) == prefix_root(MINE.prefix_secret, FINGERPRINT.hash)


@pytest.mark.parametrize("name", ["", "A", "-a", "a b", "a" * 65, "é", "a/b", "a\n"])
def test_name_out_of_shape_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="expected a namespace name"):
        Namespace(name, b"p" * 32, b"l" * 32)


@pytest.mark.parametrize(("prefix", "lookup"), [(b"p" * 31, b"l" * 32), (b"p" * 32, b""), (bytes(32), b"l" * 32)])
def test_secret_that_is_none_is_refused(prefix: bytes, lookup: bytes) -> None:
    with pytest.raises(UsageError, match="secret"):
        Namespace("mine", prefix, lookup)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a namespace",
        cbor2.dumps([1, 2]),
        cbor2.dumps("kvnet namespace"),
        changed(magic="kvnet publisher"),
        changed(more=1),
        changed(name=b"mine"),
        changed(name="x" * 65),
        changed(prefix_secret=b"p" * 31),
        changed(lookup_secret="l" * 32),
        FILE + b"\0",
        FILE[:-1],
        b"\xbf" + FILE[1:] + b"\xff",
        b"\x81" * 500,
        b"\0" * 5000,
    ],
)
def test_what_is_no_namespace_file_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedError) as refused:
        decode_namespace_file(data)
    assert refused.value.exit_code == 10


def test_file_of_a_later_version_says_so() -> None:
    with pytest.raises(UnsupportedVersionError, match="of version 1, found another"):
        decode_namespace_file(changed(version=2, more="fields"))


@pytest.mark.parametrize("field", ["prefix_secret", "lookup_secret", "name", "checksum"])
def test_changed_bit_is_noticed_because_a_wrong_secret_is_a_namespace_nobody_is_in(field: str) -> None:
    value = cbor2.loads(FILE)[field]
    other = "nine" if field == "name" else bytes([value[0] ^ 1]) + value[1:]
    with pytest.raises(IntegrityError, match="checksum"):
        decode_namespace_file(changed(**{field: other}))


def test_file_cannot_make_somebody_use_the_public_namespace_as_a_private_one() -> None:
    public = encode_namespace_file(Namespace("mine", PUBLIC_PREFIX_SECRET, b"l" * 32))
    with pytest.raises(MalformedError, match="public"):
        decode_namespace_file(public)


def test_name_that_no_kvnet_writes_is_refused_even_with_a_fitting_checksum() -> None:
    class Unchecked(Namespace):
        def __post_init__(self) -> None:
            pass

    with pytest.raises(MalformedError, match="no kvnet writes"):
        decode_namespace_file(encode_namespace_file(Unchecked("\x1b[2J", b"p" * 32, b"l" * 32)))


def test_ten_thousand_damaged_files_raise_nothing_but_our_errors() -> None:
    rng = random.Random(3)
    for _ in range(10_000):
        data = bytearray(FILE)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.3:
            data = bytearray(rng.randbytes(rng.randrange(300)))
        if bytes(data) != FILE:
            with pytest.raises(KvnetError):
                decode_namespace_file(bytes(data))


def test_public_namespace_is_the_same_for_everybody_and_no_other() -> None:
    assert PUBLIC.is_public
    assert PUBLIC.prefix_secret == PUBLIC_PREFIX_SECRET
    assert PUBLIC.lookup_secret == PUBLIC_LOOKUP_SECRET != PUBLIC_PREFIX_SECRET
    assert not MINE.is_public


def test_former_secret_is_another_namespace_to_whoever_looks_things_up() -> None:
    former = Namespace(MINE.name, MINE.prefix_secret, MINE.lookup_secret, former=True)
    assert former != MINE
    assert former.id == MINE.id
