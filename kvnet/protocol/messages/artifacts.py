"""Which artifacts a peer has, and what describes one: manifest, chunk list, chunks held."""

from typing import Annotated

import msgspec

from kvnet.format import limits
from kvnet.protocol.messages.base import BaseMessage
from kvnet.protocol.messages.fields import Bytes32, ChunkIndex, Envelope, RequestId, Slot, Word

MAX_LOOKUP_KEYS = 4096
"""One key a block: a prompt of a million tokens."""
MAX_MATCHES = 8
"""Artifacts in a lookup reply."""
MAX_RECORDS = 4
"""Provider records of others in a lookup reply."""
MAX_RUNS = 16384
"""Of chunks held and missing in turn: half as many gaps as that are told."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Lookup(BaseMessage, frozen=True, tag="lookup"):
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


class LookupReply(BaseMessage, frozen=True, tag="lookup_reply"):
    """The best matches, the deepest first; empty when there is none.

    Attributes:
        matches: of the sender's own artifacts.
        records: signed provider records of others that have one of the keys, deeper than the sender does.
    """

    request_id: RequestId
    matches: Annotated[tuple[Match, ...], msgspec.Meta(max_length=MAX_MATCHES)]
    records: Annotated[tuple[Envelope, ...], msgspec.Meta(max_length=MAX_RECORDS)] = ()


class GetManifest(BaseMessage, frozen=True, tag="get_manifest"):
    """Send the signed manifest of an artifact."""

    request_id: RequestId
    slot: Slot
    artifact: Bytes32


class ManifestReply(BaseMessage, frozen=True, tag="manifest_reply"):
    """The envelope, unchanged."""

    request_id: RequestId
    envelope: Annotated[bytes, msgspec.Meta(min_length=1, max_length=limits.MAX_ENVELOPE_BYTES)]


class GetChunkList(BaseMessage, frozen=True, tag="get_chunk_list"):
    """Send one page of an artifact's chunk list."""

    request_id: RequestId
    slot: Slot
    artifact: Bytes32
    page: Annotated[int, msgspec.Meta(ge=0, lt=2**20)]


class ChunkListReply(BaseMessage, frozen=True, tag="chunk_list_reply"):
    """The page, unchanged."""

    request_id: RequestId
    page: Annotated[bytes, msgspec.Meta(min_length=1, max_length=limits.PAGE_ENTRIES * limits.ENTRY_SIZE_BYTES)]


class GetHave(BaseMessage, frozen=True, tag="get_have"):
    """Which chunks of an artifact do you have?"""

    request_id: RequestId
    slot: Slot
    artifact: Bytes32


class Have(BaseMessage, frozen=True, tag="have"):
    """These, at this moment.

    Attributes:
        runs: lengths of runs of missing and held chunks in turn, see `kvnet.protocol.have`.
    """

    request_id: RequestId
    runs: Annotated[tuple[ChunkIndex, ...], msgspec.Meta(max_length=MAX_RUNS)]
