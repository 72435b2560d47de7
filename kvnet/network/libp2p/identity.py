"""The peer key: who a node is on the network. It signs nothing that outlives a connection."""

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID

from kvnet.errors import ConfigError
from kvnet.protocol.ids import PeerId

SEED_SIZE_BYTES = 32
_HEADER = b"kvnet peer key 1\n"
_FILE_SIZE_BYTES = len(_HEADER) + 2 * SEED_SIZE_BYTES + 1


def peer_id_of_seed(seed: bytes) -> PeerId:
    """The peer id that an Ed25519 seed of 32 bytes gives."""
    return PeerId(ID.from_pubkey(key_pair(seed).public_key).to_bytes())


def key_pair(seed: bytes) -> Any:
    """The py-libp2p key pair of an Ed25519 seed of 32 bytes."""
    return create_new_key_pair(seed)


async def load_or_create_seed(path: Path) -> bytes:
    """Read the peer key's seed, making a new one at the first use. The file is only its owner's (0600).

    Two processes that start at once agree on one key: the first file that appears wins.

    Raises:
        ConfigError: the file cannot be read, is not a peer key, or others may read it.
    """
    return await trio.to_thread.run_sync(_load_or_create, path)


def _load_or_create(path: Path) -> bytes:
    try:
        with suppress(FileNotFoundError):
            return _load(path)
        _create(path)
        return _load(path)
    except OSError as error:
        raise ConfigError(f"expected a peer key at {path}, found: {error.strerror}") from error


def _load(path: Path) -> bytes:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_mode & 0o077:
            raise ConfigError(
                f"expected {path} to be readable by its owner only, others may read it",
                hint=f"Run: chmod 600 {path}",
            )
        text = file.read(_FILE_SIZE_BYTES + 1)
    seed_hex = text.removeprefix(_HEADER).rstrip(b"\n")
    with suppress(ValueError):
        seed = bytes.fromhex(seed_hex.decode("ascii", "replace"))
        if text.startswith(_HEADER) and len(seed) == SEED_SIZE_BYTES:
            return seed
    raise ConfigError(
        f"expected a peer key of {SEED_SIZE_BYTES} bytes in {path}, found something else",
        hint="Move the file away to get a new identity; peers will then see a new node.",
    )


def _create(path: Path) -> None:
    """Write a new key beside `path` and link it into place, so that nobody ever reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_HEADER + secrets.token_bytes(SEED_SIZE_BYTES).hex().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()
