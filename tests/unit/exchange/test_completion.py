"""Figures of a completion that need no engine."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvnet.engine.interface import ModelInfo
from kvnet.errors import OverBudgetError, WindowError
from kvnet.exchange.completion import require_room, saved_seconds
from tests.simulated.talking import TalkingEngine


def info(**changes: object) -> ModelInfo:
    engine = TalkingEngine(Path("toy"), window_tokens=1000)
    return replace(engine.info, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reused", "speed", "cost", "saved"),
    [(1000, 500.0, 0.5, 1.5), (100, 500.0, 0.5, -0.3), (0, 500.0, 0.5, 0.0), (1000, 0.0, 0.5, 0.0)],
    ids=["saved", "cost more than it spared", "nothing reused", "never measured"],
)
def test_saved_is_the_prefill_spared_less_what_reuse_cost(reused: int, speed: float, cost: float, saved: float) -> None:
    assert saved_seconds(reused, speed, cost) == pytest.approx(saved)


def test_a_prompt_and_answer_that_fill_the_window_are_taken_and_one_token_more_is_refused_with_the_figures() -> None:
    require_room(info(), 900, 100)
    with pytest.raises(WindowError, match=r"1,000 tokens.* 900 and 101"):
        require_room(info(), 900, 101)


def test_a_window_that_is_not_known_refuses_nothing() -> None:
    require_room(info(window_tokens=0), 1 << 20, 1 << 20)


def test_what_memory_could_never_hold_is_refused_with_the_figures() -> None:
    small = info(window_tokens=0, weights_size_bytes=1000, memory_budget_bytes=1000 + 256 * 100)
    require_room(small, 60, 40)
    with pytest.raises(OverBudgetError, match=r"101 tokens need 26,856 bytes.* 26,600 bytes"):
        require_room(small, 61, 40)
