"""Machines and colleagues that find each other by invitations alone."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvnet.format.hashes import ArtifactHash, artifact_text
from kvnet.store.disk import DiskStore
from kvnet_node.identity import NodeIdentity
from kvnet_node.paths import prepare_data_dir
from tests.e2e.conftest import Kvnet
from tests.e2e.test_fetching import NARROW
from tests.unit.store.samples import publish, sample

pytestmark = [pytest.mark.e2e, pytest.mark.loopback]

PATIENCE_S = 30.0


@pytest.fixture
def third(tmp_path: Path) -> Iterator[Kvnet]:
    runner = Kvnet(tmp_path / "third")
    yield runner
    runner.end()


def hold(kvnet: Kvnet, tokens: range = range(600)) -> ArtifactHash:
    """Put an artifact into a data directory as ``kvnet add`` would, without a model."""
    paths = prepare_data_dir(kvnet.data_dir)
    identity = NodeIdentity(paths, "trusted")
    identity.load()
    made = sample(tokens, key=identity.signing_key(), namespace=identity.namespaces()[0], fingerprint=NARROW)
    store = DiskStore.open(paths.store_dir, quota_bytes=1 << 30, min_free_bytes=0, keys_of=identity.keys_of)
    publish(store, made, pinned=True)
    store.close()
    return made.hash


def fetched(kvnet: Kvnet, artifact: str) -> dict[str, object]:
    """Fetch by hash alone, as soon as a peer that has it is connected."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        ran = kvnet("--json", "fetch", artifact)
        if ran.code == 0 or time.monotonic() > deadline:
            return ran.result


def invited(kvnet: Kvnet, *arguments: str) -> str:
    text: str = kvnet.json("invite", *arguments)["invitation"]
    return text


def test_what_one_machine_added_is_found_by_one_that_met_another_alone(
    kvnet: Kvnet, other: Kvnet, third: Kvnet
) -> None:
    artifact = artifact_text(hold(kvnet))
    kvnet.start()
    other.start()
    joined = other.json("join", invited(kvnet, "--device"), "--name", "bob")
    assert (joined["changed"], joined["running"], joined["role"]) == (True, True, "device")
    third.start()
    assert third.json("join", invited(other, "--device"), "--name", "cat")["swarm"] == "mine"
    result = fetched(third, artifact)
    assert result["complete"] is True
    labels = {member["label"] for member in third.json("swarm", "members")["members"]}
    assert {"bob", "cat"} < labels
    assert len(labels) == 3
    # Both ends go and come back at other ports, without a word from anybody.
    for node in (kvnet, third):
        node.json("node", "stop")
    late = artifact_text(hold(kvnet, range(2000, 2600)))
    for node in (kvnet, third):
        node.start()
    assert fetched(third, late)["complete"] is True
