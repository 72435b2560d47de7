"""Artifacts that are on disk already: tickets, short hashes, restarts, containers and pins, without any model."""

from pathlib import Path

import pytest

from kvnet.format.hashes import artifact_text, short_text
from kvnet.format.ticket import Ticket, format_ticket
from tests.e2e.conftest import Kvnet
from tests.e2e.prepared import prepare
from tests.unit.store.samples import FRIEND, OWN, sample

pytestmark = pytest.mark.e2e

SAMPLE = sample(range(1500), key=FRIEND)


def test_an_ambiguous_short_hash_is_a_usage_error_that_names_what_it_fits(kvnet: Kvnet, tmp_path: Path) -> None:
    # Two artifacts that differ in the second they were made, found by search: their hashes begin alike.
    one, other = (sample(range(20), created=created) for created in (1_800_013_965, 1_800_722_972))
    assert short_text(one.hash) == short_text(other.hash), "search again: the format has changed"
    prepare(kvnet, tmp_path, one, other, trusts=OWN)
    for verb in ("show", "rm"):
        ran = kvnet("--json", verb, short_text(one.hash))
        assert (ran.code, ran.stdout) == (2, "")
        assert ran.error["code"] == "ambiguous_hash"
        assert artifact_text(one.hash) in ran.stderr
        assert artifact_text(other.hash) in ran.stderr
    assert kvnet.json("show", short_text(one.hash, 12))["artifact"] == artifact_text(one.hash)
    assert len(kvnet.json("list")["artifacts"]) == 2


@pytest.mark.loopback
def test_a_ticket_is_all_that_is_needed_and_a_restarted_node_still_has_what_it_fetched(
    kvnet: Kvnet, other: Kvnet, tmp_path: Path
) -> None:
    prepare(kvnet, tmp_path, SAMPLE, trusts=FRIEND)
    prepare(other, tmp_path, trusts=FRIEND)
    started, _ = kvnet.start()
    other.start()
    ticket = format_ticket(Ticket(SAMPLE.hash, tuple(started["addresses"])))
    assert kvnet.json("show", artifact_text(SAMPLE.hash))["ticket"] == ticket
    fetched = other.json("fetch", ticket)
    assert (fetched["complete"], fetched["fetched_chunks"]) == (True, fetched["chunks"])
    assert fetched["providers"][0]["bytes"] == fetched["bytes"] == fetched["fetched_bytes"]
    kvnet.json("node", "stop")
    other.json("node", "stop")
    again, _ = other.start()
    assert other.json("fetch", ticket)["fetched_chunks"] == 0
    assert other.json("verify")["chunks"] == fetched["chunks"]
    # It serves on what it fetched, with the publisher gone.
    kvnet.json("rm", artifact_text(SAMPLE.hash))
    back = kvnet.json("fetch", artifact_text(SAMPLE.hash), "--from", again["addresses"][0])
    assert [provided["peer"] for provided in back["providers"]] == [again["peer"]]


def test_half_a_ticket_is_a_usage_error(kvnet: Kvnet) -> None:
    address = "/ip4/127.0.0.1/tcp/5864/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
    ticket = format_ticket(Ticket(SAMPLE.hash, (address,)))
    ran = kvnet("fetch", ticket[: len(ticket) // 2])
    assert (ran.code, ran.stdout) == (2, "")
    assert ran.stderr.startswith("error: ")


def test_a_rebuilt_index_lists_everything_and_keeps_the_pins(kvnet: Kvnet, tmp_path: Path) -> None:
    artifacts = [sample(range(300 + n), key=FRIEND) for n in range(3)]
    prepare(kvnet, tmp_path, *artifacts, trusts=FRIEND)
    kvnet.json("unpin", artifact_text(artifacts[0].hash))
    before = kvnet.json("list")["artifacts"]
    assert [entry["pinned"] for entry in before] == [True, True, False]
    for index in (kvnet.data_dir / "store").glob("index*"):
        index.unlink()
    rebuilt = kvnet.json("store", "rebuild")
    assert (rebuilt["artifacts"], rebuilt["refused"]) == (3, [])
    assert kvnet.json("list")["artifacts"] == before
    assert kvnet.json("verify")["bad_chunks"] == []
    over = kvnet("--json", "gc", "--all", KVNET_STORE_QUOTA_BYTES="1kB")
    assert (over.code, over.lines[-1]["removed"]) == (50, [artifact_text(artifacts[0].hash)]), "told, with what went"
    assert "expected at most 1.00 kB in the store, found" in over.error["message"]
    assert over.error["message"].endswith("artifacts pinned: 2 of 2")
    assert kvnet.json("gc", "--all")["removed"] == []


def test_a_damaged_chunk_is_found_named_and_fetched_again(kvnet: Kvnet, other: Kvnet, tmp_path: Path) -> None:
    prepare(kvnet, tmp_path, SAMPLE, trusts=FRIEND)
    prepare(other, tmp_path, SAMPLE, trusts=FRIEND)
    (pack,) = (kvnet.data_dir / "store").rglob("*.kva")
    content = bytearray(pack.read_bytes())
    at = content.index(SAMPLE.chunks[3])
    content[at] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(content)
    verified = kvnet("--json", "verify")
    assert verified.code == 20
    assert verified.lines[-1]["bad_chunks"] == [f"{artifact_text(SAMPLE.hash)}/3"]
    again = kvnet("verify")
    assert again.code == 20, "what is pinned is still not whole"
    assert kvnet.typed(f"fetch {artifact_text(SAMPLE.hash)}") in again.stderr
    started, _ = other.start()
    mended = kvnet.json("fetch", artifact_text(SAMPLE.hash), "--from", started["addresses"][0])
    assert (mended["complete"], mended["fetched_chunks"]) == (True, 1)
    assert kvnet.json("verify")["bad_chunks"] == []


def test_a_scrub_finds_damage_and_mends_it_from_a_peer(kvnet: Kvnet, other: Kvnet, tmp_path: Path) -> None:
    prepare(kvnet, tmp_path, SAMPLE, trusts=FRIEND)
    prepare(other, tmp_path, SAMPLE, trusts=FRIEND)
    (pack,) = (kvnet.data_dir / "store").rglob("*.kva")
    content = bytearray(pack.read_bytes())
    content[content.index(SAMPLE.chunks[3])] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(content)
    started, _ = other.start()
    kvnet.start("--bootstrap", started["addresses"][0])
    kvnet.json("peers", started["addresses"][0])
    scrubbed = kvnet.json("store", "scrub")
    assert (scrubbed["bad_chunks"], scrubbed["repaired"], scrubbed["damaged"]) == (1, [artifact_text(SAMPLE.hash)], [])
    again = kvnet.json("store", "scrub")
    assert (again["bad_chunks"], again["chunks"]) == (0, len(SAMPLE.chunks))


def test_a_scrub_that_can_mend_nothing_names_what_is_damaged(kvnet: Kvnet, tmp_path: Path) -> None:
    prepare(kvnet, tmp_path, SAMPLE, trusts=FRIEND)
    (pack,) = (kvnet.data_dir / "store").rglob("*.kva")
    content = bytearray(pack.read_bytes())
    content[content.index(SAMPLE.chunks[3])] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(content)
    scrubbed = kvnet("store", "scrub")
    assert scrubbed.code == 20
    assert f"damaged: {artifact_text(SAMPLE.hash)}" in scrubbed.stdout
    assert kvnet.typed("add") in scrubbed.stderr


@pytest.mark.loopback
def test_a_result_on_stdout_is_one_json_object_and_nothing_else(kvnet: Kvnet, other: Kvnet, tmp_path: Path) -> None:
    prepare(kvnet, tmp_path, SAMPLE, trusts=FRIEND)
    prepare(other, tmp_path, trusts=FRIEND)
    started, _ = kvnet.start()
    before = other("--json", "--quiet", "fetch", artifact_text(SAMPLE.hash), "--from", started["addresses"][0])
    assert [line["type"] for line in before.lines] == ["fetch"]
    loud = other("fetch", artifact_text(SAMPLE.hash), "--json")
    assert loud.lines[-1]["type"] == "fetch"
    assert all(isinstance(line, dict) for line in loud.lines)
