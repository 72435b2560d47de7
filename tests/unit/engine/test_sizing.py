"""The arithmetic of ``kvnet size``."""

from typing import Any

import pytest

from kvnet.engine import sizing
from kvnet.engine.sizing import LayerSize, kv_bytes_per_token, layer_sizes, shareable, size_report
from kvnet.errors import CompatibilityError, MalformedError, UsageError

QWEN3_8B = {
    "model_type": "qwen3", "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_size": 4096, "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_32_3B = {
    "model_type": "llama", "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_size": 3072, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "hidden_size": 7168, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "max_position_embeddings": 163840, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA_3_4B = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "sliding_window": 1024,
        "max_position_embeddings": 131072,
    },
    "torch_dtype": "bfloat16",
}  # fmt: skip


def total(config: dict[str, Any], n_tokens: int, **options: Any) -> int:
    (row,) = size_report(config, model="m", n_tokens=n_tokens, **options).rows
    return row.kv_bytes


def test_qwen3_8b_takes_147456_bytes_per_token() -> None:
    report = size_report(QWEN3_8B, model="Qwen3-8B")
    assert report.bytes_per_token == report.bytes_per_token_beyond_window == 147_456
    assert [(row.n_tokens, row.kv_bytes) for row in report.rows] == [
        (8_000, 1_179_648_000), (32_000, 4_718_592_000), (128_000, 18_874_368_000),
    ]  # fmt: skip
    text = "\n".join(report.lines())
    assert "36 layers × 8 K/V heads × 128 × 2 (K and V) × 2 bytes (bfloat16) = 147,456 bytes per token" in text
    assert "RAM 1.18 GB" in text
    assert "RAM 4.72 GB" in text
    assert "RAM 18.9 GB" in text


def test_four_times_the_heads_take_four_times_the_bytes() -> None:
    assert kv_bytes_per_token({**QWEN3_8B, "num_key_value_heads": 32}) == 4 * 147_456


def test_llama_3_2_3b_takes_114688_bytes_per_token() -> None:
    assert kv_bytes_per_token(LLAMA_32_3B) == 114_688


def test_latent_attention_counts_the_latent_once_for_all_heads() -> None:
    assert layer_sizes(DEEPSEEK_V3) == (LayerSize("full", 61, 1, 512, 64, latent=True),)
    assert kv_bytes_per_token(DEEPSEEK_V3) == 61 * (512 + 64) * 2
    assert shareable(DEEPSEEK_V3) == (True, "")
    assert "1 latent × (512 + 64)" in size_report(DEEPSEEK_V3, model="m").formula


def test_latent_attention_whose_code_caches_expanded_heads_counts_every_head() -> None:
    config = {**DEEPSEEK_V3, "model_type": "deepseek_v2"}
    assert kv_bytes_per_token(config) == 61 * 128 * (128 + 64 + 128) * 2


def test_window_layers_stop_growing_at_their_window() -> None:
    full, window = layer_sizes(GEMMA_3_4B)
    assert (full.n_layers, window.n_layers, window.window_tokens) == (5, 29, 1024)
    per_layer = 4 * 256 * 2 * 2
    assert total(GEMMA_3_4B, 1_000) == 34 * per_layer * 1_000
    assert total(GEMMA_3_4B, 1_024) == 34 * per_layer * 1_024
    assert total(GEMMA_3_4B, 32_000) == 5 * per_layer * 32_000 + 29 * per_layer * 1_024
    report = size_report(GEMMA_3_4B, model="m")
    assert (report.bytes_per_token, report.bytes_per_token_beyond_window) == (34 * per_layer, 5 * per_layer)
    assert report.window_tokens == 131072


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
    assert sizing.window_tokens(config) == 1024


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
    assert sizing.kv_dtype(config) == expected


def test_an_assumed_dtype_is_said() -> None:
    config = {key: value for key, value in QWEN3_8B.items() if key != "torch_dtype"}
    assert "assumed" in "\n".join(size_report(config, model="m").lines())


def test_users_multiply_everything() -> None:
    one, many = (size_report(QWEN3_8B, model="m", n_tokens=8_000, users=n).rows[0] for n in (1, 5))
    assert (many.kv_bytes, many.ram_bytes, many.disk_bytes) == (5 * one.kv_bytes, 5 * one.ram_bytes, 5 * one.disk_bytes)
    assert abs(many.links[0].milliseconds - 5 * one.links[0].milliseconds) <= 5


def test_disk_counts_token_ids_and_the_codec() -> None:
    raw = size_report(QWEN3_8B, model="m", n_tokens=1_000).rows[0]
    packed = size_report(QWEN3_8B, model="m", n_tokens=1_000, codec="shuffle+zstd-1").rows[0]
    assert raw.disk_bytes == 147_456_000 + 4_000
    assert packed.disk_bytes == 147_456_000 * 682 // 1000 + 4_000
    assert raw.ram_bytes == packed.ram_bytes == 147_456_000


def test_seconds_follow_from_the_disk_size_and_the_assumed_rate() -> None:
    row = size_report(QWEN3_8B, model="m", n_tokens=8_000).rows[0]
    assert [time.link for time in row.links] == ["Wi-Fi", "1 GbE", "10 GbE", "Thunderbolt"]
    for time in row.links:
        assert (time.milliseconds - 1) * time.rate_bytes_per_s < row.disk_bytes * 1000
        assert time.milliseconds * time.rate_bytes_per_s >= row.disk_bytes * 1000


def test_json_holds_exact_integers() -> None:
    def numbers(value: object) -> list[object]:
        if isinstance(value, dict):
            return [n for item in value.values() for n in numbers(item)]
        if isinstance(value, list):
            return [n for item in value for n in numbers(item)]
        return [value]

    report = size_report(GEMMA_3_4B, model="m", n_tokens=32_001, users=3, codec="shuffle+zstd-1").as_json()
    assert not [value for value in numbers(report) if isinstance(value, float)]
    assert report["rows"][0]["kv_bytes"] == 3 * total(GEMMA_3_4B, 32_001)


def test_more_tokens_than_the_window_are_pointed_out() -> None:
    assert "more than the model's window of 40,960" in "\n".join(size_report(QWEN3_8B, model="m").lines())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mamba", "recurrent state"),
        ("qwen3_next", "recurrent state"),
        ("falcon_mamba", "recurrent state"),
        ("llama4", "chunked attention"),
        ("deepseek_v32", "two caches a layer"),
        ("deepseek_v41", "a class of its own"),
    ],
)
def test_other_kinds_of_cache_are_refused_by_name(name: str, reason: str) -> None:
    config = {**QWEN3_8B, "model_type": name}
    with pytest.raises(CompatibilityError, match=reason):
        size_report(config, model="m")
    verdict, text = shareable(config)
    assert verdict is False
    assert reason in text


def test_an_unknown_model_type_is_refused_and_decided_when_loaded() -> None:
    config = {**QWEN3_8B, "model_type": "brand_new"}
    with pytest.raises(CompatibilityError, match="'brand_new'"):
        layer_sizes(config)
    assert shareable(config) == (None, "model type 'brand_new' is decided when loaded")


def test_unknown_layer_types_are_refused() -> None:
    config = {**LLAMA_32_3B, "num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]}
    with pytest.raises(CompatibilityError, match="'linear_attention'"):
        layer_sizes(config)


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


@pytest.mark.parametrize(
    "options", [{"n_tokens": 0}, {"n_tokens": -5}, {"n_tokens": 1 << 40}, {"users": 0}, {"codec": "zip"}]
)
def test_counts_and_codecs_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        size_report(QWEN3_8B, model="m", **options)
