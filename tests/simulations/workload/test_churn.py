import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from simulations.scenario import Scenario
from simulations.scenario_files import parse
from simulations.workload.churn import Absence, Change, _apart
from simulations.workload.work import Work, prepare

DAY_S = 86_400.0


def scenario(**churn: Any) -> Scenario:
    return parse(
        {
            "name": "test",
            "title": "a test",
            "model": "qwen3-8b",
            "machines": [
                {"count": 10, "chip": "m4", "link": "wifi", "laptop": True},
                {"count": 10, "chip": "m4", "link": "wifi"},
            ],
            "workload": {"kind": "office", "requests": 2000, "days": 3.0, "documents": 10},
            "churn": churn,
        }
    )


ALL = {
    "late": 0.3, "leave": 0.3, "crashes_a_day": 2.0, "down_s": 3000.0, "sleeps_a_day": 5.0, "asleep_s": 3600.0,
    "nights": True,
}  # fmt: skip


def there(work: Work) -> dict[int, list[tuple[float, float]]]:
    """From when until when each node is there."""
    found: dict[int, list[tuple[float, float]]] = {}
    since: dict[int, float] = {}
    for change in work.changes:
        if change.kind in {Change.JOIN, Change.WAKE}:
            assert change.node not in since
            since[change.node] = change.at_s
        else:
            found.setdefault(change.node, []).append((since.pop(change.node), change.at_s))
    for node, at_s in since.items():
        found.setdefault(node, []).append((at_s, math.inf))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_every_request_reaches_a_node_that_is_there(seed: int) -> None:
    work = prepare(scenario(**ALL), seed)
    present = there(work)
    for request in work.stream:
        assert any(begin_s <= request.arrival_s <= end_s for begin_s, end_s in present[request.node])


def test_no_request_is_lost_and_turns_stay_in_order() -> None:
    work = prepare(scenario(**ALL), 0)
    assert len(work.stream) == 2000
    assert (np.diff(work.stream.arrival_s) >= 0).all()
    last: dict[int, int] = {}
    for request in work.stream:
        assert request.n_input > last.get(request.session, 0)
        last[request.session] = request.n_input


def test_without_churn_everybody_joins_at_the_beginning_and_stays() -> None:
    work = prepare(scenario(), 0)
    assert [(change.at_s, change.kind) for change in work.changes] == [(0.0, Change.JOIN)] * 20


def test_laptops_alone_sleep() -> None:
    work = prepare(scenario(sleeps_a_day=3.0, nights=True), 0)
    asleep = {change.node for change in work.changes if change.kind is Change.SLEEP}
    assert asleep == set(range(10))
    nights = [change.at_s % DAY_S for change in work.changes if change.kind is Change.SLEEP]
    assert any(at_s == 0 or at_s > 18 * 3600 for at_s in nights)


def test_one_seed_gives_one_schedule() -> None:
    assert prepare(scenario(**ALL), 1).changes == prepare(scenario(**ALL), 1).changes
    assert prepare(scenario(**ALL), 1).changes != prepare(scenario(**ALL), 2).changes


def test_where_all_leave_what_would_be_asked_then_is_not_asked() -> None:
    work = prepare(scenario(leave=1.0), 0)
    assert 0 < len(work.stream) < 2000
    left = {change.node: change.at_s for change in work.changes if change.kind is Change.LEAVE}
    assert all(request.arrival_s < left[request.node] for request in work.stream)


def test_absences_that_touch_are_one_and_a_crash_in_it_counts() -> None:
    drawn = [Absence(10, 20, Change.SLEEP), Absence(15, 30, Change.CRASH), Absence(50, 60, Change.SLEEP)]
    assert _apart(drawn, 0, 100) == (Absence(10, 30, Change.CRASH), Absence(50, 60, Change.SLEEP))
    assert _apart(drawn, 12, 55) == (Absence(15, 30, Change.CRASH),)
    apart = _apart([Absence(at, at + 3, Change.SLEEP) for at in range(0, 100, 2)], 0, 1000)
    assert all(before.end_s < after.begin_s for before, after in pairwise(apart))
