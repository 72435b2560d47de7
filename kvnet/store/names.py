"""Named contexts: what people call an artifact on this node. Files are the truth, and there is nothing else.

::

    NAME/1.json    the first version
    NAME/2.json    the newest, written whole or not at all
    NAME/3.gone    a version that was removed: its number is not given out again

Names are local to a data directory. A version holds the messages of its context, so its file is 0600.
"""

import contextlib
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec

from kvnet.errors import MalformedError, StoreError, UnknownNameError, UsageError
from kvnet.format.hashes import ARTIFACT_PREFIX, ArtifactHash, FingerprintHash
from kvnet.format.limits import MAX_CONTEXT_BYTES
from kvnet.store.failures import storage_errors
from kvnet.store.osfile import OsFiles

RESERVED_NAMES: Final = frozenset({"private"})
MAX_VERSION_FILE_BYTES: Final = 2 * MAX_CONTEXT_BYTES + (8 << 20)
"""A context in base64, and room for a file list."""

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_VERSION_FILE: Final = re.compile(r"([1-9][0-9]{0,8})\.(json|gone)")
_TEMPORARY_FILE: Final = re.compile(r"\.[1-9][0-9]{0,8}\.tmp")
_RULE: Final = "1 to 64 of a-z 0-9 . _ - that begin with a letter or digit"


@dataclass(frozen=True, slots=True)
class NamedVersion:
    """One version of a named context.

    Attributes:
        name: what it is called.
        version: from 1.
        artifact: its artifact.
        others: the same state stored with other codecs.
        model: the model it was computed with; "" when it came from a peer.
        fingerprint: of that model.
        context: messages and frozen template inputs, encoded as in the artifact.
        file_order: the files it was laid out from, in order; kept when they are added again.
        created_s: seconds since 1970.
    """

    name: str
    version: int
    artifact: ArtifactHash
    model: str
    fingerprint: FingerprintHash
    context: bytes
    file_order: tuple[str, ...]
    created_s: int
    others: tuple[ArtifactHash, ...] = ()

    @property
    def text(self) -> str:
        """``NAME@VERSION``."""
        return f"{self.name}@{self.version}"


_Bytes32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A version file."""

    format: Annotated[int, msgspec.Meta(ge=1, le=1)]
    artifact: _Bytes32
    model: str
    fingerprint: _Bytes32
    context: bytes
    file_order: tuple[str, ...]
    created_s: int
    others: tuple[_Bytes32, ...] = ()


class NameBook:
    """The named contexts of one data directory. The caller holds its lock.

    Args:
        directory: one folder per name in it; created 0700 at the first :meth:`add`.
        files: the seam to the operating system.
    """

    def __init__(self, directory: Path, files: OsFiles | None = None) -> None:
        self._directory = directory
        self._files = files or OsFiles()

    @staticmethod
    def check_name(name: str) -> None:
        """Raises UsageError for what cannot be a name."""
        if not _NAME.fullmatch(name):
            raise UsageError(f"expected a name of {_RULE}, found {name[:80]!r}")
        if name in RESERVED_NAMES:
            raise UsageError(f"the name {name} is reserved", hint="Choose another name.")
        if name.startswith(ARTIFACT_PREFIX):
            raise UsageError(
                f"names that begin {ARTIFACT_PREFIX} are refused: they would look like artifact hashes",
                hint="Choose another name.",
            )

    def names(self) -> list[str]:
        """Every name that has a version, in order."""
        try:
            entries = sorted(os.scandir(self._directory), key=lambda entry: entry.name)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"the names cannot be read: {error.strerror}") from error
        found = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False) and _is_name(entry.name)]
        return [name for name in found if self._numbers(name)[0]]

    def versions(self, name: str) -> list[NamedVersion]:
        """The versions of a name, the first first; none when there is no such name.

        Raises:
            UsageError: not a name.
            MalformedError: a version file is damaged.
        """
        self.check_name(name)
        return [self._read(name, number) for number in self._numbers(name)[0]]

    def newest(self, name: str) -> NamedVersion | None:
        """The newest version of a name; ``None`` when there is none.

        Raises:
            UsageError: not a name.
            MalformedError: its file is damaged.
        """
        self.check_name(name)
        numbers = self._numbers(name)[0]
        return self._read(name, numbers[-1]) if numbers else None

    def resolve(self, text: str) -> NamedVersion:
        """What ``NAME`` (the newest version) or ``NAME@3`` means.

        Raises:
            UsageError: neither.
            UnknownNameError: no such name or version on this node.
            MalformedError: its file is damaged.
        """
        name, version = _parse(text)
        self.check_name(name)
        numbers = self._numbers(name)[0]
        if not numbers:
            known = ", ".join(self.names()[:8])
            raise UnknownNameError(
                f"no named context {name} on this node" + (f"; there are: {known}" if known else ""),
                hint=f"`kvnet list` shows what is here; `kvnet add PATH --name {name}` makes it, "
                f"`kvnet fetch {name}` takes what a member calls so (`kvnet list --peers`).",
            )
        if version is None:
            version = numbers[-1]
        if version not in numbers:
            raise UnknownNameError(
                f"no version {version} of {name}; there are: {', '.join(map(str, numbers[-8:]))}",
                hint=f"{name} alone is the newest.",
            )
        return self._read(name, version)

    def find(self, text: str) -> NamedVersion | None:
        """What a name or ``NAME@3`` means, or ``None`` for anything else: for where a hash may stand too.

        Raises:
            MalformedError: its file is damaged.
        """
        try:
            return self.resolve(text)
        except UsageError:
            return None

    def names_of(self, artifact: ArtifactHash) -> list[str]:
        """Every ``NAME@VERSION`` that means an artifact. A damaged file means nothing."""
        return [version.text for version in self._all() if artifact in (version.artifact, *version.others)]

    def by_artifact(self) -> dict[ArtifactHash, list[NamedVersion]]:
        """Every version, by artifact, in one pass. A damaged file means nothing."""
        found: dict[ArtifactHash, list[NamedVersion]] = {}
        for version in self._all():
            for artifact in (version.artifact, *version.others):
                found.setdefault(artifact, []).append(version)
        return found

    def add(
        self,
        name: str,
        *,
        artifact: ArtifactHash,
        model: str,
        fingerprint: FingerprintHash,
        context: bytes,
        file_order: Sequence[str],
        created_s: int,
        others: Sequence[ArtifactHash] = (),
    ) -> NamedVersion:
        """Give an artifact the next version number of a name.

        Raises:
            UsageError: not a name.
            StoreError: the disk failed; then there is no new version.
        """
        self.check_name(name)
        present, gone = self._numbers(name)
        number = max([0, *present, *gone]) + 1
        version = NamedVersion(
            name, number, artifact, model, fingerprint, bytes(context), tuple(file_order), created_s, tuple(others)
        )
        document = _Document(
            1, artifact, model, fingerprint, version.context, version.file_order, created_s, version.others
        )
        folder = self._directory / name
        with storage_errors(f"naming {name}"):
            self._files.make_directory(folder)
            temporary = folder / f".{number}.tmp"
            self._files.unlink(temporary)
            self._files.write_whole(folder / f"{number}.json", msgspec.json.encode(document), temporary)
            self._files.sync_directory(self._directory)
        return version

    def remove(self, name: str, version: int | None = None) -> list[str]:
        """Forget a version of a name, or all of them; returns what was forgotten as ``NAME@VERSION``.

        Raises:
            UsageError: not a name.
            StoreError: the disk failed.
        """
        self.check_name(name)
        present, _ = self._numbers(name)
        doomed = [number for number in present if version is None or number == version]
        folder = self._directory / name
        with storage_errors(f"removing {name}"):
            for number in doomed:
                self._files.rename(folder / f"{number}.json", folder / f"{number}.gone")
                # Only the number is kept, not what it named.
                os.truncate(folder / f"{number}.gone", 0)
            if doomed:
                self._files.sync_directory(folder)
            if doomed == present:
                self._remove_folder(folder)
        return [f"{name}@{number}" for number in doomed]

    def forget(self, artifact: ArtifactHash) -> list[str]:
        """Forget every version that means an artifact; returns them as ``NAME@VERSION``.

        Raises:
            StoreError: the disk failed.
        """
        doomed = [(version.name, version.version) for version in self._all() if version.artifact == artifact]
        return list(itertools.chain.from_iterable(self.remove(name, version) for name, version in doomed))

    def tidy(self) -> None:
        """Finish removals that a killed process had begun, and delete what it was writing; text may be in either.

        Raises:
            StoreError: the disk failed.
        """
        with storage_errors("tidying the names"):
            for folder in self._folders():
                for entry in list(os.scandir(folder)):
                    if not entry.is_file(follow_symlinks=False):
                        continue
                    if _TEMPORARY_FILE.fullmatch(entry.name):
                        self._files.unlink(Path(entry.path))
                    elif entry.name.endswith(".gone") and entry.stat(follow_symlinks=False).st_size:
                        os.truncate(entry.path, 0)
                if not self._numbers(folder.name)[0]:
                    self._remove_folder(folder)

    def _folders(self) -> list[Path]:
        """The folder of every name, of those without versions too."""
        try:
            entries = list(os.scandir(self._directory))
        except FileNotFoundError:
            return []
        return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False) and _is_name(entry.name)]

    def _remove_folder(self, folder: Path) -> None:
        """A name without versions is no name; used again, it starts from 1."""
        for entry in os.scandir(folder):
            if not entry.is_dir(follow_symlinks=False):
                self._files.unlink(Path(entry.path))
        with contextlib.suppress(OSError):
            folder.rmdir()
        self._files.sync_directory(self._directory)

    def _all(self) -> Iterable[NamedVersion]:
        for name in self.names():
            for number in self._numbers(name)[0]:
                with contextlib.suppress(MalformedError):
                    yield self._read(name, number)

    def _numbers(self, name: str) -> tuple[list[int], list[int]]:
        """The versions of a name that are there, ascending, and those that were removed."""
        found: dict[str, list[int]] = {"json": [], "gone": []}
        try:
            for entry in os.scandir(self._directory / name):
                match = _VERSION_FILE.fullmatch(entry.name)
                if match and entry.is_file(follow_symlinks=False):
                    found[match[2]].append(int(match[1]))
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raise StoreError(f"the versions of {name} cannot be read: {error.strerror}") from error
        return sorted(found["json"]), sorted(found["gone"])

    def _read(self, name: str, number: int) -> NamedVersion:
        path = self._directory / name / f"{number}.json"
        with storage_errors(f"reading {name}@{number}"):
            handle = self._files.open_for_reading(path)
            try:
                data = self._files.read(handle, MAX_VERSION_FILE_BYTES + 1, 0)
            finally:
                self._files.close(handle)
        try:
            if len(data) > MAX_VERSION_FILE_BYTES:
                raise msgspec.ValidationError("too large")
            document = msgspec.json.decode(data, type=_Document)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise MalformedError(
                f"the file of {name}@{number} is damaged", hint=f"Remove it ({path}) and add the context again."
            ) from error
        return NamedVersion(
            name,
            number,
            ArtifactHash(document.artifact),
            document.model,
            FingerprintHash(document.fingerprint),
            document.context,
            document.file_order,
            document.created_s,
            tuple(ArtifactHash(other) for other in document.others),
        )


def _is_name(text: str) -> bool:
    try:
        NameBook.check_name(text)
    except UsageError:
        return False
    return True


def _parse(text: str) -> tuple[str, int | None]:
    name, at, number = text.partition("@")
    if not at:
        return name, None
    if not re.fullmatch(r"[1-9][0-9]{0,8}", number):
        raise UsageError(f"expected NAME or NAME@VERSION with a version from 1, found {text[:80]!r}")
    return name, int(number)
