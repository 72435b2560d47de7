"""Keys, trusted publishers and namespaces through the command line."""

import os
import stat
from pathlib import Path

import pytest

from tests.e2e.conftest import Kvnet

pytestmark = pytest.mark.e2e


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def secrets_of(kvnet: Kvnet) -> list[bytes]:
    files = list(kvnet.data_dir.glob("keys/*")) + list(kvnet.data_dir.glob("namespaces/*"))
    assert files
    return [path.read_bytes() for path in files]


def test_the_first_use_makes_a_publisher_key_and_a_namespace_for_the_owner_alone(kvnet: Kvnet) -> None:
    shown = kvnet("key", "show")
    assert shown.stdout.startswith("kvpub1")
    assert shown.stdout == kvnet("key", "show").stdout
    for path in [*kvnet.data_dir.glob("keys/*"), *kvnet.data_dir.glob("namespaces/*")]:
        assert mode_of(path) == 0o600, path
    assert mode_of(kvnet.data_dir) == 0o700


def test_a_new_key_signs_and_the_old_one_stays_own(kvnet: Kvnet) -> None:
    old = kvnet.json("key", "show")["publisher"]
    new = kvnet.json("key", "new")["publisher"]
    roles = {key["publisher"]: key["role"] for key in kvnet.json("key", "list")["keys"]}
    assert roles == {new: "signing", old: "own"}
    assert kvnet.json("key", "show")["publisher"] == new


def test_a_publisher_is_trusted_and_untrusted_by_text_or_label(kvnet: Kvnet, other: Kvnet) -> None:
    publisher = other.json("key", "show")["publisher"]
    assert kvnet.json("key", "trust", publisher, "--label", "studio")["changed"] is True
    assert kvnet.json("key", "trust", publisher)["changed"] is False
    assert {"publisher", "role", "label", "since"} <= kvnet.json("key", "list")["keys"][1].keys()
    assert kvnet.json("key", "untrust", "studio") == {
        "type": "trust", "publisher": publisher, "trusted": False, "changed": True, "label": "",
    }  # fmt: skip
    assert [key["role"] for key in kvnet.json("key", "list")["keys"]] == ["signing"]


@pytest.mark.parametrize("text", ["", "kvpub1", "kvpub1aaaa", "someone", "kvpub1" + "a" * 56])
def test_a_malformed_publisher_text_is_a_usage_error(kvnet: Kvnet, text: str) -> None:
    ran = kvnet("key", "trust", text)
    assert (ran.code, ran.stdout) == (2, "")
    assert "error:" in ran.stderr


def test_ones_own_key_cannot_be_trusted_by_mistake(kvnet: Kvnet) -> None:
    own = kvnet.json("key", "show")["publisher"]
    ran = kvnet("key", "trust", own)
    assert ran.code == 2
    assert "own key" in ran.stderr


def test_untrusting_somebody_unknown_is_a_usage_error(kvnet: Kvnet) -> None:
    assert kvnet("key", "untrust", "nobody").code == 2


def test_a_namespace_file_pairs_two_nodes_and_trusts_nobody(kvnet: Kvnet, other: Kvnet, tmp_path: Path) -> None:
    file = tmp_path / "pair.kvns"
    exported = kvnet.json("namespace", "export", str(file))
    assert mode_of(file) == 0o600
    imported = other.json("namespace", "import", str(file))
    assert imported["id"] == exported["id"]
    assert [entry["id"] for entry in other.json("namespace", "list")["namespaces"]] == [exported["id"]]
    assert [key["role"] for key in other.json("key", "list")["keys"]] == ["signing"]


@pytest.mark.parametrize("target", ["existing", "/dev/stdout", "/dev/stderr", "/dev/tty"])
def test_secrets_are_written_to_a_new_file_only(kvnet: Kvnet, tmp_path: Path, target: str) -> None:
    existing = tmp_path / "existing"
    existing.write_text("keep me", encoding="utf-8")
    ran = kvnet("namespace", "export", str(tmp_path / target))
    assert (ran.code, ran.stdout) == (2, "")
    assert existing.read_text(encoding="utf-8") == "keep me"


def test_no_command_prints_a_secret(kvnet: Kvnet, tmp_path: Path) -> None:
    commands = [
        ("key", "show"), ("key", "new"), ("key", "list"), ("namespace", "list"), ("status",), ("config", "show"),
        ("namespace", "export", str(tmp_path / "x.kvns")), ("doctor",),
    ]  # fmt: skip
    printed = "".join(
        ran.stdout + ran.stderr
        for command in commands
        for ran in (kvnet(*command, "--verbose"), kvnet("--json", *command))
    )
    for secret in secrets_of(kvnet):
        for start in range(len(secret) - 16):
            run = secret[start : start + 16]
            assert run.hex() not in printed
            if run.isascii() and b"kvnet" not in run and b" " not in run:
                assert run.decode() not in printed


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\xa0", b"\xff" * 5000])
def test_a_file_that_is_no_namespace_is_refused(kvnet: Kvnet, tmp_path: Path, content: bytes) -> None:
    before = kvnet.json("namespace", "list")
    file = tmp_path / "bad.kvns"
    file.write_bytes(content)
    ran = kvnet("namespace", "import", str(file))
    assert ran.code in {2, 10, 20}
    assert kvnet.json("namespace", "list") == before


def test_a_namespace_file_that_is_not_there_is_a_usage_error(kvnet: Kvnet, tmp_path: Path) -> None:
    assert kvnet("namespace", "import", str(tmp_path / "none")).code == 2


def test_a_key_that_others_may_read_is_refused(kvnet: Kvnet) -> None:
    kvnet.json("key", "show")
    key = next(kvnet.data_dir.glob("keys/publisher-*.key"))
    os.chmod(key, 0o644)
    ran = kvnet("key", "show")
    assert ran.code == 2
    assert "chmod 600" in ran.stderr
