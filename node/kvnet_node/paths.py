"""Where a node keeps its files.

One data directory per node: ``--data-dir``, else ``KVNET_DATA_DIR``, else the platform's user data directory. It is
readable by its owner alone and is left out of Time Machine, which would otherwise copy gigabytes of state that can
be computed again.
"""

import contextlib
import errno
import logging
import os
import platform
import plistlib
from dataclasses import dataclass
from pathlib import Path

from kvnet.errors import ConfigError, StoreError

_log = logging.getLogger(__name__)

TIME_MACHINE_ATTRIBUTE = "com.apple.metadata:com_apple_backup_excludeItem"
"""The extended attribute by which macOS marks a path as left out of backups (what ``tmutil addexclusion`` sets)."""

TEMPORARY_SUFFIX = ".tmp"
"""How the names of files end that are being written; they begin with a dot."""

_NO_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
"""What file systems without hard links answer, such as exFAT (link(2))."""

_OWN = frozenset({"config.toml", "models", "names", "namespaces", "network", "store", "lock", "lost+found"})
"""What may lie in a data directory before there are keys: put there by a person, or by a first start that broke off."""


@dataclass(frozen=True, slots=True)
class DataPaths:
    """Every path inside one data directory, by what it holds.

    Attributes:
        data_dir: the directory.
        shown: what people are told that it is, where this is a copy for reading.
    """

    data_dir: Path
    shown: Path | None = None

    @property
    def keys_dir(self) -> Path:
        """Publisher keys and the peer key, 0600 each."""
        return self.data_dir / "keys"

    @property
    def peer_key_file(self) -> Path:
        """The key that makes this node's peer id."""
        return self.keys_dir / "peer.key"

    @property
    def namespaces_dir(self) -> Path:
        """Namespace secrets, 0600 each."""
        return self.data_dir / "namespaces"

    @property
    def invitations_file(self) -> Path:
        """Open invitations of this node, 0600."""
        return self.namespaces_dir / "invitations.json"

    @property
    def trusted_file(self) -> Path:
        """The trusted publishers."""
        return self.data_dir / "trusted-publishers.json"

    @property
    def store_dir(self) -> Path:
        """Packs and their index."""
        return self.data_dir / "store"

    @property
    def names_dir(self) -> Path:
        """Named contexts."""
        return self.data_dir / "names"

    @property
    def network_dir(self) -> Path:
        """What the network part remembers."""
        return self.data_dir / "network"

    @property
    def peers_file(self) -> Path:
        """Members met before."""
        return self.network_dir / "peers.sqlite3"

    @property
    def announced_file(self) -> Path:
        """What was announced when."""
        return self.network_dir / "announced.sqlite3"

    @property
    def control_socket(self) -> Path:
        """The control socket of the running node, unless that path is too long."""
        return self.data_dir / "control.sock"

    @property
    def listen_file(self) -> Path:
        """The port chosen when a default one was taken."""
        return self.data_dir / "listen.json"

    @property
    def verified_file(self) -> Path:
        """Which models passed ``kvnet selftest`` on this machine."""
        return self.data_dir / "selftest.json"

    @property
    def speeds_file(self) -> Path:
        """Measured prefill speed of each model."""
        return self.data_dir / "speeds.json"

    @property
    def calibrations_file(self) -> Path:
        """What ``kvnet bench calibrate`` measured, by model."""
        return self.data_dir / "calibrations.json"

    @property
    def scrub_file(self) -> Path:
        """When the store was last read through."""
        return self.data_dir / "scrub.json"

    @property
    def writes_file(self) -> Path:
        """What was written lately, and what may still be."""
        return self.data_dir / "writes.json"

    @property
    def savings_file(self) -> Path:
        """The ledger of what reuse has spared."""
        return self.data_dir / "savings.sqlite3"

    @property
    def samples_dir(self) -> Path:
        """Models whose identity is known, and their samples."""
        return self.data_dir / "samples"

    @property
    def measured_file(self) -> Path:
        """What peers' samples were found to be."""
        return self.data_dir / "measured.json"

    @property
    def pause_file(self) -> Path:
        """That and until when the node serves nothing."""
        return self.data_dir / "paused.json"

    @property
    def log_file(self) -> Path:
        """The log of the running node."""
        return self.data_dir / "node.log"

    @property
    def engine_dir(self) -> Path:
        """Logs and sockets of engine processes, and cached model fingerprints."""
        return self.data_dir / "engine"


def default_data_dir() -> Path:
    """``KVNET_DATA_DIR`` if set, else the platform's user data directory for kvnet."""
    if from_environment := os.environ.get("KVNET_DATA_DIR"):
        return Path(from_environment)
    import platformdirs

    return platformdirs.user_data_path("kvnet", appauthor=False)


def default_cache_dir() -> Path:
    """``KVNET_CACHE_DIR`` if set, else the platform's user cache directory for kvnet."""
    if from_environment := os.environ.get("KVNET_CACHE_DIR"):
        return Path(from_environment)
    import platformdirs

    return platformdirs.user_cache_path("kvnet", appauthor=False)


def prepare_data_dir(data_dir: Path) -> DataPaths:
    """Create the data directory (0700) when it is missing and return its paths.

    Raises:
        ConfigError: the path is no directory, cannot be created, or is a directory of something else that
            others may read: closing that could lock them out of a home or of ``/tmp``.
    """
    try:
        created = not data_dir.exists()
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if data_dir.stat().st_mode & 0o077:
            _refuse_others_directory(DataPaths(data_dir))
            data_dir.chmod(0o700)
    except OSError as error:
        raise ConfigError(
            f"the data directory {data_dir} cannot be used: {error.strerror or error}",
            hint="name another with --data-dir or KVNET_DATA_DIR",
        ) from error
    if created:
        exclude_from_time_machine(data_dir)
    return DataPaths(data_dir)


def is_writable(directory: Path) -> bool:
    """Whether files can be made in a directory."""
    return os.access(directory, os.W_OK | os.X_OK)


def not_writable(data_dir: Path) -> ConfigError:
    """The error of a command that has to write."""
    return ConfigError(
        f"expected a data directory that can be written to, found {data_dir} read-only for this user",
        hint="kvnet list, show and status read it all the same; for anything else name another with --data-dir, such "
        "as a copy of it",
    )


def _refuse_others_directory(paths: DataPaths) -> None:
    if any(paths.keys_dir.glob("publisher-*.key")):
        return
    foreign = [entry.name for entry in paths.data_dir.iterdir() if entry.name not in _OWN and entry.name[0] != "."]
    if foreign:
        raise ConfigError(
            f"expected {paths.data_dir} to be new, empty, or a data directory already, found {min(foreign)!r} in it",
            hint="name another with --data-dir or KVNET_DATA_DIR: this one would be closed to everybody else",
        )


def exclude_from_time_machine(directory: Path) -> bool:
    """Mark a directory as left out of Time Machine; best effort, and nothing on other systems.

    The attribute's value is a binary property list of the text "com.apple.backupd". ``setxattr`` is called in libc
    because Python offers it on Linux only.

    Returns:
        Whether the mark was set.
    """
    return _set_attribute(directory) if platform.system() == "Darwin" else False


def _set_attribute(directory: Path) -> bool:
    import ctypes

    value = plistlib.dumps("com.apple.backupd", fmt=plistlib.FMT_BINARY)
    libc = ctypes.CDLL(None, use_errno=True)
    setxattr = libc.setxattr
    setxattr.argtypes = [
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_uint32,
        ctypes.c_int,
    ]
    setxattr.restype = ctypes.c_int
    status: int = setxattr(os.fsencode(directory), TIME_MACHINE_ATTRIBUTE.encode(), value, len(value), 0, 0)
    return status == 0


def write_private(path: Path, data: bytes, *, replace: bool = True) -> None:
    """Write a file that its owner alone can read, all of it or nothing, whenever the process ends.

    Args:
        path: the file; its directory is created 0700 when missing.
        data: the whole content.
        replace: False refuses to touch an existing file (``FileExistsError``).
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not replace and os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    temporary.unlink(missing_ok=True)
    try:
        _write_new(temporary, data)
        if replace:
            temporary.replace(path)
        else:
            _give_free_name(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _write_new(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _give_free_name(temporary: Path, path: Path) -> None:
    """Give a written file its name, which nobody else may have: a link never takes one that is taken."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # A memory stick: the name is taken first, and then stands for the whole file.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
        temporary.replace(path)


def remove_temporaries(paths: DataPaths) -> None:
    """Delete what a process that was killed while it wrote has left; secrets may be in it.

    The caller owns the lock of the data directory.
    """
    directories = (paths.data_dir, paths.keys_dir, paths.namespaces_dir, paths.samples_dir, paths.engine_dir)
    for directory in directories:
        for path in directory.glob(f".*{TEMPORARY_SUFFIX}"):
            with contextlib.suppress(OSError):
                path.unlink()


def keep_private(path: Path, data: bytes) -> None:
    """`write_private` of something that a node cannot go on without.

    Raises:
        StoreError: it cannot be written; what was there before is there still.
    """
    try:
        write_private(path, data)
    except OSError as error:
        raise StoreError(
            f"expected to write {path}, found that it cannot be: {error.strerror or error}",
            hint="make room on the drive, or look at the rights of the directory",
        ) from error


def note_private(path: Path, data: bytes) -> None:
    """`write_private` of something that is only forgotten at the next start when it cannot be written."""
    try:
        write_private(path, data)
    except OSError as error:
        _log.warning("%s is not written: %s", path.name, error.strerror or error)
