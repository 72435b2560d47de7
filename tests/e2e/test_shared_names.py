"""What members share is listed and fetched by the names that its publishers gave, and nobody else learns of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvnet.exchange.contexts import document_context, encode_context
from kvnet.format.hashes import artifact_text
from kvnet.store.disk import DiskStore
from kvnet.store.names import NameBook
from kvnet_node.identity import NodeIdentity
from kvnet_node.paths import prepare_data_dir
from tests.e2e.conftest import Kvnet
from tests.e2e.test_fetching import NARROW
from tests.unit.store.samples import publish, sample

pytestmark = [pytest.mark.e2e, pytest.mark.loopback]

CONTEXT = encode_context(document_context("The keeper notes wind and tide.", {}))


@pytest.fixture
def third(tmp_path: Path) -> Iterator[Kvnet]:
    runner = Kvnet(tmp_path / "third")
    yield runner
    runner.end()


def added(kvnet: Kvnet, name: str, tokens: range = range(600)) -> str:
    """A named context of this node, as ``kvnet add`` makes it, without a model."""
    paths = prepare_data_dir(kvnet.data_dir)
    identity = NodeIdentity(paths, "trusted")
    identity.load()
    made = sample(
        tokens, context=CONTEXT, key=identity.signing_key(), namespace=identity.namespaces()[0], fingerprint=NARROW
    )
    store = DiskStore.open(paths.store_dir, quota_bytes=1 << 30, min_free_bytes=0, keys_of=identity.keys_of)
    publish(store, made, pinned=True)
    store.close()
    NameBook(paths.names_dir).add(
        name,
        artifact=made.hash,
        model="tiny",
        fingerprint=NARROW.hash,
        context=CONTEXT,
        file_order=(),
        created_s=1_800_000_000,
    )
    return artifact_text(made.hash)


def offered(kvnet: Kvnet, *names: str) -> dict[str, dict[str, Any]]:
    """What members hold by name, once exactly these are there."""
    seen = kvnet.until(lambda found: sorted(e["name"] for e in found["offered"]) == sorted(names), "list", "--peers")
    return {each["name"]: each for each in seen["offered"]}


def test_a_colleague_lists_and_fetches_by_name_and_a_stranger_learns_nothing(
    kvnet: Kvnet, other: Kvnet, third: Kvnet
) -> None:
    added(kvnet, "project")
    secret = added(kvnet, "diary", range(1000, 1700))
    for node in (kvnet, other, third):
        node.start()
    invitation = kvnet.json("invite", "--colleague", "--swarm", "team", "--name", "bob")["invitation"]
    assert other.json("join", invitation)["swarm"] == "team"
    shared = kvnet("share", "project", "--to", "team")
    assert shared.code == 0, shared.stderr
    assert "kvnet fetch project" in shared.stderr

    entry = offered(other, "project")["project"]
    assert (entry["swarm"], entry["tokens"], entry["version"], entry["here"]) == ("team", 600, 1, False)
    assert entry["signer"] == kvnet.json("key", "show")["publisher"]
    assert [each["state"] for each in entry["holders"]] == ["serving"]
    assert entry["refused"] == ""
    shown = other("list", "--peers")
    assert "project@1" in shown.stdout
    assert other.typed("fetch NAME") in shown.stderr

    unknown = other("fetch", "projct")
    assert (unknown.code, "did you mean project?" in unknown.stderr) == (2, True)
    nameless = other("fetch", entry["artifact"])
    assert f"next: {other.typed('fetch ' + entry['artifact'])} --name project" in nameless.stderr
    fetched = other.json("fetch", "project")
    assert (fetched["artifact"], fetched["name"], fetched["complete"]) == (entry["artifact"], "project", True)
    again = other.json("fetch", "project")
    assert (again["fetched_chunks"], again["suggested"]) == (0, ""), "which changes nothing"
    assert fetched["signer_name"] == entry["signed_by"] == other.json("show", "project")["signer_name"]
    assert [each["names"] for each in other.json("list")["artifacts"]] == [["project@1"]]
    assert offered(other, "project")["project"]["here"] is True

    # What is in mine alone is told to nobody in the team, and nothing to who is in no swarm.
    assert other("fetch", "diary").code == 2
    assert secret not in other("--json", "list", "--peers", "--all").stdout
    address = kvnet.json("node", "status")["addresses"][0]
    assert third.json("peers", address)["peers"][0]["member"] is False
    assert third.json("list", "--peers")["offered"] == []
    assert third("fetch", "project", "--from", address).code == 2

    # Who left is not taken for somebody to fetch from, and who was removed learns it wherever it looks.
    kvnet.json("node", "stop")
    other.until(lambda found: [each["state"] for each in holders(found)] == ["away"], "list", "--peers")
    (away,) = other.json("peers")["away"]
    assert away["seen"] > 0
    assert other("rm", "project", "--yes").code == 0
    unreached = other("fetch", "project")
    assert unreached.code == 60
    assert f"{away['name']} (seen " in unreached.stderr
    assert "holds it and is away" in unreached.stderr
    assert "bootstrap" not in unreached.stderr
    kvnet.start()
    other.until(lambda found: [each["state"] for each in holders(found)] == ["serving"], "list", "--peers")
    assert "expected a swarm of this node, found 'nosuch'" in other("leave", "nosuch").stderr
    kvnet.json("swarm", "remove", "bob", "--swarm", "team", "--yes")
    other.watch(lambda found: found["removed"] == ["team"], "status")
    for verb in (("status",), ("peers",), ("list", "--peers"), ("swarm", "list")):
        told = other(*verb)
        assert "this machine was removed from team" in told.stderr, verb
        assert "project" not in told.stdout, verb
    for target in ("project", entry["artifact"]):
        assert "this machine was removed from team" in other("fetch", target).stderr
    late = other("share", "project", "--to", "team")
    assert (late.code, "which it was removed from" in late.stderr) == (2, True)
    assert "had removed this machine before" in other("leave", "team", "--yes").stderr


def holders(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The machines that hold what is listed."""
    return [holder for entry in found["offered"] for holder in entry["holders"]]


@pytest.mark.nightly
def test_a_name_of_a_peer_replaces_none_here_and_one_given_twice_names_the_candidates(
    kvnet: Kvnet, other: Kvnet, third: Kvnet
) -> None:
    theirs = added(kvnet, "notes"), added(third, "notes", range(2000, 2700))
    mine = added(other, "plan", range(3000, 3600))
    added(kvnet, "plan", range(4000, 4600))
    for node in (kvnet, other, third):
        node.start()
    for node in (other, third):
        node.json("join", kvnet.json("invite", "--device")["invitation"], "--keep-old")
    # What was added to the old namespaces is in those; the founder's is in the one that all are in now.
    assert offered(other, "notes", "plan")["plan"]["swarm"] == "mine"
    taken = other("fetch", "plan")
    assert taken.code == 2
    assert "means something else on this machine" in taken.stderr
    assert "fetch plan --name plan makes it the newest version" in taken.stderr
    assert other.json("show", "plan")["artifact"] == mine
    assert other.json("fetch", "plan", "--name", "their-plan")["name"] == "their-plan"
    assert other.json("fetch", "notes")["artifact"] == theirs[0]

    swarm = kvnet.json("invite", "--colleague", "--swarm", "team", "--uses", "2")["invitation"]
    for node in (other, third):
        node.json("join", swarm)
    kvnet.json("share", "notes", "--to", "team")
    third.json("share", "notes", "--to", "team")
    other.until(
        lambda found: sum(e["name"] == "notes" for e in found["offered"]) >= 2, "list", "--peers", "--swarm", "team"
    )
    twice = other("fetch", "notes", "--name", "both")
    assert twice.code == 2
    assert "found 2" in twice.stderr
    assert twice.stderr.count("notes@1 of") == 2


def added_again(kvnet: Kvnet, name: str, tokens: range) -> str:
    """A new version, added while the node does not run; it tells of it when it starts."""
    kvnet.json("node", "stop")
    artifact = added(kvnet, name, tokens)
    kvnet.start()
    return artifact


@pytest.mark.nightly
def test_a_new_version_of_what_was_fetched_by_name_becomes_the_next_one_here(kvnet: Kvnet, other: Kvnet) -> None:
    first = added(kvnet, "notes")
    for node in (kvnet, other):
        node.start()
    other.json("join", kvnet.json("invite", "--device")["invitation"])
    offered(other, "notes")
    assert other.json("fetch", "notes")["artifact"] == first
    second = added_again(kvnet, "notes", range(700))
    other.until(lambda found: [e["version"] for e in found["offered"]] == [2], "list", "--peers")
    fetched = other("fetch", "notes")
    assert fetched.code == 0, fetched.stderr
    assert "notes@2 now; notes@1 remains" in fetched.stderr
    assert other.json("show", "notes")["artifact"] == second
    assert other.json("show", "notes@1")["artifact"] == first
    assert other.json("fetch", "notes")["fetched_chunks"] == 0
    # One of its own is never replaced, whoever else calls something so.
    mine = added_again(other, "notes", range(5000, 5600))
    taken = other("fetch", "notes")
    assert (taken.code, "means something else on this machine" in taken.stderr) == (2, True)
    assert other.json("show", "notes")["artifact"] == mine


def test_a_name_on_a_machine_that_knows_nobody_is_refused_with_how_to_join(kvnet: Kvnet) -> None:
    kvnet.start()
    refused = kvnet("fetch", "notes")
    assert (refused.code, "in no swarm" in refused.stderr) == (2, True)
    assert kvnet.typed("join -") in refused.stderr
    assert "kvnet invite --device" in refused.stderr


def test_the_list_of_members_needs_a_running_node(kvnet: Kvnet) -> None:
    ran = kvnet("list", "--peers")
    assert (ran.code, kvnet.typed("node start") in ran.stderr) == (2, True)
    assert kvnet("list", "--swarm", "team").code == 2
