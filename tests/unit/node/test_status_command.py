"""What ``kvnet status`` shows."""

from kvnet_node.commands.node import render_status
from kvnet_node.operations.requests import StatusResult


def test_counters_are_shown_to_who_asks_for_them() -> None:
    result = StatusResult(
        running=True, data_dir="d", version="1", publisher="p", peer="12D3", policy="trusted", artifacts=0,
        held_bytes=0, quota_bytes=1, pid=7, counters={"tables_bytes": 2006},
    )  # fmt: skip
    assert "tables bytes" not in render_status(result)
    assert "tables bytes    2,006" in render_status(result, counted=True)
