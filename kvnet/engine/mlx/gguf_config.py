"""A Llama's configuration, from the metadata of a GGUF file."""

import math
from collections.abc import Mapping
from typing import Any, cast

import mlx.core as mx

from kvnet.errors import CompatibilityError, MalformedError

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor with the factors of its rotary frequencies."""

# The rope scalings of the Llama 3.1 and 3.2 releases. GGUF keeps only the resulting factor per frequency.
LLAMA3_SCALINGS = tuple(
    {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for factor in (8.0, 32.0)
)  # fmt: skip


def config_of(metadata: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> dict[str, Any]:
    """What goes into ``config.json``, but for what the tokenizer says.

    Raises:
        MalformedError: a number is missing, or not positive.
        CompatibilityError: a rotary embedding that is not supported.
    """
    hidden, heads = _number(metadata, "embedding_length"), _number(metadata, "attention.head_count")
    head_dim = _number(metadata, "attention.key_length", hidden // heads)
    rotated = _number(metadata, "rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise CompatibilityError(f"expected rotary embedding over all {head_dim} values of a head, found {rotated}")
    # GGUF holds float32; the shortest decimal that gives the same float32 is what the release wrote.
    eps = float(f"{_number(metadata, 'attention.layer_norm_rms_epsilon'):.6g}")
    theta = _number(metadata, "rope.freq_base", 10000.0)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": _number(metadata, "block_count"),
        "intermediate_size": _number(metadata, "feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": _number(metadata, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": _number(metadata, "context_length"),
        "rms_norm_eps": eps,
        "rope_theta": float(theta),
        "rope_traditional": False,
        "rope_scaling": _rope_scaling(metadata, tensors, float(theta), head_dim),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
    }


def _rope_scaling(
    metadata: Mapping[str, Any], tensors: Mapping[str, mx.array], theta: float, head_dim: int
) -> dict[str, Any] | None:
    kind = metadata.get("llama.rope.scaling.type", "none")
    if ROPE_FACTORS in tensors:
        factors = cast("list[float]", tensors[ROPE_FACTORS].tolist())
        for scaling in LLAMA3_SCALINGS:
            expected = llama3_factors(scaling, theta, head_dim)
            if len(factors) == len(expected) and all(
                math.isclose(a, b, rel_tol=1e-4) for a, b in zip(factors, expected, strict=True)
            ):
                return dict(scaling)
        raise CompatibilityError("expected the rope scaling of Llama 3.1 or 3.2, found other factors in rope_freqs")
    if kind in ("none", ""):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(_number(metadata, "rope.scaling.factor"))}
    raise CompatibilityError(f"expected rope scaling none, linear or that of Llama 3, found {kind!r}")


def llama3_factors(scaling: Mapping[str, Any], theta: float, head_dim: int) -> list[float]:
    """What the Llama 3.1 release divides each rotary frequency by (its published scaling rule)."""
    window, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (index / head_dim)
        if wavelength < window / high:
            factors.append(1.0)
        elif wavelength > window / low:
            factors.append(factor)
        else:
            smooth = (window / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _number(metadata: Mapping[str, Any], key: str, default: float | None = None) -> Any:
    value = metadata.get(f"llama.{key}", default)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise MalformedError(f"expected a positive number llama.{key} in the file's metadata, found {value!r}")
    return value
