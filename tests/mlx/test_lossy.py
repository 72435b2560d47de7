"""What state restored from q8 is worth: not the bits, but the answer."""

from pathlib import Path

import numpy as np
import pytest

from kvnet.engine.generations import LogitsRequest
from kvnet.engine.interface import Engine
from kvnet.engine.kv_state import RestorePlan
from kvnet.format.codecs import Codec
from kvnet_node.demonstration import demo_model
from tests.mlx import tinymodels
from tests.mlx.conftest import Opener
from tests.mlx.requests import cut, export, generate, made_up_tokens

pytestmark = pytest.mark.mlx

DOCUMENT = Path(__file__).parents[2] / "docs" / "format.md"


async def logits_of(engine: Engine, tokens: list[int], plan: RestorePlan) -> np.ndarray:
    return np.frombuffer((await engine.logits(LogitsRequest(tokens, plan))).values, "<f4")


def stored_bytes(plan: RestorePlan) -> int:
    return sum(chunk.length_bytes for chunk in plan.chunks)


@pytest.mark.parametrize(("dtype", "share"), [("float32", 5 / 16), ("float16", 5 / 8), ("bfloat16", 5 / 8)])
async def test_a_tiny_model_continues_from_q8_nearly_as_from_raw(
    opener: Opener, tmp_path: Path, dtype: str, share: float
) -> None:
    model = tinymodels.write_model(tmp_path / "tiny", dtype=dtype)
    tokens = made_up_tokens(400)
    async with opener(model) as engine:
        raw = await export(engine, tokens[:390], tmp_path / "raw")
        packed = await export(engine, tokens[:390], tmp_path / "packed", codec=Codec.Q8)
        # Rows of 16 elements: 20 bytes for 16.
        assert stored_bytes(packed) == stored_bytes(raw) * share
        for n in (100, 256, 390):
            exact, near = [await logits_of(engine, tokens, cut(plan, n)) for plan in (raw, packed)]
            assert 0 < np.abs(exact - near).max() < 0.05 * np.abs(exact).max()


async def test_two_exports_of_the_same_state_are_the_same_q8_bytes(
    opener: Opener, tiny_llama: Path, tmp_path: Path
) -> None:
    tokens = made_up_tokens(300)
    async with opener(tiny_llama) as engine:
        raw = await export(engine, tokens, tmp_path / "raw")
        first = await export(engine, tokens, tmp_path / "first", codec=Codec.Q8)
        # Encoded from what was restored exactly, instead of from what was computed.
        again = await export(engine, tokens, tmp_path / "again", codec=Codec.Q8, restore=raw)
    assert [chunk.hash for chunk in again.chunks] == [chunk.hash for chunk in first.chunks]


@pytest.mark.nightly
async def test_smollm2_answers_from_q8_what_it_answers_from_raw(opener: Opener, tmp_path: Path) -> None:
    model = demo_model(lambda _: None)
    async with opener(model) as engine:
        tokens = (await engine.tokenize(DOCUMENT.read_text()))[:1024]
        raw = await export(engine, tokens[:1000], tmp_path / "raw")
        packed = await export(engine, tokens[:1000], tmp_path / "packed", codec=Codec.Q8)
        assert stored_bytes(raw) / stored_bytes(packed) == pytest.approx(64 / 17)
        exact, near = [await logits_of(engine, tokens, plan) for plan in (raw, packed)]
        assert np.abs(exact - near).max() < 0.3
        answers = [await generate(engine, tokens, plan, max_tokens=64) for plan in (raw, packed)]
    assert answers[0].text == answers[1].text
