"""The arithmetic of ``kvnet size``."""

from typing import Any

import pytest

from kvnet.engine.layer_sizes import LayerSize, kv_bytes_per_token, layer_sizes, shareable
from kvnet.engine.sizing import size_report
from kvnet.errors import CompatibilityError, UsageError
from tests.unit.engine.configs import DEEPSEEK_V3, GEMMA_3_4B, QWEN3_8B


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


def test_latent_attention_counts_the_latent_once_for_all_heads() -> None:
    assert layer_sizes(DEEPSEEK_V3) == (LayerSize("full", 61, 1, 512, 64, latent=True),)
    assert kv_bytes_per_token(DEEPSEEK_V3) == 61 * (512 + 64) * 2
    assert shareable(DEEPSEEK_V3) == (True, "")
    assert "1 latent × (512 + 64)" in size_report(DEEPSEEK_V3, model="m").formula


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


@pytest.mark.parametrize(
    "options", [{"n_tokens": 0}, {"n_tokens": -5}, {"n_tokens": 1 << 40}, {"users": 0}, {"codec": "zip"}]
)
def test_counts_and_codecs_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        size_report(QWEN3_8B, model="m", **options)
