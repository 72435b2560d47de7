"""A pack that outlives its process: filled by one fetch, and gone on with by the next one of the same artifact."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvnet.format.chunks import ChunkEntry
from kvnet.format.container import ContainerLayout
from kvnet.format.hashes import ArtifactHash
from kvnet.store.failures import storage_errors
from kvnet.store.filling import may_be_gone_on_with
from kvnet.store.index import PlacedChunk
from kvnet.store.interface import ArtifactRecord
from kvnet.store.journal import GroupedSync, Kept, encode_header, encode_record, kept_chunks, parse_journal
from kvnet.store.osfile import OsFiles
from kvnet.store.writer import DiskPackWriter, PackHost

_log = logging.getLogger(__name__)

PARTIAL_KEPT_S: Final = 7 * 24 * 3600.0
"""A partial pack that nobody went on with for so long is removed."""

MAX_JOURNAL_BYTES: Final = 64 << 20
"""Four million chunks; more is no journal of ours."""


class ResumablePackWriter(DiskPackWriter):
    """See :class:`kvnet.store.interface.PackWriter`; what it holds stays when it is aborted.

    Args:
        host: the store; told once that the partial pack is free again, also when this fails.
        files: the seam to the operating system.
        path: of the partial pack; made when missing. Its journal lies beside it.
        artifact: the artifact.
        entries: its chunk list, verified.
        read_soon: whether chunks stay in the system's page cache.
    """

    def __init__(
        self,
        host: PackHost,
        files: OsFiles,
        path: Path,
        artifact: ArtifactHash,
        entries: Sequence[ChunkEntry],
        *,
        read_soon: bool = True,
    ) -> None:
        self._journal_path = journal_of(path)
        try:
            handle, kept = self._start(files, path, artifact, entries)
        except BaseException:
            host.suspended(path)
            raise
        self._cut = not kept
        self._sync = GroupedSync(files, handle, self._journal)
        super().__init__(host, files, path, len(entries), 0, handle=handle, read_soon=read_soon)
        self._held = frozenset(one.index for one in kept)
        for one in kept:
            super()._keep(one.index, PlacedChunk(entries[one.index].hash, one.offset, one.length_bytes))
        self._cut = True

    def _start(
        self, files: OsFiles, path: Path, artifact: ArtifactHash, entries: Sequence[ChunkEntry]
    ) -> tuple[int, list[Kept]]:
        """The open pack, what of it holds, and a journal that says so."""
        with storage_errors("going on with a partial pack"):
            handle, kept = open_partial(files, path, artifact, entries)
        try:
            with storage_errors("starting a journal"):
                self._journal, self._journal_size = self._start_journal(files, artifact, len(entries), kept)
        except BaseException:
            files.close(handle)
            if not kept:
                files.unlink(path)
            raise
        return handle, kept

    def reserve(self, expected_bytes: int) -> None:
        """Reserve disk blocks for chunks that are missing.

        Raises:
            StoreFullError: the disk has none.
        """
        with storage_errors("reserving a pack"):
            self._files.preallocate(self._open_handle(), self._next_offset + expected_bytes)
        self._room_until = max(self._room_until, self._next_offset + expected_bytes)

    def _start_journal(
        self, files: OsFiles, artifact: ArtifactHash, n_chunks: int, kept: Sequence[Kept]
    ) -> tuple[int, int]:
        """A journal of what was found to be there: the old one may name more."""
        content = encode_header(artifact, n_chunks) + b"".join(map(encode_record, kept))
        new = self._journal_path.with_suffix(".new")
        files.unlink(new)
        journal = files.create(new)
        try:
            files.write(journal, content, 0)
            files.rename(new, self._journal_path)
        except BaseException:
            files.close(journal)
            files.unlink(new)
            raise
        return journal, len(content)

    def _keep(self, index: int, chunk: PlacedChunk) -> None:
        super()._keep(index, chunk)
        record = encode_record(Kept(index, chunk.offset, chunk.length_bytes))
        with storage_errors("writing a journal"):
            self._files.write(self._journal, record, self._journal_size)
        self._journal_size += len(record)
        self._sync.wrote(chunk.length_bytes)

    def _end(self, *, published: ArtifactRecord | None, failure: BaseException | None) -> None:
        """Close; keep what is there for the next fetch, unless it has its place or belongs to no such manifest."""
        handle, self._handle = self._handle, None
        self._host.forget(self)
        if handle is None:
            return
        self._sync.end()
        # While this is being made, what was found is not in the list of chunks yet.
        anything = bool(self._placed) or not self._cut
        keep = published is None and may_be_gone_on_with(failure) and anything
        try:
            if keep:
                # What was reserved beyond the last chunk goes back to the disk.
                if self._cut:
                    self._files.truncate(handle, self._next_offset)
            else:
                self._files.unlink(self._path)
                self._files.unlink(self._journal_path)
        except OSError as error:
            _log.warning("store: a partial pack stays as it is until it expires: %s", error.strerror)
        finally:
            self._files.close(handle)
            self._files.close(self._journal)
            self._host.suspended(self._path)


def journal_of(path: Path) -> Path:
    """The journal of a partial pack."""
    return path.with_suffix(".journal")


def open_partial(
    files: OsFiles, path: Path, artifact: ArtifactHash, entries: Sequence[ChunkEntry]
) -> tuple[int, list[Kept]]:
    """Open a partial pack, made when missing, and find out what of it holds; what does not is written over.

    Raises:
        OSError: the disk failed.
    """
    try:
        handle = files.open_for_writing(path)
    except FileNotFoundError:
        return files.create(path), []
    try:
        claimed = parse_journal(_journal_bytes(files, journal_of(path)), artifact, len(entries))
        return handle, kept_chunks(files, handle, claimed, entries, ContainerLayout(len(entries)).data_offset)
    except BaseException:
        files.close(handle)
        raise


def _journal_bytes(files: OsFiles, path: Path) -> bytes:
    try:
        handle = files.open_for_reading(path)
    except FileNotFoundError:
        return b""
    try:
        return files.read(handle, MAX_JOURNAL_BYTES, 0)
    finally:
        files.close(handle)
