"""Every maximum of the format, with its unit and its reason. ``docs/format.md`` repeats them and a test compares.

All of them are checked before memory is allocated or work is done in proportion to the number that is limited.
"""

from typing import Final

HASH_SIZE_BYTES: Final = 32
"""BLAKE3-256, Ed25519 keys, namespace secrets: everything fixed in length is this long."""

MAX_CBOR_DEPTH: Final = 8
"""Nested arrays and maps. The deepest structure, the shape of a state inside a manifest, needs exactly this many."""

MAX_CBOR_INT: Final = (1 << 63) - 1
"""Largest integer: fits a signed 64-bit integer of every language and of SQLite."""

MAX_MANIFEST_BYTES: Final = 4096
"""A manifest: what a peer must accept before it knows anything about the artifact."""

MAX_FINGERPRINT_BYTES: Final = 2048
"""A fingerprint document: half a manifest, so that spans and producer always find room."""

MAX_ARCHITECTURE_BYTES: Final = 64
"""Name of the architecture module."""

MAX_ADAPTERS: Final = 8
"""Adapters in effect at once."""

MAX_LAYERS: Final = 512
"""Layers of a model; the largest known have about 130."""

MAX_LAYER_KINDS: Final = 16
"""Distinct layer records; the most irregular hybrid seen has 5."""

MAX_HEADS: Final = 1024
"""K/V heads of a layer."""

MAX_DIM: Final = 65536
"""Length of one K or V row, and of one side of a recurrent state."""

MAX_WINDOW_TOKENS: Final = 1 << 22
"""Sliding window of a layer."""

MAX_STATES: Final = 8
"""State arrays of a recurrent layer."""

MAX_STATE_RANK: Final = 6
"""Sides of one state array."""

MAX_PRODUCER_TEXT_BYTES: Final = 256
"""Each text of a producer record."""

MAX_TOKENS: Final = 1 << 22
"""Tokens of an artifact: four times the longest window offered today."""

MAX_CONTEXT_BYTES: Final = 64 << 20
"""Messages and template inputs of a named context, in total."""

MAX_CHUNKS: Final = 1 << 18
"""Chunks of an artifact: a chunk list of 9 MiB. 128,000 tokens of a 130-layer model need 65,000."""

MAX_CHUNK_BYTES: Final = 16 << 20
"""A chunk before the codec; what a peer may have to hold before it can check a hash. A layer whose full block is
larger (64 heads of 128 in float32 fill it exactly) cannot be shared."""

MIN_TILE_BYTES: Final = 1 << 20
"""A full tile takes as many layers as it needs to reach this; only the last group of a run may stay below."""

MAX_GROUPED_TILE_BYTES: Final = 4 << 20
"""A full tile of more than one layer; one layer alone may reach ``MAX_CHUNK_BYTES``."""

TOKENS_PER_CHUNK: Final = 4096
"""Token ids in one chunk: 16 KiB."""

CONTEXT_CHUNK_BYTES: Final = 1 << 20
"""Context bytes in one chunk."""

ENTRY_SIZE_BYTES: Final = 36
"""One chunk-list entry: u32 length and hash."""

PAGE_ENTRIES: Final = 2048
"""Entries of a chunk-list page: 72 KiB, well inside a frame."""

MAX_CONTINUATION_TOKENS: Final = 8
"""Reference continuation."""

MAX_DERIVED_SPANS: Final = 16
"""Spans computed by others; more would not fit a manifest beside the largest fingerprint."""

MAX_TOKEN_ID: Final = (1 << 32) - 1
"""Token ids are u32."""

ENVELOPE_AREA_BYTES: Final = 8192
"""Room for the envelope in a container, its u32 length included."""

MAX_ENVELOPE_BYTES: Final = ENVELOPE_AREA_BYTES - 4
"""A signed manifest."""

MAX_TICKET_BYTES: Final = 4096
"""A ticket; fits one line of a terminal's input buffer."""

MAX_TICKET_ADDRESSES: Final = 8
"""Peer addresses in a ticket."""

MAX_ADDRESS_BYTES: Final = 256
"""One peer address as text."""
