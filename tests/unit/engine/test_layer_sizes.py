"""What the layers of a model cache, by its config."""

from typing import Any

import pytest

from kvnet.engine.layer_sizes import (
    LayerSize,
    kv_bytes_per_token,
    kv_dtype,
    layer_sizes,
    shareable,
    window_tokens,
)
from kvnet.errors import CompatibilityError, MalformedError
from tests.unit.engine.configs import DEEPSEEK_V3, GEMMA_3_4B, LLAMA_32_3B, QWEN3_8B


def test_four_times_the_heads_take_four_times_the_bytes() -> None:
    assert kv_bytes_per_token({**QWEN3_8B, "num_key_value_heads": 32}) == 4 * 147_456


def test_llama_3_2_3b_takes_114688_bytes_per_token() -> None:
    assert kv_bytes_per_token(LLAMA_32_3B) == 114_688


def test_latent_attention_whose_code_caches_expanded_heads_counts_every_head() -> None:
    config = {**DEEPSEEK_V3, "model_type": "deepseek_v2"}
    assert kv_bytes_per_token(config) == 61 * 128 * (128 + 64 + 128) * 2


def test_window_layers_are_the_reason_a_model_is_not_shareable() -> None:
    assert shareable(GEMMA_3_4B) == (False, "29 of 34 layers keep a sliding window of 1,024 tokens")


def test_layers_named_one_by_one_are_counted_by_their_names() -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    config = {**LLAMA_32_3B, "num_hidden_layers": 4, "layer_types": types, "sliding_window": 512}
    assert [(layer.kind, layer.n_layers) for layer in layer_sizes(config)] == [("full", 1), ("window", 3)]


def test_a_window_that_the_model_code_ignores_is_ignored() -> None:
    # Mistral's releases carry sliding_window in configs without layer_types: every layer caches the whole length.
    config = {**LLAMA_32_3B, "model_type": "mistral", "sliding_window": 4096}
    assert layer_sizes(config) == layer_sizes(LLAMA_32_3B)
    assert shareable(config) == (True, "")


def test_bits_of_the_weights_play_no_part() -> None:
    packed = {**QWEN3_8B, "quantization": {"bits": 4, "group_size": 64}}
    assert kv_bytes_per_token(packed) == 147_456


def test_head_width_defaults_to_hidden_size_over_heads_and_kv_heads_to_heads() -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    assert layer_sizes(config) == (LayerSize("full", 2, 4, 16, 16),)


def test_older_names_of_the_same_fields_are_read() -> None:
    config = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}
    assert layer_sizes(config) == (LayerSize("full", 12, 12, 64, 64),)
    assert window_tokens(config) == 1024


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"torch_dtype": "float16"}, ("float16", False)),
        ({"dtype": "float32"}, ("float32", False)),
        ({"torch_dtype": "torch.bfloat16"}, ("bfloat16", False)),
        ({"text_config": {"torch_dtype": "float16"}}, ("float16", False)),
        ({}, ("bfloat16", True)),
        ({"torch_dtype": "float8_e4m3fn"}, ("bfloat16", True)),
        ({"torch_dtype": 7}, ("bfloat16", True)),
    ],
)
def test_the_dtype_is_that_of_the_activations(config: dict[str, Any], expected: tuple[str, bool]) -> None:
    assert kv_dtype(config) == expected


def test_an_unknown_model_type_is_refused_and_decided_when_loaded() -> None:
    config = {**QWEN3_8B, "model_type": "brand_new"}
    with pytest.raises(CompatibilityError, match="'brand_new'"):
        layer_sizes(config)
    assert shareable(config) == (None, "model type 'brand_new' is decided when loaded")


def test_unknown_layer_types_are_refused() -> None:
    config = {**LLAMA_32_3B, "num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]}
    with pytest.raises(CompatibilityError, match="'linear_attention'"):
        layer_sizes(config)
    verdict, reason = shareable(config)
    assert verdict is None
    assert "decided when loaded" in reason


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": None},
        {"num_hidden_layers": "36"},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": True},
        {"num_hidden_layers": 36.0},
        {"num_hidden_layers": 1 << 40},
        {"head_dim": None, "hidden_size": 4097},
        {"head_dim": 1.5},
        {"model_type": None},
        {"model_type": ["qwen3"]},
        {"model_type": "llama", "layer_types": ["full_attention"]},
        {"model_type": "llama", "layer_types": "full"},
        {"model_type": "gpt_oss", "sliding_window": None},
    ],
)
def test_a_config_that_makes_no_sense_is_malformed(change: dict[str, Any]) -> None:
    with pytest.raises(MalformedError):
        layer_sizes({**QWEN3_8B, **change})


def test_a_depth_no_model_has_is_refused_before_anything_is_built() -> None:
    with pytest.raises(MalformedError, match="at most 10,000 layers"):
        layer_sizes({**GEMMA_3_4B, "text_config": {"num_hidden_layers": 1 << 30, "sliding_window": 8}})
