"""Messages: one encoding each, and nothing else passes."""

import random
from typing import Any

import cbor2
import msgspec
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvnet.errors import ProtocolViolationError
from kvnet.format import limits
from kvnet.protocol.framing import MAX_FRAME_BYTES
from kvnet.protocol.messages.artifacts import (
    MAX_RUNS,
    ChunkListReply,
    GetChunkList,
    GetHave,
    GetManifest,
    Have,
    Lookup,
    LookupReply,
    ManifestReply,
    Match,
)
from kvnet.protocol.messages.base import encode_message
from kvnet.protocol.messages.bulk import MAX_CERTIFICATE_BYTES, BulkDialled, BulkOffer, DialBulk, OpenBulk
from kvnet.protocol.messages.chunks import (
    CancelChunks,
    ChunkHeader,
    ChunkRefused,
    GetChunks,
    decode_bulk_ask,
    decode_chunk_answer,
    decode_chunk_request,
)
from kvnet.protocol.messages.control import decode_message
from kvnet.protocol.messages.handshake import Challenge, Hello, Proof
from kvnet.protocol.messages.liveness import Ping, Pong
from kvnet.protocol.messages.models import ModelEntry, Models, models_digest
from kvnet.protocol.messages.refusals import Refused

H = b"h" * 32
MATCH = Match(key_index=0, artifact=H, n_tokens=1, codec="shuffle+zstd-1", size_bytes=2**63 - 1)
CONTROL: list[Any] = [
    Hello(versions=(1, 2), capabilities=("serve", "bulk/1"), agent="kvnet 0.1"),
    Challenge(nonce=H),
    Proof(entries=tuple(bytes([number]) * 32 for number in range(8))),
    Lookup(request_id=1, slot=7, keys=(H, b"k" * 32)),
    LookupReply(request_id=1, matches=(MATCH,)),
    LookupReply(request_id=1, matches=()),
    GetManifest(request_id=2, slot=0, artifact=H),
    ManifestReply(request_id=2, envelope=b"e"),
    GetChunkList(request_id=3, slot=0, artifact=H, page=0),
    ChunkListReply(request_id=3, page=b"p" * 36),
    GetHave(request_id=8, slot=7, artifact=H),
    Have(request_id=8, runs=(0, 3, 1, 2)),
    OpenBulk(request_id=6, certificate=b"c", cipher="tls13"),
    BulkOffer(request_id=6, name=b"n" * 16, certificate=b"c" * MAX_CERTIFICATE_BYTES, port=0, cipher="none"),
    DialBulk(request_id=7, name=b"n" * 16, port=5865),
    BulkDialled(request_id=7),
    Refused(request_id=4, reason="unknown"),
    Ping(request_id=5),
    Pong(request_id=2**32 - 1),
]
CHUNK_REQUEST = GetChunks(session=b"s" * 16, slot=3, artifact=H, indices=(5, 1, 2))
CHUNK_ANSWERS: list[Any] = [
    ChunkHeader(index=0, length_bytes=limits.MAX_CHUNK_BYTES),
    ChunkRefused(index=1, reason="not_held"),
]


@pytest.mark.parametrize("message", CONTROL, ids=lambda message: type(message).__name__)
def test_control_message_reads_back(message: Any) -> None:
    assert decode_message(encode_message(message)) == message


def test_chunk_messages_read_back() -> None:
    assert decode_chunk_request(encode_message(CHUNK_REQUEST)) == CHUNK_REQUEST
    for ask in (CHUNK_REQUEST, CancelChunks()):
        assert decode_bulk_ask(encode_message(ask)) == ask
    with pytest.raises(ProtocolViolationError):
        decode_chunk_request(encode_message(CancelChunks()))
    for answer in CHUNK_ANSWERS:
        assert decode_chunk_answer(encode_message(answer)) == answer


def test_message_on_the_wrong_kind_of_stream_is_a_violation() -> None:
    for message in CONTROL:
        with pytest.raises(ProtocolViolationError):
            decode_chunk_request(encode_message(message))
        with pytest.raises(ProtocolViolationError):
            decode_chunk_answer(encode_message(message))
    for message in (CHUNK_REQUEST, *CHUNK_ANSWERS):
        with pytest.raises(ProtocolViolationError):
            decode_message(encode_message(message))


def test_every_message_fits_a_frame() -> None:
    largest: list[Any] = [
        Lookup(request_id=2**32 - 1, slot=7, keys=(H,) * 4096),
        LookupReply(request_id=0, matches=(MATCH,) * 8),
        ManifestReply(request_id=0, envelope=bytes(limits.MAX_ENVELOPE_BYTES)),
        ChunkListReply(request_id=0, page=bytes(limits.PAGE_ENTRIES * limits.ENTRY_SIZE_BYTES)),
        Have(request_id=0, runs=(2**32 - 1,) * MAX_RUNS),
        Hello(versions=tuple(range(1, 9)), capabilities=("c" * 64,) * 32, agent="\U0001f40d" * 128),
    ]
    for message in largest:
        assert len(encode_message(message)) <= MAX_FRAME_BYTES
        assert decode_message(encode_message(message)) == message


OUT_OF_BOUNDS: list[Any] = [
    Hello(versions=(), capabilities=(), agent=""),
    Hello(versions=(0,), capabilities=(), agent=""),
    Hello(versions=(1,) * 9, capabilities=(), agent=""),
    Hello(versions=(1,), capabilities=("serve",) * 33, agent=""),
    Hello(versions=(1,), capabilities=("",), agent=""),
    Hello(versions=(1,), capabilities=("Serve",), agent=""),
    Hello(versions=(1,), capabilities=("serve\n",), agent=""),
    Hello(versions=(1,), capabilities=("c" * 65,), agent=""),
    Hello(versions=(1,), capabilities=(), agent="a" * 129),
    Challenge(nonce=b"n" * 31),
    Proof(entries=(H,) * 7),
    Proof(entries=(H,) * 9),
    Proof(entries=(*(H,) * 7, b"short")),
    Lookup(request_id=2**32, slot=0, keys=(H,)),
    Lookup(request_id=0, slot=8, keys=(H,)),
    Lookup(request_id=0, slot=0, keys=()),
    Lookup(request_id=0, slot=0, keys=(H,) * 4097),
    Lookup(request_id=0, slot=0, keys=(H[:31],)),
    LookupReply(request_id=0, matches=(MATCH,) * 9),
    LookupReply(request_id=0, matches=(msgspec.structs.replace(MATCH, key_index=4096),)),
    LookupReply(request_id=0, matches=(msgspec.structs.replace(MATCH, n_tokens=0),)),
    LookupReply(request_id=0, matches=(msgspec.structs.replace(MATCH, codec="x" * 65),)),
    GetManifest(request_id=0, slot=0, artifact=H + b"!"),
    ManifestReply(request_id=0, envelope=b""),
    ManifestReply(request_id=0, envelope=bytes(limits.MAX_ENVELOPE_BYTES + 1)),
    GetChunkList(request_id=0, slot=0, artifact=H, page=2**20),
    ChunkListReply(request_id=0, page=b""),
    ChunkListReply(request_id=0, page=bytes(limits.PAGE_ENTRIES * limits.ENTRY_SIZE_BYTES + 1)),
    GetHave(request_id=0, slot=0, artifact=H[:31]),
    Have(request_id=0, runs=(1,) * (MAX_RUNS + 1)),
    Have(request_id=0, runs=(2**32,)),
    OpenBulk(request_id=0, certificate=b"", cipher="tls13"),
    OpenBulk(request_id=0, certificate=bytes(MAX_CERTIFICATE_BYTES + 1), cipher="tls13"),
    OpenBulk(request_id=0, certificate=b"c", cipher="TLS"),
    BulkOffer(request_id=0, name=b"n" * 15, certificate=b"c", port=1, cipher="tls13"),
    BulkOffer(request_id=0, name=b"n" * 16, certificate=b"c", port=65536, cipher="tls13"),
    DialBulk(request_id=0, name=b"n" * 17, port=1),
    DialBulk(request_id=0, name=b"n" * 16, port=0),
    Refused(request_id=0, reason=""),
    Refused(request_id=0, reason="Because!"),
    Refused(request_id=0, reason="r" * 33),
]


@pytest.mark.parametrize("message", OUT_OF_BOUNDS)
def test_value_out_of_its_bounds_is_a_violation(message: Any) -> None:
    with pytest.raises(ProtocolViolationError):
        decode_message(encode_message(message))


@pytest.mark.parametrize(
    "message",
    [
        GetChunks(session=b"s" * 15, slot=0, artifact=H, indices=(0,)),
        GetChunks(session=b"s" * 16, slot=8, artifact=H, indices=(0,)),
        GetChunks(session=b"s" * 16, slot=0, artifact=H, indices=()),
        GetChunks(session=b"s" * 16, slot=0, artifact=H, indices=tuple(range(257))),
        GetChunks(session=b"s" * 16, slot=0, artifact=H, indices=(2**32,)),
        GetChunks(session=b"s" * 16, slot=0, artifact=H, indices=(1, 2, 1)),
        GetChunks(session=b"s" * 16, slot=0, artifact=H, indices=(1,), purpose="Interactive"),
    ],
)
def test_chunk_request_out_of_its_bounds_is_a_violation(message: GetChunks) -> None:
    with pytest.raises(ProtocolViolationError):
        decode_chunk_request(encode_message(message))


@pytest.mark.parametrize("length", [0, limits.MAX_CHUNK_BYTES + 1, 4 << 30])
def test_chunk_length_out_of_bounds_is_a_violation_before_anything_is_allocated(length: int) -> None:
    with pytest.raises(ProtocolViolationError):
        decode_chunk_answer(encode_message(ChunkHeader(index=0, length_bytes=length)))


def changed(message: Any, **fields: object) -> bytes:
    value = cbor2.loads(encode_message(message)) | fields
    return cbor2.dumps({name: item for name, item in value.items() if item is not ...}, canonical=True)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        cbor2.dumps({}),
        cbor2.dumps([]),
        cbor2.dumps({"type": "gossip", "request_id": 0}, canonical=True),
        changed(Ping(request_id=1), type=...),
        changed(Ping(request_id=1), request_id=...),
        changed(Ping(request_id=1), more=0),
        changed(Ping(request_id=1), request_id="1"),
        changed(Ping(request_id=1), request_id=True),
        changed(Ping(request_id=1), request_id=-1),
        changed(Ping(request_id=1), request_id=1.0),
        changed(Ping(request_id=1), request_id=None),
        changed(Challenge(nonce=H), nonce="aGhoaGhoaGhoaGhoaGhoaGhoaGhoaGhoaGhoaGhoaGg="),
        changed(Challenge(nonce=H), nonce=[104] * 32),
        changed(CONTROL[4], matches=[{}]),
        encode_message(Ping(request_id=1)) + b"\0",
        encode_message(Ping(request_id=1))[:-1],
        b"\xa2" + encode_message(Ping(request_id=1))[1:] + b"\x64type\x64ping",
        b"\xbf" + encode_message(Ping(request_id=1))[1:] + b"\xff",
        b"\x81" * 500,
        b"\x81" * 100_000,
        b"\xa1\x00" * 100_000,
        b"\xc1" * 100_000,
        b"\x9f" * 100_000,
    ],
)
def test_what_is_no_message_is_a_violation(body: bytes) -> None:
    with pytest.raises(ProtocolViolationError):
        decode_message(body)


def test_what_a_peer_wrote_is_escaped_and_cut_in_the_reason() -> None:
    body = cbor2.dumps({"type": "ping", "request_id": 0, "\x1b[2J" + "x" * 5000: 0}, canonical=True)
    with pytest.raises(ProtocolViolationError) as refused:
        decode_message(body)
    assert "\x1b" not in str(refused.value)
    assert len(str(refused.value)) < 400


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_violation(body: bytes) -> None:
    for decode in (decode_message, decode_chunk_request, decode_bulk_ask, decode_chunk_answer):
        with pytest.raises(ProtocolViolationError):
            decode(body)


@pytest.mark.parametrize("decode", [decode_message, decode_chunk_request, decode_bulk_ask, decode_chunk_answer])
def test_ten_thousand_damaged_messages_raise_nothing_but_violations(decode: Any) -> None:
    rng = random.Random(4)
    originals = [encode_message(message) for message in (*CONTROL, CHUNK_REQUEST, *CHUNK_ANSWERS)]
    for _ in range(10_000):
        data = bytearray(rng.choice(originals))
        for _ in range(rng.randrange(1, 5)):
            position = rng.randrange(len(data))
            match rng.randrange(3):
                case 0:
                    data[position] = rng.randrange(256)
                case 1:
                    data[position:position] = rng.randbytes(rng.randrange(1, 12))
                case _:
                    data = data[: position + 1]
        try:
            message = decode(bytes(data))
        except ProtocolViolationError:
            continue
        assert encode_message(message) == data, "one value, one encoding"


def test_digest_of_models_is_the_hash_of_the_message_that_tells_them() -> None:
    model = ModelEntry(name="m", fingerprint=b"f", producer=b"p", sample=b"")
    other = msgspec.structs.replace(model, sample=H)
    assert models_digest((model,)) == blake3(encode_message(Models(request_id=0, models=(model,)))).digest()
    assert len({models_digest(models) for models in [(), (model,), (other,), (model, other)]}) == 4
