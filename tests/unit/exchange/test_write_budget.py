"""The bucket of a day's writes, under any clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnet.exchange.write_budget import DAY_S, BudgetState, WriteBudget, Writing

NOON_S = 20_000 * DAY_S + DAY_S / 2
DAY_BYTES = 864_000


def test_it_begins_full_and_what_is_kept_is_taken_from_it() -> None:
    budget = WriteBudget(DAY_BYTES, NOON_S)
    budget.spend(4_000, Writing.KEPT, NOON_S)
    assert budget.left_bytes(NOON_S) == DAY_BYTES - 4_000
    assert budget.state(NOON_S).kept_bytes == 4_000


def test_it_fills_steadily_and_never_beyond_a_day() -> None:
    budget = WriteBudget(DAY_BYTES, NOON_S)
    budget.spend(DAY_BYTES, Writing.KEPT, NOON_S)
    assert budget.left_bytes(NOON_S) == 0
    assert budget.left_bytes(NOON_S + 60) == pytest.approx(600, abs=1)
    assert budget.left_bytes(NOON_S + 30 * DAY_S) == DAY_BYTES


def test_what_a_prompt_fetches_is_never_refused_and_owes_a_day_at_most() -> None:
    budget = WriteBudget(DAY_BYTES, NOON_S)
    budget.spend(50 * DAY_BYTES, Writing.FETCHED, NOON_S)
    assert budget.left_bytes(NOON_S) == 0
    assert budget.state(NOON_S).fetched_bytes == 50 * DAY_BYTES
    assert budget.left_bytes(NOON_S + DAY_S) == 0
    assert budget.left_bytes(NOON_S + 2 * DAY_S) == DAY_BYTES


def test_what_its_owner_asks_for_by_name_is_counted_and_leaves_the_bucket_alone() -> None:
    budget = WriteBudget(DAY_BYTES, NOON_S)
    budget.spend(10**12, Writing.NAMED, NOON_S)
    assert budget.left_bytes(NOON_S) == DAY_BYTES
    assert budget.state(NOON_S).named_bytes == 10**12


def test_the_figures_of_a_day_end_with_it() -> None:
    budget = WriteBudget(DAY_BYTES, NOON_S)
    budget.spend(4_000, Writing.KEPT, NOON_S)
    tomorrow = budget.state(NOON_S + DAY_S)
    assert (tomorrow.kept_bytes, tomorrow.day) == (0, 20_001)


def test_a_clock_set_back_gives_nothing_and_takes_nothing_and_the_bucket_goes_on_filling() -> None:
    budget = WriteBudget(DAY_BYTES, NOON_S)
    budget.spend(DAY_BYTES, Writing.KEPT, NOON_S)
    year_ago_s = NOON_S - 365 * DAY_S
    assert budget.left_bytes(year_ago_s) == 0
    assert budget.left_bytes(year_ago_s + DAY_S / 2) == pytest.approx(DAY_BYTES / 2, abs=1)


def test_a_state_from_the_future_is_taken_as_of_now() -> None:
    saved = BudgetState(1_000.0, NOON_S + 9 * DAY_S)
    budget = WriteBudget(DAY_BYTES, NOON_S, state=saved)
    assert budget.left_bytes(NOON_S) == 1_000
    assert budget.left_bytes(NOON_S + 60) == pytest.approx(1_600, abs=1)


def test_a_restart_changes_nothing_and_a_smaller_setting_holds_at_once() -> None:
    saved: list[BudgetState] = []
    budget = WriteBudget(DAY_BYTES, NOON_S, save=saved.append)
    budget.spend(4_000, Writing.KEPT, NOON_S)
    again = WriteBudget(DAY_BYTES, NOON_S, state=saved[-1])
    assert again.state(NOON_S) == budget.state(NOON_S)
    assert WriteBudget(500, NOON_S, state=saved[-1]).left_bytes(NOON_S) == 500
    assert WriteBudget(0, NOON_S, state=saved[-1]).left_bytes(NOON_S) == 0


def test_nothing_written_is_nothing_saved() -> None:
    saved: list[BudgetState] = []
    WriteBudget(DAY_BYTES, NOON_S, save=saved.append).spend(0, Writing.KEPT, NOON_S)
    assert not saved


@given(
    st.lists(
        st.tuples(
            st.floats(-3 * DAY_S, 3 * DAY_S, allow_nan=False),
            st.integers(0, 3 * DAY_BYTES),
            st.sampled_from(Writing),
        ),
        max_size=30,
    )
)
def test_whatever_the_clock_does_no_more_is_kept_than_what_filled_the_bucket(
    steps: list[tuple[float, int, Writing]],
) -> None:
    now_s = NOON_S
    budget = WriteBudget(DAY_BYTES, now_s)
    kept, forward_s = 0, 0.0
    for step_s, n_bytes, writing in steps:
        before = budget.state(now_s).left_bytes
        now_s += step_s
        forward_s += max(0.0, step_s)
        after = budget.state(now_s).left_bytes
        assert -1 <= after - before <= max(0.0, step_s) * DAY_BYTES / DAY_S + 1
        if writing is not Writing.KEPT or n_bytes <= budget.left_bytes(now_s):
            budget.spend(n_bytes, writing, now_s)
            kept += n_bytes if writing is Writing.KEPT else 0
        assert -DAY_BYTES <= budget.state(now_s).left_bytes <= DAY_BYTES
    assert kept <= DAY_BYTES + forward_s * DAY_BYTES / DAY_S + len(steps)
