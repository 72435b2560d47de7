from collections.abc import Callable

import pytest

from kvnet.errors import ConfigError
from simulations.comparing import by_policy, compare, spread
from simulations.rendering import comparison
from simulations.results import summary
from simulations.scenario_files import load
from tests.simulations.examples import result


def silent(_policy: str, _seed: int) -> Callable[[int, int], None]:
    return lambda _done, _total: None


def test_runs_at_once_are_the_runs_one_after_the_other_in_the_same_order() -> None:
    def digests(jobs: int) -> list[tuple[str, int, str]]:
        runs = compare(load("small"), ["own", "swarm"], [4, 5], silent, jobs=jobs)
        return [(each.policy, each.seed, each.digest) for each, _ in runs]

    one, two = digests(1), digests(2)
    assert one == two
    assert [row[:2] for row in one] == [("own", 4), ("own", 5), ("swarm", 4), ("swarm", 5)]
    assert len({row[2] for row in one}) == 4


def test_a_policy_that_nobody_knows_is_told_before_anything_is_run() -> None:
    asked: list[str] = []

    def report(policy: str, _seed: int) -> Callable[[int, int], None]:
        asked.append(policy)
        return silent("", 0)

    with pytest.raises(ConfigError, match="unknown policy 'best'"):
        next(compare(load("small"), ["own", "best"], [0], report))
    assert not asked


def test_of_several_seeds_the_mean_and_the_range_are_told() -> None:
    found = spread([1.0, 2.0, 6.0])
    assert (found.mean, found.least, found.most, found.half) == (3.0, 1.0, 6.0, 2.5)
    runs = [summary(result("own", seed=seed, speed=speed)) for seed, speed in ((0, 2.0), (1, 4.0))]
    assert {name: len(alike) for name, alike in by_policy(runs).items()} == {"own": 2}
    said = comparison("a title", runs)
    assert "means of seeds 0 to 1" in said
    assert "62.5 % ±12.5 %" in said
    assert "±" not in comparison("a title", runs[:1])
