"""The peer key's file."""

import stat
from pathlib import Path

import pytest
import trio

from kvnet.errors import ConfigError
from kvnet.network.libp2p.identity import load_or_create_seed, peer_id_of_seed
from kvnet.protocol.ids import peer_text

_HEADER = b"kvnet peer key 1\n"

pytestmark = pytest.mark.loopback


async def test_the_first_use_makes_a_key_that_only_its_owner_reads(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "peer.key"
    seed = await load_or_create_seed(path)
    assert len(seed) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert await load_or_create_seed(path) == seed
    assert [p.name for p in path.parent.iterdir()] == ["peer.key"]


async def test_many_first_uses_at_once_agree_on_one_key(tmp_path: Path) -> None:
    seeds: set[bytes] = set()

    async def load() -> None:
        seeds.add(await load_or_create_seed(tmp_path / "peer.key"))

    async with trio.open_nursery() as nursery:
        for _ in range(16):
            nursery.start_soon(load)
    assert len(seeds) == 1
    left = [p.name for p in tmp_path.iterdir()]  # noqa: ASYNC240 — a glance at an empty folder
    assert left == ["peer.key"]


async def test_a_key_that_others_may_read_is_refused_with_the_command_that_mends_it(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"
    await load_or_create_seed(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError) as refused:
        await load_or_create_seed(path)
    assert refused.value.hint == f"Run: chmod 600 {path}"


@pytest.mark.parametrize(
    "content",
    [b"", b"junk", b"kvnet peer key 1\n", b"kvnet peer key 1\nzz\n", b"kvnet peer key 1\n" + b"00" * 33, b"00" * 32],
)
async def test_a_damaged_key_is_an_error_and_is_not_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "peer.key"
    path.touch(mode=0o600)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="expected a peer key"):
        await load_or_create_seed(path)
    assert path.read_bytes() == content


def test_the_peer_id_holds_the_public_key() -> None:
    peer = peer_id_of_seed(bytes(32))
    # RFC 8032 public key of the all-zero seed; libp2p peer-id specification: identity multihash of the protobuf key.
    public = bytes.fromhex("3b6a27bcceb6a42d62a3a8d02a6f0d73653215771de243a63ac048a18b59da29")
    assert peer == bytes.fromhex("002408011220") + public
    assert peer_text(peer).startswith("12D3KooW")
