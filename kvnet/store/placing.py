"""A finished pack gets its place: its file among the packs, then its rows in the index; or nothing of it stays."""

import logging
from collections.abc import Callable
from pathlib import Path

from kvnet.errors import NotInStoreError
from kvnet.format.hashes import artifact_text, short_text
from kvnet.store.failures import storage_errors
from kvnet.store.filling import PackDraft
from kvnet.store.index import ArtifactRow
from kvnet.store.opening import Parts
from kvnet.store.space import INDEX_BASE_BYTES, INDEX_BYTES_PER_CHUNK

_log = logging.getLogger(__name__)

MAX_LOG_BYTES = 4 << 20
"""How long the index's log may grow before whoever adds something empties it; those who collect garbage do not."""


class Placing:
    """Gives packs their place. Covered by the store's lock.

    Args:
        parts: the open store.
        now: seconds since 1970.
    """

    def __init__(self, parts: Parts, now: Callable[[], float]) -> None:
        self._parts = parts
        self._files = parts.files
        self._paths = parts.paths
        self._now = now

    @staticmethod
    def index_bytes(draft: PackDraft) -> int:
        """What listing a pack may add to the index."""
        return INDEX_BASE_BYTES + INDEX_BYTES_PER_CHUNK * len(draft.entries)

    def check_missing(self, draft: PackDraft) -> None:
        """See that every chunk that must be there is.

        Raises:
            NotInStoreError: some are missing, and may not be.
        """
        own = {chunk.hash for chunk in draft.chunks}
        index = self._parts.index
        missing = [e for e in draft.entries if not e.absent and e.hash not in own and not index.has_chunk(e.hash)]
        if missing and not draft.allow_partial:
            raise NotInStoreError(
                f"{len(missing)} of {len(draft.entries)} chunks of {short_text(draft.signed.artifact_hash)} "
                "are not held here"
            )

    def brings_nothing_new(self, draft: PackDraft) -> bool:
        """Whether the artifact is listed, and every chunk of the pack held."""
        index = self._parts.index
        listed = index.artifact(draft.signed.artifact_hash) is not None
        return listed and all(index.has_chunk(chunk.hash) for chunk in draft.chunks)

    def place(self, path: Path, draft: PackDraft) -> None:
        """Move a pack to its place and list it. A failure leaves nothing of it.

        Raises:
            StoreError: the disk failed.
        """
        row = self._parts.index.artifact(draft.signed.artifact_hash)
        target = self._paths.pack(self._parts.space.free_name(draft.signed.artifact_hash))
        new_pin = draft.pinned and (row is None or not row.pinned)
        marker = self._paths.pins / artifact_text(draft.signed.artifact_hash) if new_pin else None
        try:
            with storage_errors("publishing a pack"):
                self._move(path, target, draft, marker)
            self._list(draft, target, row)
        except BaseException:
            self._take_back(target, marker)
            raise
        if row is not None:
            self.note_again(draft)
        if self._parts.index.log_bytes() > MAX_LOG_BYTES:
            self._parts.index.checkpoint()

    def _move(self, path: Path, target: Path, draft: PackDraft, marker: Path | None) -> None:
        if marker is not None:
            self._files.write_whole(marker, b"", self._parts.space.temporary_path())
        self._files.make_directory(target.parent)
        self._files.sync_directory(self._paths.packs)
        self._files.rename(path, target)
        self._files.sync_directory(target.parent)
        # It may have been removed before, with a pack left for others.
        self._files.unlink(self._paths.removed / artifact_text(draft.signed.artifact_hash))
        self._files.sync_directory(self._paths.removed)

    def _list(self, draft: PackDraft, target: Path, row: ArtifactRow | None) -> None:
        """The index, after the files."""
        signed, index = draft.signed, self._parts.index
        with storage_errors("publishing a pack"):
            found = target.lstat()
        name = str(target.relative_to(self._paths.packs))
        with index.transaction():
            pack = index.add_pack(name, signed.artifact_hash, found.st_size, found.st_mtime_ns, draft.chunks)
            if row is None:
                number = index.add_artifact(
                    signed.artifact_hash,
                    signed.envelope,
                    signed.manifest,
                    draft.entries,
                    draft.pages,
                    pinned=draft.pinned,
                    created_s=self._now(),
                )
                index.add_prefixes(number, signed.manifest.namespace, draft.keys)
            elif draft.pinned:
                index.set_pinned(signed.artifact_hash, pinned=True)
            index.refresh(index.users_of_pack(pack))
            if row is None:
                index.refresh([number])

    def _take_back(self, target: Path, marker: Path | None) -> None:
        """Undo a placement that failed. What cannot be undone now is settled when the store opens again."""
        for path in (target, marker):
            if path is None:
                continue
            try:
                self._files.unlink(path)
                self._files.sync_directory(path.parent)
            except FileNotFoundError:
                continue  # not even its folder was made
            except OSError as error:
                _log.warning("store: %s of a failed publish stays for now: %s", path.name, error.strerror)

    def note_again(self, draft: PackDraft) -> None:
        """An artifact that was here already came again."""
        index = self._parts.index
        row = index.artifact(draft.signed.artifact_hash)
        if row is None:
            return
        with index.transaction():
            index.add_prefixes(row.id, draft.signed.manifest.namespace, draft.keys)
            index.touch(row.hash, self._now())
