"""The messages of the control stream and of the chunk streams, one strict union each.

A message is one CBOR map in the strict profile of the format, with its name under ``type``. Unknown messages, unknown
fields and values outside the stated bounds are protocol violations: the protocol grows by versions and capabilities,
not by what a peer happens to ignore. See ``docs/protocol.md`` for the same in CDDL.
"""

from enum import StrEnum
from typing import Annotated, Any

import msgspec

from kvnet.errors import MalformedError, ProtocolViolationError
from kvnet.format import cbor, limits
from kvnet.format.hashes import blake3_hash
from kvnet.format.sample import MAX_SAMPLE_BYTES
from kvnet.protocol.framing import MAX_FRAME_BYTES
from kvnet.trust.statements import MAX_STATEMENT_BYTES

PROTOCOL_VERSION = 1

MAX_VERSIONS = 8
MAX_CAPABILITIES = 32
MAX_CAPABILITY_LENGTH = 64
MAX_AGENT_LENGTH = 128
MAX_SLOT = 7
"""A proof has 8 entries, so a session has slots 0 to 7."""
MAX_LOOKUP_KEYS = 4096
"""One key a block: a prompt of a million tokens."""
MAX_MATCHES = 8
MAX_CHUNKS_PER_REQUEST = 256
MAX_REASON_LENGTH = 32
MAX_CERTIFICATE_BYTES = 2048
"""A certificate for one bulk connection; ours has about 230."""

MAX_RUNS = 16384
"""Of chunks held and missing in turn: half as many gaps as that are told."""

MAX_TOLD = 64
"""Statements in one message; their bytes have a limit of their own."""
MAX_TOLD_BYTES = 192 * 1024
"""Bytes of statements in one message: what a frame leaves with room to spare."""
MAX_KNOWN = 4096
"""Statements one side says it knows when it asks for others."""
KNOWN_SIZE_BYTES = 8
"""First bytes of a statement's hash: who has two with the same beginning asks for one in vain, until it expires."""
MAX_RECORDS = 4
"""Provider records of others in a lookup reply."""
MAX_MODELS = 32
"""Models a node tells of."""
MAX_WEIGHT_BITS = 64
"""Of one weight of a model."""
MAX_GROUP = 65536
"""Weights that share a scale."""


Bytes32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
SessionId = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
BulkName = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Certificate = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_CERTIFICATE_BYTES)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
RequestId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Slot = Annotated[int, msgspec.Meta(ge=0, le=MAX_SLOT)]
ChunkIndex = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Word = Annotated[
    str, msgspec.Meta(min_length=1, max_length=MAX_CAPABILITY_LENGTH, pattern=r"\A[a-z0-9][a-z0-9._+/-]*\Z")
]
Envelope = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_STATEMENT_BYTES + 256)]
Envelopes = Annotated[tuple[Envelope, ...], msgspec.Meta(max_length=MAX_TOLD)]
Reason = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_REASON_LENGTH, pattern=r"\A[a-z_]+\Z")]


class Capability(StrEnum):
    """What a peer can do beyond the handshake; a peer ignores those it does not know."""

    SERVE = "serve"
    """Answers lookups and serves manifests, chunk lists and chunks."""
    BULK = "bulk"
    """Understands `OpenBulk` and `DialBulk`."""
    BULK_CANCEL = "bulk_cancel"
    """Understands `CancelChunks` on a bulk connection."""
    HAVE = "have"
    """Understands `GetHave`."""
    STATEMENTS = "statements"
    """Understands `Tell` and `GetStatements`; its provider records say all that it holds."""
    ENROL = "enrol"
    """Understands `Enrol`."""
    MODELS = "models"
    """Understands `GetModels` and `GetSample`."""
    PRESENCE = "presence"
    """Understands `Presence`."""


class BulkCipher(StrEnum):
    """What protects a bulk connection; a peer refuses one it does not know."""

    TLS13 = "tls13"
    """Mutual TLS 1.3 with the certificates that were exchanged."""
    NONE = "none"
    """Nothing: for a cable that both owners trust. Chunks are compared with their hashes as ever."""


class RefusalReason(StrEnum):
    """Why a request is not granted; a peer treats one it does not know like ``busy``."""

    UNKNOWN = "unknown"
    """Nothing of that name in a namespace both are in. One reason for: no such slot, a slot that is not proven, no such
    artifact; whoever lacks the namespace cannot tell them apart."""
    NOT_HELD = "not_held"
    """The artifact is known, that part of it is not held here."""
    BUSY = "busy"
    """Too many requests of this peer at once or in this second; ask again later or elsewhere."""
    NOT_SERVING = "not_serving"
    """This peer serves nothing now."""
    CANCELLED = "cancelled"
    """Whoever asked has taken it back."""


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", kw_only=True):
    """Base of all messages."""


# --- handshake ------------------------------------------------------------------------------------------------


class Hello(_Message, frozen=True, tag="hello"):
    """First message of each side.

    Attributes:
        versions: protocol versions the sender speaks, ascending; the highest that both speak is used.
        capabilities: what the sender can do.
        agent: program and version in words, for people; never acted on.
    """

    versions: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=1, lt=2**16)], ...], msgspec.Meta(min_length=1, max_length=MAX_VERSIONS)
    ]
    capabilities: Annotated[tuple[Word, ...], msgspec.Meta(max_length=MAX_CAPABILITIES)]
    agent: Annotated[str, msgspec.Meta(max_length=MAX_AGENT_LENGTH)]


class Challenge(_Message, frozen=True, tag="challenge"):
    """Second message of each side: the nonce the peer's proof must cover."""

    nonce: Bytes32


class Proof(_Message, frozen=True, tag="proof"):
    """Third message of each side: its proof of membership, see `kvnet.protocol.membership`."""

    entries: Annotated[tuple[Bytes32, ...], msgspec.Meta(min_length=8, max_length=8)]


# --- requests and replies -------------------------------------------------------------------------------------


class Lookup(_Message, frozen=True, tag="lookup"):
    """Which of these prefixes do you have? Keys are lookup-keyed prefix keys, the deepest first."""

    request_id: RequestId
    slot: Slot
    keys: Annotated[tuple[Bytes32, ...], msgspec.Meta(min_length=1, max_length=MAX_LOOKUP_KEYS)]


class Match(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One artifact that continues one of the keys asked for: a claim until its signed manifest says so.

    Attributes:
        key_index: which of the keys, the deepest that fits.
        artifact: the artifact hash under the lookup secret.
        n_tokens: of the whole artifact.
        codec: text of its codec.
        size_bytes: of all its chunks.
    """

    key_index: Annotated[int, msgspec.Meta(ge=0, lt=MAX_LOOKUP_KEYS)]
    artifact: Bytes32
    n_tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**32)]
    codec: Word
    size_bytes: Count


class LookupReply(_Message, frozen=True, tag="lookup_reply"):
    """The best matches, the deepest first; empty when there is none.

    Attributes:
        matches: of the sender's own artifacts.
        records: signed provider records of others that have one of the keys, deeper than the sender does.
    """

    request_id: RequestId
    matches: Annotated[tuple[Match, ...], msgspec.Meta(max_length=MAX_MATCHES)]
    records: Annotated[tuple[Envelope, ...], msgspec.Meta(max_length=MAX_RECORDS)] = ()


class GetManifest(_Message, frozen=True, tag="get_manifest"):
    """Send the signed manifest of an artifact."""

    request_id: RequestId
    slot: Slot
    artifact: Bytes32


class ManifestReply(_Message, frozen=True, tag="manifest_reply"):
    """The envelope, unchanged."""

    request_id: RequestId
    envelope: Annotated[bytes, msgspec.Meta(min_length=1, max_length=limits.MAX_ENVELOPE_BYTES)]


class GetChunkList(_Message, frozen=True, tag="get_chunk_list"):
    """Send one page of an artifact's chunk list."""

    request_id: RequestId
    slot: Slot
    artifact: Bytes32
    page: Annotated[int, msgspec.Meta(ge=0, lt=2**20)]


class ChunkListReply(_Message, frozen=True, tag="chunk_list_reply"):
    """The page, unchanged."""

    request_id: RequestId
    page: Annotated[bytes, msgspec.Meta(min_length=1, max_length=limits.PAGE_ENTRIES * limits.ENTRY_SIZE_BYTES)]


class GetHave(_Message, frozen=True, tag="get_have"):
    """Which chunks of an artifact do you have?"""

    request_id: RequestId
    slot: Slot
    artifact: Bytes32


class Have(_Message, frozen=True, tag="have"):
    """These, at this moment.

    Attributes:
        runs: lengths of runs of missing and held chunks in turn, see `kvnet.protocol.have`.
    """

    request_id: RequestId
    runs: Annotated[tuple[ChunkIndex, ...], msgspec.Meta(max_length=MAX_RUNS)]


class Refused(_Message, frozen=True, tag="refused"):
    """The answer to a request that is not granted; `reason` is a `RefusalReason` or one of a later version."""

    request_id: RequestId
    reason: Reason


class Ping(_Message, frozen=True, tag="ping"):
    """Are you there?"""

    request_id: RequestId


class Pong(_Message, frozen=True, tag="pong"):
    """Answer to `Ping`."""

    request_id: RequestId


# --- bulk connections -----------------------------------------------------------------------------------------


class OpenBulk(_Message, frozen=True, tag="open_bulk"):
    """I want to ask you for chunks over a connection of their own.

    Attributes:
        certificate: of the asking side for this connection alone, as DER.
        cipher: what the asking side wants, a `BulkCipher`.
    """

    request_id: RequestId
    certificate: Certificate
    cipher: Word


class BulkOffer(_Message, frozen=True, tag="bulk_offer"):
    """Dial me, within 30 seconds.

    Attributes:
        name: of the connection; what the dialling side sends as SNI, in hexadecimal.
        certificate: of the answering side for this connection alone, as DER.
        port: where it listens, on the addresses of the control connection; 0: nowhere.
        cipher: what is used: ``none`` only when both sides want that.
    """

    request_id: RequestId
    name: BulkName
    certificate: Certificate
    port: Port
    cipher: Word


class DialBulk(_Message, frozen=True, tag="dial_bulk"):
    """I cannot reach you: dial me for the connection of this name.

    Attributes:
        name: from a `BulkOffer`.
        port: where the asking side listens, on the addresses of the control connection.
    """

    request_id: RequestId
    name: BulkName
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class BulkDialled(_Message, frozen=True, tag="bulk_dialled"):
    """I do; the connection comes or does not."""

    request_id: RequestId


# --- among members ---------------------------------------------------------------------------------------------


class Tell(_Message, frozen=True, tag="tell"):
    """New statements of the namespace's members, provider records among them. They are checked one by one, later."""

    request_id: RequestId
    slot: Slot
    statements: Envelopes


class Told(_Message, frozen=True, tag="told"):
    """Received; says nothing about whether any of it counts."""

    request_id: RequestId


class GetStatements(_Message, frozen=True, tag="get_statements"):
    """Send the statements of this namespace that I do not know.

    Attributes:
        known: the first 8 bytes of the BLAKE3 hash of each envelope the asking side has, ascending.
    """

    request_id: RequestId
    slot: Slot
    known: Annotated[
        tuple[Annotated[bytes, msgspec.Meta(min_length=KNOWN_SIZE_BYTES, max_length=KNOWN_SIZE_BYTES)], ...],
        msgspec.Meta(max_length=MAX_KNOWN),
    ]


class Statements(_Message, frozen=True, tag="statements"):
    """These; ask again when there are more."""

    request_id: RequestId
    statements: Envelopes
    more: bool


class GetModels(_Message, frozen=True, tag="get_models"):
    """Which models do you have?

    Attributes:
        mine: digest of the models the asking side has, see `models_digest`; whoever knows it of other ones asks back.
    """

    request_id: RequestId
    slot: Slot
    mine: Bytes32


class ModelEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model of a peer.

    Attributes:
        name: as its owner calls it, for people.
        fingerprint: the encoded fingerprint document.
        producer: the encoded producer record of that node.
        sample: hash of its sample; empty when it has none yet.
        bits: of a weight, 0 when they are not quantised.
        group: weights that share a scale; 0 when they are not quantised.
        dtype: what is not quantised is in; empty when its owner does not know.
    """

    name: Annotated[str, msgspec.Meta(max_length=256)]
    fingerprint: Annotated[bytes, msgspec.Meta(min_length=1, max_length=limits.MAX_FINGERPRINT_BYTES)]
    producer: Annotated[bytes, msgspec.Meta(min_length=1, max_length=4096)]
    sample: Annotated[bytes, msgspec.Meta(max_length=32)]
    bits: Annotated[int, msgspec.Meta(ge=0, le=MAX_WEIGHT_BITS)] = 0
    group: Annotated[int, msgspec.Meta(ge=0, le=MAX_GROUP)] = 0
    dtype: Annotated[str, msgspec.Meta(max_length=16)] = ""


class Models(_Message, frozen=True, tag="models"):
    """These."""

    request_id: RequestId
    models: Annotated[tuple[ModelEntry, ...], msgspec.Meta(max_length=MAX_MODELS)]


class GetSample(_Message, frozen=True, tag="get_sample"):
    """Send the sample of K/V that this model makes on your machine.

    Attributes:
        fingerprint: the model's fingerprint hash.
    """

    request_id: RequestId
    slot: Slot
    fingerprint: Bytes32


class Sample(_Message, frozen=True, tag="sample"):
    """The sample, as `kvnet.format.sample` writes it."""

    request_id: RequestId
    sample: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_SAMPLE_BYTES)]


class Presence(_Message, frozen=True, tag="presence"):
    """How I am from now on.

    Attributes:
        state: ``serving``, ``paused`` (serves nothing for now) or ``leaving`` (asleep or ended in a moment).
    """

    request_id: RequestId
    state: Word


class Enrol(_Message, frozen=True, tag="enrol"):
    """I have an invitation of yours and would join.

    Attributes:
        invitation: its id.
        proof: that the sender has its secret, see `kvnet.protocol.enrolment`.
        publisher: publisher id of the sender.
        signature: by that key, over the same as the proof.
        label: what the sender calls itself.
    """

    request_id: RequestId
    invitation: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    proof: Bytes32
    publisher: Bytes32
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
    label: Annotated[str, msgspec.Meta(max_length=64)]


class Enrolled(_Message, frozen=True, tag="enrolled"):
    """Welcome.

    Attributes:
        namespace: the namespace file, with its secrets.
        statements: the chain of memberships from the founder to the new member, and what else counts now.
    """

    request_id: RequestId
    namespace: Annotated[bytes, msgspec.Meta(min_length=1, max_length=4096)]
    statements: Envelopes


# --- chunk streams --------------------------------------------------------------------------------------------


class GetChunks(_Message, frozen=True, tag="get_chunks"):
    """Send these chunks of an artifact, in this order, on this stream or bulk connection.

    Attributes:
        session: id of a control session of the same two peers; the slot is one of that session.
        slot: the namespace that authorises.
        artifact: the artifact hash under the lookup secret.
        indices: in the chunk plan, each once.
        purpose: what for, a `kvnet.protocol.pace.Purpose`: who waits comes first where bytes are limited.
    """

    session: SessionId
    slot: Slot
    artifact: Bytes32
    indices: Annotated[tuple[ChunkIndex, ...], msgspec.Meta(min_length=1, max_length=MAX_CHUNKS_PER_REQUEST)]
    purpose: Word = "interactive"


class CancelChunks(_Message, frozen=True, tag="cancel_chunks"):
    """Send nothing more of what was asked for on this bulk connection: refuse it, as `cancelled`."""


class ChunkHeader(_Message, frozen=True, tag="chunk"):
    """The chunk of this index follows: `length_bytes` raw bytes after this frame."""

    index: ChunkIndex
    length_bytes: Annotated[int, msgspec.Meta(ge=1, le=limits.MAX_CHUNK_BYTES)]


class ChunkRefused(_Message, frozen=True, tag="chunk_refused"):
    """The chunk of this index does not follow."""

    index: ChunkIndex
    reason: Reason


Handshake = Hello | Challenge | Proof
ArtifactRequest = Lookup | GetManifest | GetChunkList | GetHave
BulkRequest = OpenBulk | DialBulk
MemberRequest = Tell | GetStatements | GetModels | GetSample
"""What members ask each other apart from artifacts; each names the slot of their namespace."""
NodeRequest = Presence | Enrol
"""What any connected peer may say."""
Request = ArtifactRequest | BulkRequest | MemberRequest | NodeRequest | Ping
Reply = (
    LookupReply
    | ManifestReply
    | ChunkListReply
    | Have
    | BulkOffer
    | BulkDialled
    | Told
    | Statements
    | Models
    | Sample
    | Enrolled
    | Refused
    | Pong
)
Message = Handshake | Request | Reply
BulkAsk = GetChunks | CancelChunks
ChunkAnswer = ChunkHeader | ChunkRefused


def encode_message(message: Message | BulkAsk | ChunkAnswer) -> bytes:
    """The body of a frame."""
    return cbor.encode_struct(message)


def models_digest(models: tuple[ModelEntry, ...]) -> bytes:
    """What `GetModels` names a node's models by: BLAKE3 of the `Models` message with 0 for its request id, 32 bytes."""
    return blake3_hash(encode_message(Models(request_id=0, models=models)))


def decode_message(body: bytes) -> Message:
    """A message of the control stream.

    Raises:
        ProtocolViolationError: anything else.
    """
    message: Message = _decode(Message, body, "control message")
    return message


def decode_chunk_request(body: bytes) -> GetChunks:
    """The only message a peer that opened a chunk stream sends on it.

    Raises:
        ProtocolViolationError: anything else.
    """
    return _checked(_decode(GetChunks, body, "chunk request"))


def decode_bulk_ask(body: bytes) -> BulkAsk:
    """What the asking peer sends on a bulk connection.

    Raises:
        ProtocolViolationError: anything else.
    """
    ask: BulkAsk = _decode(BulkAsk, body, "chunk request")
    return ask if isinstance(ask, CancelChunks) else _checked(ask)


def _checked(request: GetChunks) -> GetChunks:
    if len(set(request.indices)) != len(request.indices):
        raise ProtocolViolationError("expected each chunk index once in a chunk request, found one twice")
    return request


def decode_chunk_answer(body: bytes) -> ChunkAnswer:
    """What comes back on a chunk stream, before the raw bytes.

    Raises:
        ProtocolViolationError: anything else.
    """
    answer: ChunkAnswer = _decode(ChunkAnswer, body, "chunk answer")
    return answer


def _decode(kind: Any, body: bytes, what: str) -> Any:
    try:
        return cbor.decode_as(kind, body, max_bytes=MAX_FRAME_BYTES, what=what)
    except MalformedError as error:
        # The reason may quote what the peer sent: cut it and escape it.
        raise ProtocolViolationError(f"expected a {what}: {str(error)[:200]!a}") from error
