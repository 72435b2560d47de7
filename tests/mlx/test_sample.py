"""A model's sample on MLX: what two processes compute of it, how it gives way, and what other forms of a model are."""

from pathlib import Path

import pytest
import trio

from kvnet.engine.client import EngineClient
from kvnet.errors import BusyError, CompatibilityError
from kvnet.format.fingerprint import Verdict
from kvnet.format.sample import decode_sample
from kvnet.protocol.matching import ModelHere, Packing, Relation, match_models
from tests.mlx import tinymodels
from tests.mlx.conftest import Opener
from tests.mlx.requests import generate, made_up_tokens

pytestmark = pytest.mark.mlx


async def here(engine: EngineClient, *, dtype: str = "float32") -> ModelHere:
    fingerprint = engine.info.fingerprint
    assert fingerprint is not None
    sample = decode_sample(await engine.sample(), fingerprint)
    return ModelHere(engine.info.name, fingerprint, engine.info.producer, Packing(dtype=dtype), sample)


async def test_two_processes_compute_the_same_bits_of_the_same_model(opener: Opener, tiny_llama: Path) -> None:
    async with opener(tiny_llama) as first, opener(tiny_llama) as second:
        ours, theirs = await here(first), await here(second)
    found = match_models(ours, theirs)
    assert found.measured is not None
    assert (found.measured.difference, found.verdict, found.reasons) == (0.0, Verdict.EXACT, ())


async def test_the_same_model_in_another_dtype_is_named_in_words(
    opener: Opener, tiny_llama: Path, tmp_path: Path
) -> None:
    half = tinymodels.write_model(tmp_path / "tiny-llama-bf16", dtype="bfloat16")
    async with opener(tiny_llama) as first, opener(half) as second:
        ours, theirs = await here(first), await here(second, dtype="bfloat16")
    found = match_models(ours, theirs)
    assert (found.relation, found.verdict) == (Relation.NEAR, Verdict.INCOMPATIBLE)
    assert found.reasons == ("float32 here, bfloat16 there",)


async def test_requests_go_first_and_the_sample_is_the_same(opener: Opener, tiny_llama: Path) -> None:
    async with opener(tiny_llama) as engine:
        alone = await engine.sample()
        made: list[bytes] = []

        async def sample() -> None:
            while not made:
                try:
                    made.append(await engine.sample())
                except BusyError:
                    await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate, engine, made_up_tokens(40))
            nursery.start_soon(sample)
        assert made == [alone]


async def test_a_model_without_shareable_state_has_no_sample(opener: Opener, tmp_path: Path) -> None:
    model = tinymodels.write_model(tmp_path / "mamba", tinymodels.MAMBA)
    async with opener(model) as engine:
        with pytest.raises(CompatibilityError, match="no sample"):
            await engine.sample()
