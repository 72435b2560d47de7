"""Opening a store is recovering it: the index is made to say what the files say.

Files win every disagreement. A pack the index does not know is read and taken in; a row whose pack has gone or has
changed is dropped; a removed artifact stays removed; what is no pack is set aside and reported.
"""

import logging
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from kvnet.errors import (
    CompatibilityError,
    IntegrityError,
    KvnetError,
    MalformedError,
    TrustError,
    UnsupportedVersionError,
    UsageError,
)
from kvnet.format.hashes import ArtifactHash, artifact_text, parse_artifact_text
from kvnet.store.index import Index
from kvnet.store.interface import Problem
from kvnet.store.osfile import OsFiles
from kvnet.store.packs import FoundPack, PackContents, StorePaths, read_pack, scan_packs

_log = logging.getLogger(__name__)


def remove_temporary_files(files: OsFiles, paths: StorePaths, spare: Collection[Path] = ()) -> None:
    """Remove what packs that were never published left behind, but for files that are still of use."""
    for entry in os.scandir(paths.temporary):
        if not entry.is_dir(follow_symlinks=False) and Path(entry.path) not in spare:
            files.unlink(Path(entry.path))


def marked(folder: Path) -> set[ArtifactHash]:
    """The artifacts that a folder of marker files names."""
    found: set[ArtifactHash] = set()
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            continue  # no marker of ours
        try:
            found.add(parse_artifact_text(entry.name))
        except UsageError:
            continue
    return found


def reconcile(files: OsFiles, paths: StorePaths, index: Index, *, verify_chunks: bool = False) -> tuple[Problem, ...]:
    """Make the index agree with the files.

    Args:
        files: the seam to the operating system.
        paths: the store.
        index: its index, which may be empty.
        verify_chunks: also hash every chunk of packs that the index does not know.

    Returns:
        What was not taken in, and why.
    """
    problems: list[Problem] = []
    present: dict[str, FoundPack] = {}
    for found in scan_packs(paths):
        if isinstance(found, Problem):
            problems.append(found)
        else:
            present[found.name] = found
    removed = marked(paths.removed)
    pinned = marked(paths.pins)
    changed = _drop_stale(index, present, removed)
    known = {pack.name for pack in index.packs()}
    for name in sorted(present.keys() - known):
        contents = _read(files, paths, present[name], problems, verify_chunks=verify_chunks)
        if contents is not None:
            _take_in(index, present[name], contents, removed=removed, pinned=pinned)
            changed = True
    changed |= _drop_unfounded(index, removed)
    _settle_pins(files, paths, index, pinned, removed)
    if changed:
        with index.transaction():
            index.refresh_all()
    for problem in problems:
        _log.warning("store: %s: %s", problem.name, problem.reason)
    return tuple(problems)


def _drop_stale(index: Index, present: dict[str, FoundPack], removed: set[ArtifactHash]) -> bool:
    """Forget packs that have gone, are other files now, or whose artifact is not listed and was never removed.

    The last comes of a damaged index: such a pack is read again instead of being taken for one that nobody uses.
    """
    listed = index.row_ids().keys() | removed
    stale = [
        pack
        for pack in index.packs()
        if pack.name not in present
        or (present[pack.name].size_bytes, present[pack.name].mtime_ns) != (pack.size_bytes, pack.mtime_ns)
        or pack.artifact != present[pack.name].artifact
        or pack.artifact not in listed
    ]
    with index.transaction():
        for pack in stale:
            index.drop_pack(pack.id)
    return bool(stale)


def _read(
    files: OsFiles, paths: StorePaths, found: FoundPack, problems: list[Problem], *, verify_chunks: bool
) -> PackContents | None:
    """Read a pack; set it aside when it is none, leave it alone when this build just cannot read it."""
    path = paths.pack(found.name)
    try:
        contents = read_pack(files, path, verify_chunks=verify_chunks)
        if contents.signed.artifact_hash != found.artifact:
            raise IntegrityError(f"pack: expected the artifact of its name, found {artifact_text(found.artifact)}")
        if contents.damaged:
            problems.append(Problem(path, f"{contents.damaged} chunks do not match their hash and are not used"))
        return contents
    except (UnsupportedVersionError, CompatibilityError) as error:
        problems.append(Problem(path, f"left alone: {error}"))
    except (MalformedError, IntegrityError, TrustError) as error:
        problems.append(Problem(path, f"set aside: {error}"))
        _set_aside(files, paths, path)
    except (OSError, KvnetError) as error:
        problems.append(Problem(path, f"cannot be read: {error}"))
    return None


def _set_aside(files: OsFiles, paths: StorePaths, path: Path) -> None:
    try:
        files.rename(path, next(target for target in _targets(paths, path) if not target.exists()))
    except OSError as error:
        _log.warning("store: %s cannot be set aside: %s", path.name, error.strerror)


def _targets(paths: StorePaths, path: Path) -> Iterator[Path]:
    number = 1
    while True:
        yield paths.quarantine / (path.name if number == 1 else f"{path.name}.{number}")
        number += 1


def _take_in(
    index: Index,
    found: FoundPack,
    contents: PackContents,
    *,
    removed: set[ArtifactHash],
    pinned: set[ArtifactHash],
) -> None:
    signed = contents.signed
    with index.transaction():
        index.add_pack(found.name, signed.artifact_hash, found.size_bytes, found.mtime_ns, contents.chunks)
        if signed.artifact_hash in removed or index.artifact(signed.artifact_hash) is not None:
            return
        index.add_artifact(
            signed.artifact_hash,
            signed.envelope,
            signed.manifest,
            contents.entries,
            contents.pages,
            pinned=signed.artifact_hash in pinned,
            created_s=found.mtime_ns / 1e9,
        )


def _drop_unfounded(index: Index, removed: set[ArtifactHash]) -> bool:
    """Drop artifacts that were removed, or whose every pack has gone."""
    founded = {pack.artifact for pack in index.packs()} - removed
    unfounded = [row for artifact, row in index.row_ids().items() if artifact not in founded]
    with index.transaction():
        for row in unfounded:
            index.drop_artifact(row)
    return bool(unfounded)


def _settle_pins(
    files: OsFiles, paths: StorePaths, index: Index, pinned: set[ArtifactHash], removed: set[ArtifactHash]
) -> None:
    """Marker files decide what is pinned. One for an artifact that is not here stays: its pack may be on its way.

    A folder that is being copied or restored has its files one after the other.
    """
    listed = index.pins()
    with index.transaction():
        for artifact, noted in listed:
            if noted != (artifact in pinned):
                index.set_pinned(artifact, pinned=artifact in pinned)
    for artifact in pinned & removed:
        files.unlink(paths.pins / artifact_text(artifact))
