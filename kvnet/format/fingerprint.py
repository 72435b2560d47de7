"""Model identity: everything that changes K/V for the same token ids, and the verdict on somebody else's.

Not in a fingerprint: tokenizer, chat template, sampler. They act only through token ids.
"""

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from functools import cached_property
from typing import Any, Final

import msgspec
import rfc8785

from kvnet.errors import CompatibilityError, MalformedError
from kvnet.format import cbor
from kvnet.format.codecs import Codec
from kvnet.format.hashes import FINGERPRINT_CONTEXT, BytesLike, FingerprintHash, blake3_hash, derive_key
from kvnet.format.limits import (
    HASH_SIZE_BYTES,
    MAX_ADAPTERS,
    MAX_ARCHITECTURE_BYTES,
    MAX_CBOR_INT,
    MAX_FINGERPRINT_BYTES,
    MAX_LAYER_KINDS,
    MAX_LAYERS,
    MAX_PRODUCER_TEXT_BYTES,
)
from kvnet.format.prefix import BLOCK_TOKENS
from kvnet.format.tensor import LayerKind

IRRELEVANT_CONFIG_FIELDS: Final = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "eos_token_id",
        "initializer_range",
        "pad_token_id",
        "transformers_version",
        "use_cache",
    }
)
"""Fields of a model's configuration that cannot change K/V: provenance, training, the ends of generation. The list is
short on purpose: a field left in costs a miss, a field left out wrongly costs wrong text. ``dtype`` and
``torch_dtype`` stay in, because an architecture may compute in them."""

_CONFIG_SECTIONS: Final = ("text_config",)
"""Sections that repeat the fields of the whole."""
_ARCHITECTURE: Final = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_ARCHITECTURE_BYTES}}}")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class LayerLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every layer keeps: the distinct kinds, and for each layer in order the index of its kind.

    Attributes:
        kinds: distinct records, in order of first use.
        order: one byte per layer.

    Raises:
        MalformedError: no layer or too many, or kinds that are repeated, unused or out of order.
    """

    kinds: tuple[LayerKind, ...]
    order: bytes

    def __post_init__(self) -> None:
        if not 1 <= len(self.kinds) <= MAX_LAYER_KINDS:
            raise MalformedError(f"layer kinds: expected 1 to {MAX_LAYER_KINDS}, found {len(self.kinds)}")
        if not 1 <= len(self.order) <= MAX_LAYERS:
            raise MalformedError(f"layers: expected 1 to {MAX_LAYERS}, found {len(self.order)}")
        # One layout has one document: no duplicate kinds, none unused, numbered in order of first use.
        if len(set(self.kinds)) != len(self.kinds):
            raise MalformedError("layer kinds: expected distinct records, found one twice")
        if list(dict.fromkeys(self.order)) != list(range(len(self.kinds))):
            raise MalformedError("layer order: expected each kind used, numbered in order of first use")

    def kind_of(self, layer: int) -> LayerKind:
        """The kind of a layer, counted from 0."""
        return self.kinds[self.order[layer]]

    @property
    def bytes_per_token(self) -> int:
        """K and V bytes of one token over all layers, for layers that keep every token."""
        return sum(self.kinds[index].bytes_per_token * self.order.count(index) for index in range(len(self.kinds)))


class KvFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the engine holds K/V while it computes: quantised to ``bits`` in groups of ``group``, or not at all.

    0 and 0 stand for "not quantised"; then each layer's own dtype says everything.

    Raises:
        MalformedError: one of the two without the other, or numbers that no engine has.
    """

    bits: int = 0
    group: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.bits <= 16 or not 0 <= self.group <= 4096 or (self.bits == 0) != (self.group == 0):
            raise MalformedError(f"kv: expected bits and group, or 0 and 0, found {self.bits} and {self.group}")


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """An adapter in effect: 32-byte digest of its weights, and its scale as big-endian IEEE-754 float64.

    Raises:
        MalformedError: other lengths.
    """

    digest: bytes
    scale: bytes

    def __post_init__(self) -> None:
        if len(self.digest) != HASH_SIZE_BYTES or len(self.scale) != 8:
            raise MalformedError("adapter: expected a digest of 32 bytes and a scale of 8")

    @classmethod
    def of(cls, digest: bytes, scale: float) -> "Adapter":
        """An adapter with its scale as a number."""
        return cls(digest, struct.pack(">d", scale))


class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """Everything that must be equal for K/V of the same token ids to be usable.

    Attributes:
        weights: 32 bytes, :func:`weights_digest`.
        config: 32 bytes, :func:`config_digest`.
        adapters: in order of application.
        architecture: name of the module that computes.
        layers: what every layer keeps.
        kv: how the engine holds it.
        block_tokens: tokens of a block.

    Raises:
        MalformedError: a digest of another length, too many adapters, or an architecture or block size that cannot be.
    """

    weights: bytes
    config: bytes
    adapters: tuple[Adapter, ...]
    architecture: str
    layers: LayerLayout
    kv: KvFormat = KvFormat()
    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        if len(self.weights) != HASH_SIZE_BYTES or len(self.config) != HASH_SIZE_BYTES:
            raise MalformedError("fingerprint: expected digests of 32 bytes for weights and config")
        if len(self.adapters) > MAX_ADAPTERS:
            raise MalformedError(f"fingerprint: expected at most {MAX_ADAPTERS} adapters, found {len(self.adapters)}")
        if not _ARCHITECTURE.fullmatch(self.architecture):
            raise MalformedError("fingerprint: expected an architecture of letters, digits, '.', '_' and '-'")
        if self.block_tokens != BLOCK_TOKENS:
            raise MalformedError(f"fingerprint: expected blocks of {BLOCK_TOKENS} tokens, found {self.block_tokens}")

    def encode(self) -> bytes:
        """The fingerprint document.

        Raises:
            CompatibilityError: layers too irregular to be described in ``MAX_FINGERPRINT_BYTES``.
        """
        document = cbor.encode_struct(self)
        if len(document) > MAX_FINGERPRINT_BYTES:
            raise CompatibilityError(
                f"expected a fingerprint of at most {MAX_FINGERPRINT_BYTES} bytes, found {len(document)}"
            )
        return document

    @cached_property
    def hash(self) -> FingerprintHash:
        """Its 32-byte hash."""
        return FingerprintHash(derive_key(FINGERPRINT_CONTEXT, self.encode()))


def decode_fingerprint(data: BytesLike) -> Fingerprint:
    """The fingerprint of a document.

    Raises:
        MalformedError: not a fingerprint document.
    """
    return cbor.decode_as(Fingerprint, data, max_bytes=MAX_FINGERPRINT_BYTES, what="fingerprint")


class Producer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What computed an artifact: the record of numerics that decides between EXACT and TOLERANT. Never a host name.

    Attributes:
        runtime: name of the engine.
        versions: versions of it and of what it computes with.
        device: the chip.
        system: the operating system.
        prefill_step: tokens computed at once.

    Raises:
        MalformedError: a text that is too long or has control characters, or a step that cannot be.
    """

    runtime: str
    versions: str
    device: str
    system: str
    prefill_step: int

    def __post_init__(self) -> None:
        for field in ("runtime", "versions", "device", "system"):
            text = getattr(self, field)
            if len(text.encode("utf-8", "surrogatepass")) > MAX_PRODUCER_TEXT_BYTES or _CONTROL.search(text):
                raise MalformedError(
                    f"producer {field}: expected at most {MAX_PRODUCER_TEXT_BYTES} bytes without control characters"
                )
        if not 0 <= self.prefill_step <= MAX_CBOR_INT:
            raise MalformedError(f"producer prefill_step: expected 0 or more tokens, found {self.prefill_step}")


class Verdict(Enum):
    """May K/V made under one fingerprint be used under another, and how faithfully."""

    EXACT = "exact"
    TOLERANT = "tolerant"
    INCOMPATIBLE = "incompatible"


class Comparison(msgspec.Struct, frozen=True):
    """A verdict and the fields that differ, in words."""

    verdict: Verdict
    differences: tuple[str, ...]


def compare(
    ours: Fingerprint,
    theirs: Fingerprint,
    our_producer: Producer,
    their_producer: Producer,
    *,
    codec: Codec = Codec.RAW,
) -> Comparison:
    """Whether K/V of ``theirs`` continues under ``ours``.

    EXACT: same fingerprint, lossless codec, equal producer records. TOLERANT: same fingerprint, other numerics or a
    lossy codec: rounding differs, as with another batch size. INCOMPATIBLE: another fingerprint.
    """
    different = _different_fields(ours, theirs)
    if different:
        return Comparison(Verdict.INCOMPATIBLE, different)
    tolerated = list(producer_differences(our_producer, their_producer))
    if not codec.lossless:
        tolerated.append(f"stored with the lossy codec {codec.value}")
    return Comparison(Verdict.TOLERANT if tolerated else Verdict.EXACT, tuple(tolerated))


_PRODUCER_WORDS: Final = {
    "runtime": "runtime",
    "versions": "versions",
    "device": "device",
    "system": "system",
    "prefill_step": "prefill step",
}


def producer_differences(ours: Producer, theirs: Producer) -> tuple[str, ...]:
    """In what two producer records differ, in words; of versions only those that do."""
    found: list[str] = []
    for field, words in _PRODUCER_WORDS.items():
        here, there = getattr(ours, field), getattr(theirs, field)
        if here == there:
            continue
        named = _version_differences(here, there) if field == "versions" else []
        found += named or [f"{words}: {_shown(here)} here, {_shown(there)} there"]
    return tuple(found)


def _version_differences(ours: str, theirs: str) -> list[str]:
    """The differing items of two lists such as ``mlx 0.32.4, mlx-lm 0.32.2``; nothing when they are no such lists."""
    lists = [dict(item.partition(" ")[::2] for item in text.split(", ")) for text in (ours, theirs)]
    if not all(version for versions in lists for version in versions.values()):
        return []
    here, there = lists
    names = [name for name in dict.fromkeys((*here, *there)) if here.get(name) != there.get(name)]
    return [f"{name} {here.get(name, 'none')} here, {there.get(name, 'none')} there" for name in names]


def _different_fields(ours: Fingerprint, theirs: Fingerprint) -> tuple[str, ...]:
    """In what two fingerprints differ, in words, the ones that explain most first."""
    words = {
        "architecture": f"architecture {ours.architecture} here, {theirs.architecture} there",
        "layers": _layer_words(ours.layers, theirs.layers),
        "kv": f"K/V {_kv_words(ours.kv)} here, {_kv_words(theirs.kv)} there",
        "adapters": f"{_adapter_words(ours.adapters)} here, {_adapter_words(theirs.adapters)} there",
        "weights": "other weights",
        "config": "another configuration of the model",
    }
    return tuple(text for field, text in words.items() if getattr(ours, field) != getattr(theirs, field))


def _layer_words(ours: LayerLayout, theirs: LayerLayout) -> str:
    if len(ours.order) != len(theirs.order):
        return f"{len(ours.order)} layers here, {len(theirs.order)} there"
    if same_shape(ours, theirs):
        return f"K/V in {_dtype_words(ours)} here, {_dtype_words(theirs)} there"
    return "other shapes of K/V or kinds of caches"


def same_shape(ours: LayerLayout, theirs: LayerLayout) -> bool:
    """Whether two layouts differ in nothing but the dtype of K/V."""
    pairs = zip(map(ours.kind_of, range(len(ours.order))), map(theirs.kind_of, range(len(theirs.order))), strict=False)
    return len(ours.order) == len(theirs.order) and all(
        msgspec.structs.replace(one, dtype=other.dtype) == other for one, other in pairs
    )


def _dtype_words(layers: LayerLayout) -> str:
    return " and ".join(dict.fromkeys(kind.dtype.value for kind in layers.kinds))


def _kv_words(kv: KvFormat) -> str:
    return f"quantised to {kv.bits} bits in groups of {kv.group}" if kv.bits else "not quantised"


def _adapter_words(adapters: tuple[Adapter, ...]) -> str:
    if not adapters:
        return "no adapter"
    digests = ", ".join(f"{each.digest.hex()[:8]} at {struct.unpack('>d', each.scale)[0]:g}" for each in adapters)
    return f"adapter {digests}"


def _shown(value: object) -> str:
    return f"{value} tokens" if isinstance(value, int) else f"{value}"


def weights_digest(tensors: Iterable[tuple[str, str, Sequence[int], bytes]]) -> bytes:
    """32 bytes over (name, dtype, shape, 32-byte hash of the tensor's bytes), whatever their order.

    Raises:
        MalformedError: a name twice, no tensor at all, or a hash that is not 32 bytes.
    """
    records = sorted((name.encode("utf-8"), dtype, list(shape), digest) for name, dtype, shape, digest in tensors)
    names = {record[0] for record in records}
    if not records or len(names) != len(records):
        raise MalformedError(f"weights: expected tensors of distinct names, found {len(records)} of {len(names)} names")
    if any(len(record[3]) != HASH_SIZE_BYTES for record in records):
        raise MalformedError("weights: expected tensor hashes of 32 bytes")
    return blake3_hash(cbor.encode(records))


def config_digest(config: Mapping[str, Any]) -> bytes:
    """32 bytes over a model's configuration after overrides, :data:`IRRELEVANT_CONFIG_FIELDS` left out.

    The configuration is written as RFC 8785 JSON, so that order, spacing and number spelling do not matter.

    Raises:
        MalformedError: NaN, Infinity, an integer beyond 2^53, or something JSON does not hold.
    """
    relevant = _without_irrelevant(config)
    for section in _CONFIG_SECTIONS:
        if isinstance(relevant.get(section), dict):
            relevant[section] = _without_irrelevant(relevant[section])
    try:
        return blake3_hash(rfc8785.dumps(relevant))
    except rfc8785.CanonicalizationError as error:
        raise MalformedError(
            f"model configuration: {error}", hint="NaN, Infinity and integers beyond 2^53 have no canonical JSON form."
        ) from error


def _without_irrelevant(config: Mapping[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in config.items() if field not in IRRELEVANT_CONFIG_FIELDS}
