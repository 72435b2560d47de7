"""What restored state is worth: bit for bit the run that stopped at the same token."""

import os
from pathlib import Path

import numpy as np
import pytest

from kvnet.engine.generations import LogitsRequest
from kvnet.engine.mlx.prefill import TAIL_TOKENS
from kvnet.engine.selftest import max_difference, run_selftest
from kvnet.format.codecs import Codec
from kvnet.format.manifest import decode_manifest
from tests.mlx import tinymodels
from tests.mlx.conftest import Opener
from tests.mlx.requests import cut, export, generate, made_up_tokens

pytestmark = pytest.mark.mlx

LENGTHS = (1, 2, 5, 255, 256, 257, 511, 512, 513)


async def test_restored_prefixes_of_any_length_continue_bit_for_bit_in_a_new_process(
    opener: Opener, tiny_llama: Path, tmp_path: Path
) -> None:
    tokens = made_up_tokens(max(LENGTHS) + 7)
    async with opener(tiny_llama) as producer:
        plans = {n: await export(producer, tokens[:n], tmp_path / f"pack-{n}") for n in LENGTHS}
        stopped = {n: await producer.logits(LogitsRequest(tokens[: n + 7], stops=(n,))) for n in LENGTHS}
        one_shot = {n: await producer.logits(LogitsRequest(tokens[: n + 7], one_shot=True)) for n in LENGTHS}
        cold = {n: await generate(producer, tokens[: n + 7]) for n in LENGTHS}
    async with opener(tiny_llama) as consumer:
        for n in LENGTHS:
            restored = await consumer.logits(LogitsRequest(tokens[: n + 7], plans[n]))
            assert restored.values == stopped[n].values, f"prefix of {n} tokens"
            assert max_difference(restored, one_shot[n]) < 1e-4
            answer = await generate(consumer, tokens[: n + 7], plans[n])
            assert (answer.tokens, answer.text) == (cold[n].tokens, cold[n].text)
            assert (answer.restored_tokens, answer.prefilled_tokens) == (n, 7)


async def test_payload_bytes_follow_the_token_count(opener: Opener, tiny_llama: Path, tmp_path: Path) -> None:
    tokens = made_up_tokens(max(LENGTHS))
    async with opener(tiny_llama) as engine:
        per_token = engine.info.kv_bytes_per_token
        assert per_token == 2 * 2 * (16 + 16) * 4
        for n in LENGTHS:
            plan = await export(engine, tokens[:n], tmp_path / f"pack-{n}")
            assert sum(chunk.length_bytes for chunk in plan.chunks) == n * per_token
            assert (tmp_path / f"pack-{n}").stat().st_size == n * per_token


async def test_an_artifact_holds_nothing_of_tokens_beyond_its_end(
    opener: Opener, tiny_llama: Path, tmp_path: Path
) -> None:
    tokens = made_up_tokens(300)
    other = [*tokens[:100], *made_up_tokens(200, seed=1)]
    async with opener(tiny_llama) as engine:
        long = [await export(engine, t, tmp_path / f"long-{i}") for i, t in enumerate((tokens, other))]
        honest = await export(engine, tokens[:100], tmp_path / "honest")
        # Cut from state that held 200 more tokens, whichever they were: the bytes are those of the 100 tokens.
        for i, plan in enumerate(long):
            await export(engine, tokens[:100], tmp_path / f"cut-{i}", restore=cut(plan, 100))
            assert (tmp_path / f"cut-{i}").read_bytes() == (tmp_path / "honest").read_bytes()
    assert decode_manifest(honest.manifest).n_tokens == 100


async def test_position_after_restore_is_the_token_count_in_every_layer(
    opener: Opener, tiny_llama: Path, tmp_path: Path
) -> None:
    tokens = made_up_tokens(120)
    async with opener(tiny_llama) as engine:
        plan = await export(engine, tokens[:100], tmp_path / "pack")
        assert (await engine.logits(LogitsRequest(tokens[:101], plan))).positions == (100, 100)
        for suffix in (1, 20):
            prompt = tokens[: 100 + suffix]
            assert (await generate(engine, prompt, plan)).tokens == (await generate(engine, prompt)).tokens


async def test_tails_short_and_long_continue_like_the_run_that_stopped_there(
    opener: Opener, tiny_llama: Path, tmp_path: Path
) -> None:
    tokens = made_up_tokens(301 + 2 * TAIL_TOKENS)
    async with opener(tiny_llama) as engine:
        plan = await export(engine, tokens[:300], tmp_path / "pack")
        # The last token alone; with the rest in one step; and again alone, after a step that is too long to take it in.
        for n_tail in (1, 2, TAIL_TOKENS, TAIL_TOKENS + 1, 2 * TAIL_TOKENS):
            prompt = tokens[: 300 + n_tail]
            restored = await engine.logits(LogitsRequest(prompt, plan))
            assert restored.values == (await engine.logits(LogitsRequest(prompt, stops=(300,)))).values
            assert restored.positions == (len(prompt) - 1,) * 2
            [likeliest] = [int(np.argmax(np.frombuffer(restored.values, "<f4")))]
            assert (await generate(engine, prompt, plan)).tokens[0] == likeliest


async def test_prompts_around_the_artifact_give_the_cold_text(opener: Opener, tiny_llama: Path, tmp_path: Path) -> None:
    tokens = made_up_tokens(301)
    async with opener(tiny_llama) as engine:
        plan = await export(engine, tokens[:300], tmp_path / "pack")
        # Equal to the artifact (twice), one token longer, one shorter, one token in all.
        for n, reused in ((300, 299), (300, 299), (301, 300), (299, 298), (1, 0)):
            cold = await generate(engine, tokens[:n])
            warm = await generate(engine, tokens[:n], cut(plan, min(n, 300)))
            assert warm.text
            assert (warm.text, warm.tokens, warm.restored_tokens) == (cold.text, cold.tokens, reused)


async def test_lossless_codec_restores_the_same_state_as_raw(opener: Opener, tiny_llama: Path, tmp_path: Path) -> None:
    tokens = made_up_tokens(400)
    async with opener(tiny_llama) as engine:
        raw = await export(engine, tokens[:390], tmp_path / "raw")
        packed = await export(engine, tokens[:390], tmp_path / "packed", codec=Codec.SHUFFLE_ZSTD1)
        values = [(await engine.logits(LogitsRequest(tokens, plan))).values for plan in (raw, packed)]
    assert values[0] == values[1]


async def test_latent_attention_with_unequal_key_and_value_sizes_is_exact(opener: Opener, tmp_path: Path) -> None:
    model = tinymodels.write_model(tmp_path / "tiny-mla", tinymodels.MLA)
    tokens = made_up_tokens(290)
    async with opener(model) as engine:
        kind = engine.info.fingerprint.layers.kinds[0]  # type: ignore[union-attr]
        assert (kind.heads, kind.k_dim, kind.v_dim) == (1, 32, 16)
        plan = await export(engine, tokens[:280], tmp_path / "pack")
        restored = await engine.logits(LogitsRequest(tokens, plan))
        assert restored.values == (await engine.logits(LogitsRequest(tokens, stops=(280,)))).values


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_half_precision_models_restore_bit_for_bit(opener: Opener, tmp_path: Path, dtype: str) -> None:
    model = tinymodels.write_model(tmp_path / "tiny-half", dtype=dtype)
    tokens = made_up_tokens(200)
    async with opener(model) as engine:
        assert engine.info.fingerprint.layers.kinds[0].dtype.value == dtype  # type: ignore[union-attr]
        plan = await export(engine, tokens[:199], tmp_path / "pack")
        one_shot = await engine.logits(LogitsRequest(tokens, one_shot=True))
        for n in (192, 199):
            restored = await engine.logits(LogitsRequest(tokens, cut(plan, n)))
            assert restored.values == (await engine.logits(LogitsRequest(tokens, stops=(n,)))).values
            # Against one shot other kernels round differently: bounded, and reported as drift, not as corruption.
            assert max_difference(restored, one_shot) < 0.2


async def test_selftest_reports_equality_and_both_times(tiny_llama: Path, tmp_path: Path) -> None:
    told: list[str] = []
    report = await run_selftest(tiny_llama, tmp_path, n_tokens=300, progress=told.append)
    assert report.passed
    assert report.exact
    assert report.same_text
    assert report.max_logit_difference < 1e-4
    assert report.size_bytes == 300 * report.model.kv_bytes_per_token
    assert report.restored_ttft_s > 0
    assert report.cold_ttft_s > 0
    assert told
    assert not [name for name in os.listdir(tmp_path) if name.startswith("selftest-")]


def test_the_largest_difference_is_found_wherever_it_is() -> None:
    from kvnet.engine.generations import Logits

    a, b = (Logits(np.array(values, "<f4").tobytes(), ()) for values in ([0, 1, 2], [0, 1.5, 1.75]))
    assert max_difference(a, b) == 0.5
