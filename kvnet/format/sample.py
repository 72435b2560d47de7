"""A model's sample: K/V of a few positions of three layers, after 512 token ids that everybody makes the same way.

Two nodes that have a model in common compare their samples to see how far apart their arithmetic is. What both must
agree on is the token ids. They are not the tokens of a text: the tokenizer is no part of a fingerprint, and two nodes
that tokenize one text differently would take that for a difference of arithmetic. They follow from the size of the
vocabulary alone, which is a field of the configuration that the fingerprint covers.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from blake3 import blake3

from kvnet.errors import CompatibilityError, MalformedError
from kvnet.format import cbor
from kvnet.format.fingerprint import Fingerprint, LayerLayout, Producer
from kvnet.format.hashes import BytesLike, ChunkHash, blake3_hash
from kvnet.format.limits import HASH_SIZE_BYTES, MAX_TOKEN_ID

SAMPLE_VERSION: Final = 1
"""Of the layout, and of the token ids that everybody makes alike."""
SAMPLE_TOKENS: Final = 512
"""Tokens that are prefilled; two blocks."""
SAMPLE_STEP: Final = 64
"""Tokens computed at once: short, so that a request which arrives meanwhile waits for no more than such a step."""
SAMPLE_CONTEXT: Final = "kvnet 2026-11 sample tokens"
"""Under which BLAKE3 derives the numbers that give the token ids."""

MAX_SAMPLE_BYTES: Final = 192 * 1024
"""A whole sample; fits a frame."""
MAX_SAMPLE_ROWS_BYTES: Final = 190 * 1024
"""Its K/V; the rest is for the names in it."""

POSITIONS: Final = (511, 0, 255, 127, 383, 63, 319, 447)
"""Positions in the order in which they are taken, as many as fit. The last one has attended to all others."""
MIN_VOCABULARY: Final = 256
"""Taken where a configuration does not say: no vocabulary is smaller."""


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """K/V of a few positions, as one machine computes it.

    Attributes:
        version: of this layout.
        fingerprint: hash of the model's fingerprint.
        producer: what computed it.
        vocabulary: from which the token ids follow.
        rows: for each layer of the plan, for each of its positions: K, then V, each (heads, dim), in the model's own
            dtype, little-endian.

    Raises:
        MalformedError: another version, or a hash, vocabulary or size that cannot be.
    """

    version: int
    fingerprint: bytes
    producer: Producer
    vocabulary: int
    rows: bytes

    def __post_init__(self) -> None:
        if self.version != SAMPLE_VERSION:
            raise MalformedError(f"sample: expected version {SAMPLE_VERSION}, found {self.version}")
        if len(self.fingerprint) != HASH_SIZE_BYTES:
            raise MalformedError(f"sample: expected a fingerprint hash of 32 bytes, found {len(self.fingerprint)}")
        if not MIN_VOCABULARY <= self.vocabulary <= MAX_TOKEN_ID:
            raise MalformedError(f"sample: expected a vocabulary of 256 to 2^32 - 1 ids, found {self.vocabulary}")
        if not 1 <= len(self.rows) <= MAX_SAMPLE_ROWS_BYTES:
            raise MalformedError(f"sample: expected 1 to {MAX_SAMPLE_ROWS_BYTES} bytes of K/V, found {len(self.rows)}")

    def encode(self) -> bytes:
        """The sample as it is sent and kept."""
        return cbor.encode_struct(self)


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """Which K/V a sample of a model has, ascending.

    Attributes:
        layers: the first, the middle and the last; fewer where there are fewer.
        positions: of the 512 tokens.
    """

    layers: tuple[int, ...]
    positions: tuple[int, ...]


def sample_plan(layout: LayerLayout) -> SamplePlan:
    """The layers and positions of a model's sample.

    Raises:
        CompatibilityError: layers that do not keep every token, or not even one position fits.
    """
    for kind in layout.kinds:
        kind.require_full_attention()
    n_layers = len(layout.order)
    layers = tuple(sorted({0, n_layers // 2, n_layers - 1}))
    position_bytes = sum(layout.kind_of(layer).bytes_per_token for layer in layers)
    n_positions = min(len(POSITIONS), MAX_SAMPLE_ROWS_BYTES // position_bytes)
    if n_positions == 0:
        raise CompatibilityError(
            f"expected K/V of at most {MAX_SAMPLE_ROWS_BYTES:,} bytes a token in three layers, found {position_bytes:,}"
        )
    return SamplePlan(layers, tuple(sorted(POSITIONS[:n_positions])))


def vocabulary_of(config: Mapping[str, Any]) -> int:
    """How many token ids a configuration names; 256 when it names none, or fewer."""
    sections: tuple[Any, ...] = (config, config.get("text_config"))
    for section in sections:
        size = section.get("vocab_size") if isinstance(section, Mapping) else None
        if isinstance(size, int) and MIN_VOCABULARY <= size <= MAX_TOKEN_ID:
            return size
    return MIN_VOCABULARY


def sample_tokens(vocabulary: int) -> tuple[int, ...]:
    """The 512 token ids: numbers from BLAKE3's stream for this vocabulary, modulo its size."""
    stream = blake3(struct.pack("<I", vocabulary), derive_key_context=SAMPLE_CONTEXT).digest(length=4 * SAMPLE_TOKENS)
    return tuple(number % vocabulary for number in struct.unpack(f"<{SAMPLE_TOKENS}I", stream))


def decode_sample(data: BytesLike, fingerprint: Fingerprint) -> Sample:
    """The sample of this model.

    Raises:
        MalformedError: not a sample, or not one of this model.
        CompatibilityError: no sample of such a model exists.
    """
    sample = cbor.decode_as(Sample, data, max_bytes=MAX_SAMPLE_BYTES, what="sample")
    if sample.fingerprint != fingerprint.hash:
        raise MalformedError("sample: expected one of the model asked for, found one of another fingerprint")
    expected = rows_size_bytes(fingerprint.layers)
    if len(sample.rows) != expected:
        raise MalformedError(f"sample: expected {expected} bytes of K/V, found {len(sample.rows)}")
    return sample


def sample_hash(data: BytesLike) -> ChunkHash:
    """The hash a sample is told of by: that of its bytes."""
    return blake3_hash(data)


def rows_size_bytes(layout: LayerLayout) -> int:
    """Bytes of K/V in a model's sample.

    Raises:
        CompatibilityError: not even one position fits.
    """
    plan = sample_plan(layout)
    return len(plan.positions) * sum(layout.kind_of(layer).bytes_per_token for layer in plan.layers)


@dataclass(frozen=True, slots=True)
class Part:
    """K or V of one layer at one position: where it lies in the rows."""

    layer: int
    position: int
    values: bool
    where: slice


def parts_of(layout: LayerLayout) -> Iterator[Part]:
    """The parts of a sample's rows, in order.

    Raises:
        CompatibilityError: not even one position fits.
    """
    plan = sample_plan(layout)
    begin = 0
    for layer in plan.layers:
        kind = layout.kind_of(layer)
        for position in plan.positions:
            for values, dim in ((False, kind.k_dim), (True, kind.v_dim)):
                end = begin + kind.heads * dim * kind.dtype.size_bytes
                yield Part(layer, position, values, slice(begin, end))
                begin = end
