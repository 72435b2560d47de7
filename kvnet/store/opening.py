"""What an open store consists of. Opening it is recovering it, and a store that was away is opened again as a whole."""

import logging
import os
import sqlite3
from contextlib import suppress
from pathlib import Path

from kvnet.errors import StoreError, StoreFullError
from kvnet.store.beginnings import note_of, noted_packs
from kvnet.store.database import IndexUnreadableError
from kvnet.store.failures import storage_errors
from kvnet.store.index import Index
from kvnet.store.interface import Problem
from kvnet.store.osfile import OsFiles
from kvnet.store.packs import StorePaths
from kvnet.store.partials import Partials
from kvnet.store.recovery import reconcile, remove_temporary_files
from kvnet.store.space import Space

_log = logging.getLogger(__name__)


class Parts:
    """A store's folders, its index in agreement with its files, and its room. Covered by the store's lock.

    Args:
        files: the seam to the operating system.
        paths: the store; its folders are made when missing.
        quota_bytes: the most that everything in it may take.
        min_free_bytes: what must stay free on its disk.

    Attributes:
        index: what is held where.
        problems: what was not taken in, and why.
        unfinished: packs with a note that a process which was killed left behind.
        partials: packs of interrupted fetches.
        space: what is held, and what has to go.

    Raises:
        StoreError: the disk failed.
    """

    index: Index
    problems: tuple[Problem, ...]
    partials: Partials
    space: Space
    unfinished: tuple[Path, ...]

    def __init__(self, files: OsFiles, paths: StorePaths, *, quota_bytes: int, min_free_bytes: int) -> None:
        self.files = files
        self.paths = paths
        self._quota_bytes = quota_bytes
        self._min_free_bytes = min_free_bytes
        self._open(first=True)

    def _open(self, *, first: bool) -> None:
        what = f"opening the store in {self.paths.root}"
        with storage_errors(what):
            for folder in self.paths.folders():
                self.files.make_directory(folder)
        self._check_writable()
        # First of all: whoever has the index open owns what lies beside it.
        index = self._open_index(what)
        try:
            with storage_errors(what):
                # Later, packs with a note may be those that somebody is filling.
                unfinished = noted_packs(self.paths) if first else []
                remove_temporary_files(self.files, self.paths, {*unfinished, *map(note_of, unfinished)})
                problems = self._reconciled(index)
                taken = self.partials.taken if hasattr(self, "partials") else frozenset()
                partials = Partials(self.files, self.paths, taken)
                space = Space(
                    self.files,
                    self.paths,
                    index,
                    partials,
                    quota_bytes=self._quota_bytes,
                    min_free_bytes=self._min_free_bytes,
                )
        except BaseException:
            index.close()
            raise
        self.index, self.problems, self.partials, self.space = index, problems, partials, space
        self.unfinished = tuple(unfinished)

    def _open_index(self, what: str) -> Index:
        """The index, which nobody else opens from now on; on a full disk what was left behind makes room for it."""
        try:
            return Index.open(self.paths.index)
        except StoreFullError:
            with storage_errors(what):
                remove_temporary_files(self.files, self.paths)
            return Index.open(self.paths.index)

    def _check_writable(self) -> None:
        """Say so here: what SQLite says of a drive that is locked or mounted for reading alone helps nobody."""
        if not os.access(self.paths.temporary, os.W_OK | os.X_OK):
            raise StoreError(
                f"expected a folder that can be written, found {self.paths.root}, which can only be read",
                hint="Unlock its drive, or give yourself the right to write; --data-dir names another folder.",
            )

    def _reconciled(self, index: Index) -> tuple[Problem, ...]:
        """Make the index say what the files say; one that contradicts itself is thrown away first."""
        try:
            return reconcile(self.files, self.paths, index)
        except IndexUnreadableError as error:
            _log.warning("store: the index is made anew: %s", error)
            index.start_anew()
            return reconcile(self.files, self.paths, index)

    def open_again(self) -> None:
        """All of it anew, after the store was away.

        Raises:
            StoreError, OSError: the disk failed; nothing has changed but that the index is closed.
        """
        self.close()
        evicted = self.space.evicted
        self._open(first=False)
        self.space.evicted = evicted

    def index_anew(self, *, verify_chunks: bool) -> None:
        """Throw the index away and make it anew from the files.

        Args:
            verify_chunks: also hash every chunk.

        Raises:
            StoreError: the disk failed.
        """
        self.index.start_anew()
        with storage_errors("rebuilding the index"):
            self.problems = reconcile(self.files, self.paths, self.index, verify_chunks=verify_chunks)
            self.space.count_others()

    def close(self) -> None:
        """Close the index."""
        with suppress(sqlite3.Error):
            self.index.close()
