"""Taking back what was signed: artifacts and keys, with a node running and without."""

import time
from pathlib import Path

import pytest

from kvnet.format.hashes import artifact_text, parse_artifact_text
from kvnet.store.disk import DiskStore
from kvnet.trust.keys import publisher_text
from kvnet.trust.namespace import Namespace
from kvnet.trust.statement_bodies import Attestation
from kvnet.trust.statement_book import StatementBook
from kvnet.trust.statements import sign_statement
from kvnet_node.identity import NodeIdentity
from kvnet_node.paths import DataPaths, prepare_data_dir
from kvnet_node.statement_store import StatementStore
from tests.e2e.conftest import Kvnet
from tests.e2e.prepared import prepare
from tests.e2e.test_fetching import NARROW
from tests.e2e.test_swarms import fetched, invited
from tests.unit.store.samples import FRIEND, OWN, publish, sample

pytestmark = pytest.mark.e2e

TEAM = Namespace("team", bytes([11]) * 32, bytes([12]) * 32)


def signed_here(kvnet: Kvnet, tokens: range, *, namespace: Namespace | None = None) -> str:
    """An artifact in a data directory as ``kvnet add`` would have put it there an hour ago, without a model."""
    identity = identity_of(kvnet)
    created = int(time.time()) - 3600
    namespace = namespace or identity.namespaces()[0]
    made = sample(tokens, key=identity.signing_key(), namespace=namespace, fingerprint=NARROW, created=created)
    store = DiskStore.open(
        DataPaths(kvnet.data_dir).store_dir, quota_bytes=1 << 30, min_free_bytes=0, keys_of=identity.keys_of
    )
    publish(store, made, pinned=True)
    store.close()
    return artifact_text(made.hash)


def attest(kvnet: Kvnet, artifact: str) -> None:
    """Have a friend's word on an artifact in a data directory, as if a member had told it."""
    now_s, namespace = int(time.time()), identity_of(kvnet).namespaces()[0]
    said = sign_statement(
        Attestation(
            sequence=now_s * 1000,
            issued=now_s,
            expires=0,
            namespace=namespace.id,
            artifact=parse_artifact_text(artifact),
            claim="same",
            max_difference="0",
        ),
        FRIEND,
    )
    book = StatementBook()
    [place] = book.take(said, [namespace.id], lambda *_: True).changed
    row = book.row(place)
    assert row is not None
    store = StatementStore(DataPaths(kvnet.data_dir).network_dir / "statements.sqlite3")
    store.write([row], [])
    store.close()


def identity_of(kvnet: Kvnet) -> NodeIdentity:
    identity = NodeIdentity(prepare_data_dir(kvnet.data_dir), "trusted")
    identity.load()
    return identity


def test_an_artifact_is_revoked_for_good_without_a_running_node(kvnet: Kvnet, tmp_path: Path) -> None:
    artifact = signed_here(kvnet, range(600))
    copy = signed_here(kvnet, range(600), namespace=TEAM)
    attest(kvnet, artifact)
    unasked = kvnet("revoke", artifact)
    assert (unasked.code, unasked.stdout) == (2, "")
    assert kvnet.typed(f"revoke {artifact} --yes") in unasked.stderr

    done = kvnet("revoke", artifact, "--yes", "--reason", "made with a broken build")
    assert (done.code, set(done.stdout.split())) == (0, {artifact, copy}), "what was shared of it goes too"
    assert "everybody who hears of it" in done.stderr
    assert "2 artifacts here used and served no more, and kept" in done.stderr
    assert [each["revoked"] for each in kvnet.json("list")["artifacts"]] == [True, True]
    seen = kvnet.json("show", artifact)
    assert (seen["revoked"], seen["verdict"]) == (True, "refused, it is revoked")
    assert seen["revocations"] == ["it, by this machine: made with a broken build"]
    assert seen["attestations"] == [f"{publisher_text(FRIEND.public)} computed the same state"]
    handed_on = kvnet("--json", "export", artifact, "--output", str(tmp_path / "revoked.kva"))
    assert (handed_on.code, (tmp_path / "revoked.kva").exists()) == (30, False)
    again = kvnet("--json", "revoke", artifact, "--yes")
    assert again.code == 2
    assert "revoked already" in again.error["message"]


def test_what_is_not_ones_own_or_not_known_is_not_revoked(kvnet: Kvnet, tmp_path: Path) -> None:
    theirs = sample(range(20), key=FRIEND)
    prepare(kvnet, tmp_path, theirs, trusts=OWN)
    of_others = kvnet("--json", "revoke", artifact_text(theirs.hash), "--yes")
    assert of_others.code == 30
    assert kvnet.typed("key untrust ") + publisher_text(FRIEND.public) in of_others.stderr
    unknown = kvnet("--json", "revoke", publisher_text(FRIEND.public), "--yes")
    assert unknown.code == 2
    assert "nobody here knows" in unknown.stderr
    signing = kvnet("--json", "revoke", identity_of(kvnet).publisher(), "--yes")
    assert signing.code == 2
    assert kvnet.typed("key rotate") in signing.stderr
    # A trusted key: for the own machines alone.
    done = kvnet("revoke", publisher_text(OWN.public), "--yes")
    assert done.code == 0
    assert "this machine and your others, and nobody else" in done.stderr


@pytest.mark.loopback
def test_a_machine_that_slept_honours_a_revocation_and_follows_a_rotated_key(kvnet: Kvnet, other: Kvnet) -> None:
    bad = signed_here(kvnet, range(600))
    kvnet.start()
    other.start()
    other.json("join", invited(kvnet, "--device"), "--name", "bob")
    assert fetched(other, bad)["complete"] is True
    other.json("node", "stop")
    kvnet.watch(lambda seen: not seen["peers"], "peers")
    revoked = kvnet.json("revoke", bad, "--yes")
    assert (revoked["told"], revoked["done"]) == (0, True)
    other.start()
    other.until(lambda seen: seen["revoked"] is True, "show", bad)
    rotated = kvnet.json("key", "rotate")
    assert rotated["told"] == 1
    assert identity_of(kvnet).publisher() == rotated["publisher"] != rotated["old"]
    result = kvnet.json("revoke", rotated["old"], "--yes")
    assert (result["kind"], result["targets"]) == ("publisher", [rotated["old"]])
    seen = other.until(lambda seen: "key that is revoked" in seen["verdict"], "show", bad)
    assert seen["revoked"] is True
    states = {key["publisher"]: key["state"] for key in kvnet.json("key", "list")["keys"]}
    assert states == {rotated["old"]: "revoked", rotated["publisher"]: ""}
    kvnet.json("node", "stop")
    late = signed_here(kvnet, range(2000, 2600))
    kvnet.start()
    assert fetched(other, late)["complete"] is True, "the new key is believed where the old one was"


@pytest.mark.loopback
def test_revoking_the_key_of_a_stolen_machine_removes_the_machine(kvnet: Kvnet, other: Kvnet) -> None:
    kvnet.start()
    other.json("join", invited(kvnet, "--device"), "--name", "laptop")
    stolen = identity_of(other).publisher()
    done = kvnet("revoke", stolen, "--yes")
    assert done.code == 0, done.stderr
    assert "removed from mine: it can find and fetch nothing there any more" in done.stderr
    assert [each["own"] for each in kvnet.json("swarm", "members")["members"]] == [True]
    founder = other("revoke", identity_of(kvnet).publisher(), "--yes")
    assert "STILL A MEMBER of mine: it founded it" in founder.stderr
