"""Where prefill steps end, and what the memory budget lets in."""

import threading

import pytest

from kvnet.engine.mlx.budget import Budget
from kvnet.engine.mlx.prefill import TAIL_TOKENS, prompt_step_ends, step_ends
from kvnet.engine.mlx.state_cost import StateCost
from kvnet.errors import CrowdedError, OverBudgetError

pytestmark = pytest.mark.mlx


@pytest.mark.parametrize(
    ("start", "end", "stops", "expected"),
    [
        (0, 1, (), [1]),
        (0, 512, (), [512]),
        (0, 513, (), [512, 513]),
        (300, 1100, (), [512, 1024, 1100]),
        (512, 512, (), []),
        (512, 1024, (), [1024]),
        (0, 700, (300, 512, 900, 0), [300, 512, 700]),
    ],
)
def test_steps_end_at_absolute_multiples_and_at_stops(
    start: int, end: int, stops: tuple[int, ...], expected: list[int]
) -> None:
    assert step_ends(start, end, 512, stops) == expected


@pytest.mark.parametrize(
    ("start", "n_tokens", "stops", "expected"),
    [
        (0, 1, (), []),
        (0, TAIL_TOKENS, (), []),
        (0, TAIL_TOKENS + 1, (), [TAIL_TOKENS]),
        (1033, 1062, (), []),
        (1061, 1062, (), []),
        (0, 1062, (), [512, 1024]),
        (0, 1024 + TAIL_TOKENS + 1, (), [512, 1024, 1024 + TAIL_TOKENS]),
        (0, 1062, (1033,), [512, 1024, 1033]),
        # Where state is kept a step has to end.
        (1033, 1062, (1061,), [1061]),
        (1033, 1062, (1062,), []),
    ],
)
def test_a_short_last_step_takes_the_last_token_of_the_prompt_along(
    start: int, n_tokens: int, stops: tuple[int, ...], expected: list[int]
) -> None:
    assert prompt_step_ends(start, n_tokens, 512, stops) == expected


def budget(limit_bytes: int = 10_000) -> Budget:
    return Budget(weights_size_bytes=1000, cost=StateCost(((10, None),)), window_tokens=700, limit_bytes=limit_bytes)


def test_window_counts_what_may_be_generated() -> None:
    budget().check(600, 44)
    with pytest.raises(OverBudgetError, match="700 tokens; the prompt has 600 and 101"):
        budget().check(600, 101)


def test_memory_counts_weights_and_headroom() -> None:
    # 1,000 + (640 + 256) x 10 = 9,960.
    budget().check(640)
    with pytest.raises(OverBudgetError, match="645 tokens need 10,010 bytes"):
        budget().check(645)


def test_a_limit_below_what_runs_lets_it_run_and_keeps_others_out() -> None:
    room = budget()
    assert room.acquire(300, lambda: False)
    assert room.limit(3000) == 1000 + (300 + 256) * 10
    with pytest.raises(
        CrowdedError, match="3,560 bytes with the weights; other models in memory leave 3,000 of 10,000"
    ):
        room.check(0)
    room.release(300)
    assert room.limit(3560) == 3560
    room.check(0)
    assert room.limit(0) == 1000
    assert room.limit(1 << 40) == 10_000


def test_request_waits_until_what_runs_has_left_room() -> None:
    room = budget()
    assert room.acquire(400, lambda: False)
    taken = threading.Event()

    def second() -> None:
        if room.acquire(400, lambda: False):
            taken.set()

    waiting = threading.Thread(target=second)
    waiting.start()
    assert not taken.is_set()
    room.release(400)
    waiting.join()
    assert taken.is_set()


def test_cancelled_request_stops_waiting() -> None:
    room = budget()
    assert room.acquire(400, lambda: False)
    gave_up = threading.Event()
    results: list[bool] = []
    waiting = threading.Thread(target=lambda: results.append(room.acquire(400, gave_up.is_set)))
    waiting.start()
    gave_up.set()
    room.wake()
    waiting.join()
    assert results == [False]
