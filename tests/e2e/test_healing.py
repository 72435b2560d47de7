"""Three nodes that know one address between them, and what happens when each of them goes and comes back."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvnet.format.hashes import artifact_text
from tests.e2e.conftest import Kvnet, Ran
from tests.e2e.prepared import prepare
from tests.e2e.test_swarms import fetched as fetched_by_hash
from tests.e2e.test_swarms import hold, invited
from tests.unit.store.samples import FRIEND, Sample, sample

pytestmark = [pytest.mark.e2e, pytest.mark.loopback]

INTERVAL_S = 15.0
"""What a round of twelve names takes at the pace of announcing."""
SLACK_S = 45.0
"""A bootstrap peer is dialled again after half a minute at most; and a busy machine takes its time for each process."""
ADDED = [sample(range(start, start + 300), key=FRIEND) for start in (1, 1001, 2001)]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Kvnet]]:
    """Members a, b, c and d; a holds everything."""
    made = [Kvnet(tmp_path / name) for name in "abcd"]
    for node in made:
        prepare(node, tmp_path, *(ADDED if node is made[0] else ()), trusts=FRIEND)
        node.environment["KVNET_ANNOUNCE_INTERVAL_S"] = str(INTERVAL_S)
    yield made
    for node in made:
        node.end()


def fetched(node: Kvnet, artifact: Sample) -> bool:
    """Whether a node gets an artifact by its name alone, from whoever it finds, within an interval and the slack."""
    until = time.monotonic() + INTERVAL_S + SLACK_S
    ran: Ran | None = None
    while time.monotonic() < until:
        ran = node("--json", "fetch", artifact_text(artifact.hash))
        if ran.code == 0:
            return bool(ran.result["complete"])
        assert ran.error["code"] == "not_found", ran.stderr
    return False


@pytest.mark.nightly
def test_nodes_that_share_one_bootstrap_address_find_each_other_whoever_restarts(
    nodes: list[Kvnet], tmp_path: Path
) -> None:
    a, b, c, d = nodes
    hub = b.start()[0]["addresses"][0]
    first = a.start("--bootstrap", hub)[0]["addresses"][0]
    c.start("--bootstrap", hub)
    assert fetched(c, ADDED[0])

    # The provider comes back on another port.
    a.json("node", "stop")
    second = a.start("--bootstrap", hub)[0]["addresses"][0]
    assert second != first
    assert fetched(c, ADDED[1])

    # The bootstrap node loses everything, its key and its namespace included.
    b.json("node", "stop")
    fresh = Kvnet(tmp_path / "fresh")
    try:
        host, port = hub.split("/")[2], hub.split("/")[4]
        new_hub = fresh.start("--listen", f"{host}:{port}")[0]["addresses"][0]
        assert new_hub.split("/")[:5] == hub.split("/")[:5]
        assert new_hub != hub
        d.environment["KVNET_NETWORK_BOOTSTRAP"] = new_hub
        assert fetched(d, ADDED[2])
    finally:
        fresh.end()


def test_a_hub_that_lost_everything_joins_anew_and_meanwhile_nobody_lost_anybody(
    kvnet: Kvnet, other: Kvnet, tmp_path: Path
) -> None:
    first = artifact_text(hold(kvnet, range(600)))
    kvnet.start()
    other.start()
    hub, fresh = Kvnet(tmp_path / "hub"), Kvnet(tmp_path / "fresh")
    try:
        hub.start()
        hub.json("join", invited(kvnet, "--device"))
        other.json("join", invited(hub, "--device"))
        assert fetched_by_hash(other, first)["complete"] is True
        # The hub is gone for good; the founder comes back at another port, and both know each other by now.
        hub.json("node", "stop")
        kvnet.json("node", "stop")
        second = artifact_text(hold(kvnet, range(2000, 2600)))
        kvnet.start()
        assert fetched_by_hash(other, second)["complete"] is True
        fresh.start()
        fresh.json("join", invited(kvnet, "--device"))
        assert fetched_by_hash(fresh, second)["complete"] is True
    finally:
        hub.end()
        fresh.end()
