"""The simulator against real nodes: processes on loopback with the toy engine, whose prefill takes as long as told."""

from pathlib import Path

import numpy as np
import pytest

from tests.simulations.validation.swarm import Plan, real, simulated

pytestmark = [pytest.mark.e2e, pytest.mark.loopback]

MOST_SLOWER = 1.4
"""Times that cold prompts may take as long as simulated; on a busier machine nodes fetch less, and rightly so."""

# One provider a fetch, so that nothing comes twice; prefill takes seconds, so that a busy machine fetches in time, too.
ASKED = [(0, 0, 0), (1, 0, 1), (1, 0, 2), (2, 1, 3), (0, 1, 4)]
SMALL = Plan(3, ASKED, [1500, 1600], prefill_s=0.003, upload_bytes_s=4_000_000)


def eight() -> Plan:
    """Each of eight texts is computed at one node, fetched by another, and half of them are asked about again there."""
    first = [(number, number) for number in range(8)]
    second = [((number + 3) % 8, number) for number in range(8)]
    visits = [*first, *second, *second[:4]]
    asked = [(node, document, number) for number, (node, document) in enumerate(visits)]
    return Plan(8, asked, [1700 + 100 * number for number in range(8)], prefill_s=0.006, upload_bytes_s=80_000)


def test_three_nodes_reuse_what_the_simulator_says(tmp_path: Path) -> None:
    expected, found = simulated(SMALL), real(SMALL, tmp_path)
    assert [told.reused_tokens for told in found.told] == expected.hit_tokens.tolist()
    assert found.served_bytes == pytest.approx(expected.total("fetched_bytes"), rel=0.05)
    assert expected.total("peer_tokens") > 0


@pytest.mark.nightly
def test_eight_nodes_take_as_long_as_the_simulator_says(tmp_path: Path) -> None:
    plan = eight()
    expected, found = simulated(plan), real(plan, tmp_path)
    # Warm-ups are over in no time; then each text is computed once, whatever the network does.
    times, expected_s = np.array([told.ttft_s for told in found.told])[8:], expected.requests["ttft_s"][8:]
    slower = float(np.median(times[:8] / expected_s[:8]))
    if slower > MOST_SLOWER:
        pytest.skip(f"what no network was needed for took {slower:.2f} times as long as simulated: the machine is busy")
    assert [told.reused_tokens for told in found.told] == expected.hit_tokens.tolist(), (times / expected_s).round(2)
    assert found.served_bytes == pytest.approx(expected.total("fetched_bytes"), rel=0.05)
    assert np.median(times) == pytest.approx(np.median(expected_s), rel=0.20)
