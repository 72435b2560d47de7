"""Looking at a data directory that cannot be written to: a backup, a snapshot, a disk that was mounted read-only.

Opening a store recovers it first, and a lock is a file: both write. So commands that only look do so on a copy of what
is small; packs, keys and namespaces are reached through links, and no secret is copied.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from kvnet.errors import ConfigError
from kvnet_node.paths import DataPaths, is_writable, not_writable

_COPIED: Final = frozenset({"store", "network", "pins", "removed"})
"""Folders of small files that opening them may change."""
_MADE: Final = frozenset({"tmp", "partial"})
"""Folders for what is being written, which nobody looks at."""
_LEFT_OUT: Final = frozenset({"lock", "owner.json", "node.log"})
"""Of the process that owns a directory."""


@contextmanager
def copied_for_reading(paths: DataPaths) -> Iterator[DataPaths]:
    """A data directory with the same in it that can be written to, and is gone afterwards.

    Raises:
        ConfigError: it cannot be read, there is nothing in it yet, or something in it can be written to.
    """
    if not paths.keys_dir.is_dir():
        raise not_writable(paths.data_dir)
    with tempfile.TemporaryDirectory(prefix="kvnet-") as folder:
        copy = Path(folder) / "data"
        try:
            _copy(paths.data_dir, copy)
        except (OSError, shutil.Error) as error:
            raise ConfigError(
                f"expected a data directory that can be read, found {paths.data_dir}: {error}",
                hint="name another with --data-dir or KVNET_DATA_DIR",
            ) from error
        yield replace(paths, data_dir=copy, shown=paths.data_dir)


def _copy(source: Path, target: Path) -> None:
    target.mkdir(mode=0o700)
    for entry in source.iterdir():
        if entry.is_dir():
            if entry.name in _COPIED:
                _copy(entry, target / entry.name)
            elif entry.name in _MADE:
                (target / entry.name).mkdir(mode=0o700)
            elif is_writable(entry):
                # Without the lock nobody may get there, and recovery would go through the link.
                raise ConfigError(
                    f"expected {entry} to be read-only as the data directory is, found that it can be written to",
                    hint=f"chmod -R a-w {source} makes all of it read-only, chmod -R u+w none of it",
                )
            else:
                (target / entry.name).symlink_to(entry.absolute(), target_is_directory=True)
        elif entry.is_file() and entry.name not in _LEFT_OUT:
            shutil.copyfile(entry, target / entry.name)
            (target / entry.name).chmod(0o600)
