"""The golden vectors: what the code writes today is what it wrote when they were made."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvnet.format import hashes, prefix
from kvnet.format.fingerprint import config_digest, decode_fingerprint
from kvnet.format.hashes import PrefixKey
from kvnet.format.manifest import decode_manifest
from kvnet.format.ticket import parse_ticket
from scripts import regenerate_vectors as golden

ROOT = Path(__file__).parents[3]


def vector(name: str) -> Any:
    return json.loads((golden.FOLDER / name).read_text())


@pytest.mark.parametrize("name", sorted(golden.all_vectors()))
def test_a_golden_vector_does_not_change_silently(name: str) -> None:
    assert (golden.FOLDER / name).read_bytes() == golden.all_vectors()[name], (
        "the format changed: a new version and a decision record, then scripts/regenerate_vectors.py"
    )


def test_every_golden_vector_is_written_by_the_script() -> None:
    files = {path.name for path in golden.FOLDER.iterdir() if path.is_file()}
    assert files >= set(golden.all_vectors())


def test_the_script_says_that_nothing_would_change() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/regenerate_vectors.py", "--check"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "random"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "0 of 10 files would change\n"), done.stderr


def test_the_script_writes_what_is_missing_and_refuses_other_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(golden, "FOLDER", tmp_path)
    assert golden.main(["--check"]) == 1
    assert not list(tmp_path.iterdir())
    assert golden.main([]) == 0
    assert golden.main(["--check"]) == 0
    assert golden.main(["--force"]) == 2


def test_fingerprint_bytes_and_hash_are_read_back() -> None:
    document = vector("fingerprint.json")
    model = decode_fingerprint(bytes.fromhex(document["document"]))
    assert model == golden.fingerprint()
    assert model.hash.hex() == document["hash"]
    assert config_digest(document["config"]).hex() == document["config_digest"]


def test_prefix_keys_follow_from_the_written_inputs_alone() -> None:
    document = vector("prefix.json")
    root = prefix.prefix_root(
        bytes.fromhex(document["prefix_secret"]), hashes.FingerprintHash(bytes.fromhex(document["fingerprint_hash"]))
    )
    assert root.hex() == document["root"]
    keys = prefix.block_keys(root, document["tokens"])
    assert [key.hex() for key in keys] == document["keys"]
    secret = bytes.fromhex(document["lookup_secret"])
    travelling = [hashes.lookup_key(secret, PrefixKey(key)).hex() for key in keys]
    assert travelling == document["lookup_keys"]
    assert document["dht_keys"] == ["1e20" + key for key in travelling]


def test_the_manifest_is_read_back_and_named() -> None:
    document = vector("manifest.json")
    data = bytes.fromhex(document["manifest"])
    assert decode_manifest(data).last_prefix_key.hex() == vector("prefix.json")["keys"][-1]
    assert hashes.artifact_hash_of(data).hex() == document["artifact_hash"]
    assert hashes.parse_artifact_text(document["text"]).hex() == document["artifact_hash"]


def test_tickets_are_read_back() -> None:
    document = vector("ticket.json")
    for name, addresses in (("plain", []), ("addressed", document["addresses"])):
        ticket = parse_ticket(document[name])
        assert ticket.artifact.hex() == document["artifact_hash"]
        assert list(ticket.addresses) == addresses
