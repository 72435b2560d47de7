"""A place for the store that is in RAM and nowhere else, and that ends with the node.

Linux keeps ``/dev/shm`` in memory (``tmpfs(5)``). macOS has nothing of the kind that a program can make without the
owner's help, so there it is refused, with what to do instead.
"""

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvnet.errors import ConfigError

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - checked before use: see _require_own
RAM_SHARE: Final = 4
"""Of the machine's RAM, the store may take one part in so many."""
MODE: Final = 0o700


def ram_directory_of(data_dir: Path, base: Path = SHARED_MEMORY) -> Path:
    """Where the store of a data directory is while it is in RAM."""
    name = hashlib.blake2b(os.fsencode(data_dir.absolute()), digest_size=8).hexdigest()
    return base / f"kvnet-{os.getuid()}-{name}"


def ram_quota_bytes(asked_bytes: int, *, ram_bytes: int, free_bytes: int) -> int:
    """What a store in RAM may hold: no more than asked for, than a share of RAM, and than half of what is free there.

    Args:
        asked_bytes: the setting.
        ram_bytes: the machine's.
        free_bytes: what the place in RAM still takes.
    """
    return min(asked_bytes, ram_bytes // RAM_SHARE, free_bytes // 2)


def machine_ram_bytes() -> int:
    """This machine's RAM."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def ram_directory(data_dir: Path, base: Path = SHARED_MEMORY) -> Iterator[Path]:
    """An empty directory in RAM that nobody else can read; it is gone afterwards.

    The caller holds the lock of the data directory.

    Raises:
        ConfigError: there is no such place, or somebody else's directory has its name.
    """
    directory = ram_directory_of(data_dir, base)
    if not base.is_dir():
        raise ConfigError(
            f"store.ram_only: expected a folder kept in memory at {base}, found none on this system",
            hint="set store.write_budget_bytes_day = 0 instead: no conversation is then kept on disk, and recent ones "
            "stay in RAM all the same; or send x-kvnet-private: 1 with requests that are to leave nothing",
        )
    remove_left_behind(data_dir, base)
    try:
        directory.mkdir(mode=MODE)
    except OSError as error:
        raise ConfigError(f"store.ram_only: {directory} cannot be made: {error.strerror}") from error
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def remove_left_behind(data_dir: Path, base: Path = SHARED_MEMORY) -> bool:
    """Remove what a node that was killed left in RAM; whether there was anything.

    Raises:
        ConfigError: what lies there is not this user's.
    """
    directory = ram_directory_of(data_dir, base)
    try:
        found = directory.lstat()
    except OSError:
        return False
    # Anybody may make a name in this folder: what is not ours is neither used nor touched.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigError(
            f"{directory}: expected a folder of this user or nothing, found something else",
            hint="remove it, or ask its owner to",
        )
    shutil.rmtree(directory, ignore_errors=True)
    return True
