"""Calibrating: what is measured of an engine whose costs are known."""

import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from kvnet.engine.generations import GenerateEvent, GenerateRequest
from kvnet.engine.interface import ModelInfo
from kvnet.engine.toy import ToyCosts, ToyEngine
from kvnet.errors import CompatibilityError, EngineError
from kvnet_node.calibrating import FASTEST_BYTES_S, calibrate, points_of, restore_speed
from kvnet_node.commands.bench import render_calibration
from kvnet_node.operations.calibrating import result
from kvnet_node.speeds import Calibration, Point

MB = 1_000_000


async def test_a_calibration_finds_what_the_engine_costs(tmp_path: Path) -> None:
    costs = ToyCosts(prefill_s_per_token=1e-4, restore_s_per_token=1e-5)
    engine = ToyEngine(Path("toy"), costs, 2000, 1 << 40)
    heard: list[tuple[str, int, int]] = []
    found = await calibrate(engine, tmp_path, now_s=1_800_000_000, say=lambda *each: heard.append(each))
    assert [point.position for point in found.prefill][:2] == [256, 768]
    assert all(1_000 < point.tokens_s <= 10_000 for point in found.prefill)
    # 256 bytes a token in 10 microseconds or more: rate and fixed part together say no less, however they share it.
    (restored,) = {total for stage, _, total in heard if stage == "restore"}
    assert found.restore_bytes_s > 1e5
    assert found.restore_fixed_s + restored * 256 / found.restore_bytes_s >= 0.99e-5 * restored
    assert found.decode_bytes_s["shuffle+zstd-1"] > 0
    assert found.stored_shares["raw"] == 1.0
    assert (found.measured, found.kv_bytes_per_token) == (1_800_000_000, 256)
    assert {stage for stage, _, _ in heard} == {"prefill", "restore"}
    assert not os.listdir(tmp_path)
    shown = result(found, 2000, 1.5)
    assert {each.position for each in shown.break_even} == {0, 1024}
    assert all(each.bytes_s is None or each.bytes_s > 0 for each in shown.break_even)


def test_rates_that_rest_on_a_prefill_that_was_not_measured_so_far_are_marked() -> None:
    found = Calibration(
        "toy", "00", "cpu", "1", 1, [Point(256, 1000.0), Point(768, 900.0)], 742e6, 0.0004, {}, 256, {"raw": 1.0}
    )
    shown = result(found, 8192, 9.5)
    assert [(each.position, each.measured_to) for each in shown.break_even] == [(0, 0), (1024, 768), (4096, 768)]
    words = render_calibration(shown)
    assert "measured for about 5 s, two steps at least, 8,192 tokens at most; here up to token 768" in words
    assert "742 MB/s, and 0.4 ms each time" in words
    marked = [line.split()[0] for line in words.splitlines() if line.endswith("/s (prefill not measured beyond 768)")]
    assert marked == ["1,024", "4,096"]


async def test_a_slow_machine_computes_two_steps_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvnet_node.calibrating.PREFILL_S", 0.1)

    class Counting(ToyEngine):
        asked: ClassVar[list[int]] = []

        async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
            self.asked.append(len(request.tokens))
            async with aclosing(super().generate(request)) as events:
                async for event in events:
                    yield event

    engine = Counting(Path("toy"), ToyCosts(prefill_s_per_token=2e-4), 9000, 1 << 40)
    found = await calibrate(engine, tmp_path, now_s=1)
    assert [point.position for point in found.prefill] == [256, 768]
    # To warm up; two steps and the token that is decoded, and nothing of a third; then what is restored.
    assert engine.asked[:3] == [64, 1025, 257]


async def test_a_model_that_cannot_be_shared_or_is_too_short_is_refused(tmp_path: Path) -> None:
    class Unshareable(ToyEngine):
        @property
        def info(self) -> ModelInfo:
            return replace(super().info, fingerprint=None, refusal="state of another kind")

    with pytest.raises(CompatibilityError, match="state of another kind"):
        await calibrate(Unshareable(Path("toy"), ToyCosts(), 2000, 1 << 40), tmp_path, now_s=1)
    with pytest.raises(EngineError, match="room for 257 tokens"):
        await calibrate(ToyEngine(Path("toy"), ToyCosts(), 200, 1 << 40), tmp_path, now_s=1)


def test_speeds_are_those_between_two_moments() -> None:
    assert points_of([(0, 1.0), (512, 2.0), (512, 2.5), (1024, 4.0)]) == [Point(256, 512.0), Point(768, 256.0)]
    assert points_of([(0, 1.0), (512, 1.0)]) == []
    assert points_of([]) == []


def test_a_restore_is_a_rate_and_a_fixed_part() -> None:
    speed = restore_speed([10 * MB, 110 * MB], [0.03, 0.13])
    assert speed.bytes_s == pytest.approx(1e9)
    assert speed.fixed_s == pytest.approx(0.02)
    assert restore_speed([10 * MB], [0.1]).bytes_s == pytest.approx(1e8)
    assert restore_speed([10 * MB, 20 * MB], [0.2, 0.1]).bytes_s == pytest.approx(2e8)
    assert restore_speed([10 * MB], [0.0]).bytes_s == FASTEST_BYTES_S
