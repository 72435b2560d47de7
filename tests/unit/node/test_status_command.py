"""What ``kvnet status`` shows."""

import pytest

from kvnet_node.commands.node import render_status
from kvnet_node.operations.requests import StatusResult


def test_counters_are_shown_to_who_asks_for_them() -> None:
    result = StatusResult(
        running=True, data_dir="d", version="1", publisher="p", peer="12D3", policy="trusted", artifacts=0,
        held_bytes=0, quota_bytes=1, pid=7, counters={"tables_bytes": 2006},
    )  # fmt: skip
    assert "tables bytes" not in render_status(result)
    assert "tables bytes    2,006" in render_status(result, counted=True)


@pytest.mark.parametrize(
    ("model", "said"),
    [("two words", "not on this machine yet: kvnet selftest --model 'two words'"), ("", "not on this machine yet")],
)
def test_the_selftest_that_is_missing_is_named_as_it_can_be_pasted(model: str, said: str) -> None:
    result = StatusResult(
        running=False, data_dir="d", version="1", publisher="p", peer="", policy="trusted", artifacts=0,
        held_bytes=0, quota_bytes=1, model=model,
    )  # fmt: skip
    (line,) = (each for each in render_status(result).splitlines() if each.startswith("reuse verified"))
    assert line.removeprefix("reuse verified").strip() == said
