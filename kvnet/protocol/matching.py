"""How two nodes' copies of a model compare: by their names for it, and by what was measured.

The fingerprints and producer records say what must be equal and what is known to differ. The samples say what the two
machines really computed. A measured difference lowers a verdict; that two samples agree never raises one, since they
are a few positions of one prompt.
"""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from math import isfinite
from typing import Final

from kvnet.format.fingerprint import Fingerprint, LayerLayout, Producer, Verdict, compare, same_shape
from kvnet.format.sample import Sample, parts_of
from kvnet.format.tensor import DType

TOLERANCE: Final[Mapping[DType, float]] = {DType.FLOAT32: 0.02, DType.FLOAT16: 0.02, DType.BFLOAT16: 0.15}
"""The largest difference between two machines that is taken for rounding, as a share of the largest magnitude in the
same layer's K or V. Decision 0087 says what was measured."""

_PACKING: Final = re.compile(
    r"(\d+)bits?|w\d+a\d+|u?int\d+|b?fp?\d+|b?float\d+|mx|nv|mxfp\d+|nvfp\d+|mlx|gguf|dwq|awq|gptq|optiq"
)
"""Parts of a model's name that say how its weights are packed, and not what they are."""
_GGUF_PACKING: Final = re.compile(r"(?<![a-z0-9])i?q\d+(_[a-z0-9]+)*(?![a-z0-9])")
"""The same in names of GGUF files, such as ``q4_k_m``."""


class Relation(Enum):
    """What two models have to do with each other."""

    SAME = "same"
    """One fingerprint: state of one is state of the other."""
    NEAR = "near"
    """The same model in another form: by name and shape, or by its weights."""
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Packing:
    """How a model's weights are stored.

    Attributes:
        bits: of a weight, 0 when they are not quantised.
        group: weights that share a scale; 0 when they are not quantised or nobody said.
        dtype: what is not quantised is in; "" when unknown.
    """

    bits: int = 0
    group: int = 0
    dtype: str = ""

    def __str__(self) -> str:
        if not self.bits:
            return "not quantised"
        return f"{self.bits}-bit" + (f" in groups of {self.group}" if self.group else "")


@dataclass(frozen=True, slots=True)
class ModelHere:
    """A model on one of the two nodes.

    Attributes:
        name: what its owner calls it.
        fingerprint: its identity.
        producer: what computes there.
        packing: how its weights are stored.
        sample: None when there is none yet.
    """

    name: str
    fingerprint: Fingerprint
    producer: Producer
    packing: Packing = Packing()
    sample: Sample | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """How far apart two samples are.

    Attributes:
        difference: the largest, as a share of the largest magnitude in its layer's K or V; 0 for equal bits, None for
            samples that cannot be compared.
        words: where and how large.
        tolerated: it is no more than rounding.
    """

    difference: float | None
    words: str
    tolerated: bool


@dataclass(frozen=True, slots=True)
class ModelMatch:
    """What came of comparing two models.

    Attributes:
        relation: what they have to do with each other.
        verdict: for state of theirs used here.
        reasons: why it is not better, in words.
        advice: what to do about it; "" when there is nothing.
        measured: None when there were not two samples to compare.
    """

    relation: Relation
    verdict: Verdict
    reasons: tuple[str, ...]
    advice: str = ""
    measured: Measured | None = None


def match_models(ours: ModelHere, theirs: ModelHere) -> ModelMatch:
    """Compare a model here with one of a peer."""
    named = compare(ours.fingerprint, theirs.fingerprint, ours.producer, theirs.producer)
    if named.verdict is Verdict.INCOMPATIBLE:
        return _different(ours, theirs, named.differences)
    if ours.sample is None or theirs.sample is None:
        return ModelMatch(Relation.SAME, named.verdict, named.differences)
    return with_measured(ours, theirs, measure(ours.fingerprint.layers, ours.sample, theirs.sample))


def with_measured(ours: ModelHere, theirs: ModelHere, measured: Measured) -> ModelMatch:
    """Compare two models of one fingerprint whose samples were compared before."""
    named = compare(ours.fingerprint, theirs.fingerprint, ours.producer, theirs.producer)
    if not measured.tolerated:
        advice = "update kvnet and MLX on both, then look again; one of the two computes this model wrongly"
        return ModelMatch(Relation.SAME, Verdict.INCOMPATIBLE, (measured.words, *named.differences), advice, measured)
    if measured.difference != 0.0:
        reasons = (*named.differences, measured.words)
        return ModelMatch(Relation.SAME, Verdict.TOLERANT, reasons, measured=measured)
    return ModelMatch(Relation.SAME, named.verdict, named.differences, measured=measured)


# --- what is measured -------------------------------------------------------------------------------------------------


def measure(layout: LayerLayout, ours: Sample, theirs: Sample) -> Measured:
    """How far apart two samples of one model are.

    Args:
        layout: of the model; both samples were decoded for it.
        ours: the sample made here.
        theirs: the sample made there.
    """
    if ours.vocabulary != theirs.vocabulary:
        words = f"samples of other token ids: a vocabulary of {ours.vocabulary:,} here, {theirs.vocabulary:,} there"
        return Measured(None, words, tolerated=False)
    if ours.rows == theirs.rows:
        return Measured(0.0, "the bits are equal", tolerated=True)
    largest: dict[tuple[int, bool], float] = {}
    apart: dict[tuple[int, bool], float] = {}
    for part in parts_of(layout):
        dtype, where = layout.kind_of(part.layer).dtype, (part.layer, part.values)
        here, there = (_floats(dtype, sample.rows[part.where]) for sample in (ours, theirs))
        if not all(map(isfinite, chain(here, there))):
            words = f"layer {part.layer} has values that are not finite"
            return Measured(None, words, tolerated=False)
        largest[where] = max(largest.get(where, 0.0), *map(abs, here), *map(abs, there))
        apart[where] = max(apart.get(where, 0.0), *(abs(a - b) for a, b in zip(here, there, strict=True)))
    shares = {where: apart[where] / largest[where] if largest[where] else 0.0 for where in apart}
    layer, values = worst = max(shares, key=lambda where: shares[where])
    tolerance = TOLERANCE[layout.kind_of(layer).dtype]
    tolerated = all(share <= TOLERANCE[layout.kind_of(where[0]).dtype] for where, share in shares.items())
    words = (
        f"K/V measured {_percent(shares[worst])} apart ({'V' if values else 'K'} of layer {layer}); "
        f"up to {_percent(tolerance)} is rounding in {layout.kind_of(layer).dtype.value}"
    )
    return Measured(shares[worst], words, tolerated)


def _floats(dtype: DType, data: bytes) -> tuple[float, ...]:
    if dtype is DType.BFLOAT16:
        # The upper halves of float32 numbers.
        wide = bytearray(2 * len(data))
        wide[2::4], wide[3::4] = data[0::2], data[1::2]
        return struct.unpack(f"<{len(data) // 2}f", wide)
    if dtype is DType.FLOAT16:
        return struct.unpack(f"<{len(data) // 2}e", data)
    return struct.unpack(f"<{len(data) // 4}f", data)


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share >= 0.0001 else "less than 0.01 %"


# --- what the names say -----------------------------------------------------------------------------------------------


def family(name: str) -> str:
    """A model's name without its owner and without how its weights are packed: what two forms of it have in common."""
    parts = re.split(r"[-_. ]+", _GGUF_PACKING.sub("", name.rpartition("/")[2].lower()))
    return "-".join(part for part in parts if part and not _PACKING.fullmatch(part))


def _different(ours: ModelHere, theirs: ModelHere, differences: tuple[str, ...]) -> ModelMatch:
    one, other = ours.fingerprint, theirs.fingerprint
    same_weights = one.weights == other.weights
    kin = (
        one.architecture == other.architecture
        and same_shape(one.layers, other.layers)
        and family(ours.name) == family(theirs.name)
    )
    if not kin and not same_weights:
        return ModelMatch(Relation.OTHER, Verdict.INCOMPATIBLE, differences)
    here, there = ours.packing, theirs.packing
    if (here.bits, here.group) != (there.bits, there.group):
        # Other weights, another configuration and often another dtype follow from that.
        words = (f"other quantisation: {here} here, {there} there",)
        return _near(words, "use the same quantisation on both: copy one model folder, or download the same one")
    if here.dtype != there.dtype and here.dtype and there.dtype:
        return _near((f"{here.dtype} here, {there.dtype} there",), "use the same dtype on both: copy one model folder")
    if same_weights:
        return _near(
            differences, "the weights are equal: give both the same config.json and adapters (such as rope scaling)"
        )
    return _near(differences, "copy one model folder to the other, or download both again from the same place")


def _near(reasons: tuple[str, ...], advice: str) -> ModelMatch:
    return ModelMatch(Relation.NEAR, Verdict.INCOMPATIBLE, reasons, advice)
