"""Machines and colleagues that find each other by invitations alone."""

import os
import pty
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from kvnet.format.hashes import ArtifactHash, artifact_text
from kvnet.store.disk import DiskStore
from kvnet.trust.invitation import invitation_text
from kvnet.trust.statements import sign_statement
from kvnet_node.identity import NodeIdentity
from kvnet_node.paths import prepare_data_dir
from tests.e2e.conftest import TIMEOUT_S, Kvnet
from tests.e2e.test_fetching import NARROW
from tests.unit.store.samples import publish, sample
from tests.unit.trust.members import key
from tests.unit.trust.test_invitation import BODY

pytestmark = [pytest.mark.e2e, pytest.mark.loopback]


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
    deadline = time.monotonic() + TIMEOUT_S
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
    bob, _ = other.start()
    invitation = invited(kvnet, "--device")
    own = kvnet("join", invitation)
    assert (own.code, "by this machine" in own.stderr) == (2, True), "and it is not used up by that"
    joined = other.json("join", invitation, "--name", "bob")
    assert len(joined["members"]) == 1, "whom it shares with, not itself"
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
    third.json("node", "stop")
    kvnet.watch(lambda seen: [each["peer"] for each in seen["peers"] if each["member"]] == [bob["peer"]], "peers")
    gone = kvnet("rm", late, "--everywhere", "--yes")
    assert gone.code == 0, gone.stderr
    assert re.search(r"removed from .*bob", gone.stdout)
    assert re.search(r"asleep, .*: .*cat", gone.stdout)


def test_colleagues_share_by_name_and_the_founder_removes_them(kvnet: Kvnet, other: Kvnet) -> None:
    artifact = artifact_text(hold(kvnet))
    kvnet.start()
    made = kvnet.json("invite", "--colleague", "--swarm", "team", "--name", "bob", "--expires", "30m")
    assert (made["swarm"], made["role"], made["made"]) == ("team", "colleague", True)
    # Without a running node the membership is kept for the next start.
    joined = other.json("join", made["invitation"].upper(), "--as", "friends")
    assert (joined["swarm"], joined["running"]) == ("friends", False)
    assert other.json("join", made["invitation"])["changed"] is False
    shared = kvnet.json("share", artifact, "--to", "team")
    assert shared["members"] == 1, "the other one"
    (theirs,) = shared["artifacts"]
    scopes = {each["artifact"]: each["scope"] for each in kvnet.json("list")["artifacts"]}
    assert scopes == {artifact: "mine", theirs: "team"}
    assert "own in team pinned" in kvnet("list").stdout
    assert kvnet.json("show", theirs)["scope"] == "team"
    assert fetched(other, theirs)["complete"] is True
    assert other("fetch", artifact).code == 60
    assert [(each["name"], each["role"], each["members"]) for each in other.json("swarm", "list")["swarms"]] == [
        ("mine", "alone", 1),
        ("friends", "colleague", 2),
    ]
    assert other("swarm", "remove", "bob", "--swarm", "friends").code == 2
    unasked = kvnet("swarm", "remove", "bob", "--swarm", "team")
    assert unasked.code == 2
    assert "swarm remove bob --swarm team --yes" in unasked.stderr
    assert len(kvnet.json("swarm", "members", "team")["members"]) == 2
    removed = kvnet("swarm", "remove", "bob", "--swarm", "team", "--yes")
    assert removed.code == 0
    assert kvnet.typed("revoke kvpub1") in removed.stderr
    assert [each["label"] for each in kvnet.json("swarm", "members", "team")["members"]] != ["bob"]
    again = kvnet.json("share", artifact_text(hold_more(kvnet)), "--to", "team")
    assert other("fetch", again["artifacts"][0]).code == 60
    assert [each["name"] for each in other.json("namespace", "list")["namespaces"]] == ["mine", "friends"]
    assert other.json("leave", "friends", "--yes")["artifacts"] == 1


def hold_more(kvnet: Kvnet) -> ArtifactHash:
    """One more artifact, while the node is away for a moment."""
    kvnet.json("node", "stop")
    artifact = hold(kvnet, range(3000, 3600))
    kvnet.start()
    return artifact


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("invite", "--device"), 2, "running node"),
        (("invite",), 2, "--device or --colleague"),
        (("invite", "--colleague"), 2, "--swarm NAME"),
        (("invite", "--colleague", "--swarm", "mine"), 2, "your own machines share"),
        (("invite", "--device", "--expires", "soon"), 2, "30m, 24h or 7d"),
        (("share", "bafyr4iaaaaaaaa", "--to", "public"), 2, "publish"),
        (("join", "kvinv1aaaa"), 2, "checksum"),
        (("join", "-"), 2, "beginning kvinv1"),
        (("leave", "mine"), 2, "every node has"),
        (("publish", "bafyr4iaaaaaaaa"), 2, "at a terminal"),
        (("publish", "bafyr4iaaaaaaaa", "--yes"), 2, "public.enabled"),
    ],
)
def test_what_cannot_be_is_refused_with_the_next_step(
    kvnet: Kvnet, arguments: tuple[str, ...], code: int, words: str
) -> None:
    ran = kvnet(*arguments)
    assert (ran.code, ran.stdout) == (code, "")
    assert words in ran.stderr


def test_at_a_terminal_nobody_shares_everything_without_saying_yes(kvnet: Kvnet) -> None:
    text = invitation_text(sign_statement(msgspec.structs.replace(BODY, role="device"), key("b")))
    terminal, inside = pty.openpty()
    command = [str(kvnet.command), "--data-dir", str(kvnet.data_dir), "join", text]
    process = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, env=kvnet.environment)
    os.close(inside)
    said, answered = b"", False
    with suppress(OSError):  # the terminal is gone with the process
        while part := os.read(terminal, 4096):
            said += part
            if b"Type yes:" in said and not answered:
                answered = os.write(terminal, b"no\n") > 0
    os.close(terminal)
    assert process.wait(timeout=TIMEOUT_S) == 2
    assert b"conversations too" in said
    assert b"not joined" in said
