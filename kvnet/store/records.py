"""Records of artifacts, made from rows of the index; the unchanging part of recent ones is kept."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from kvnet.errors import IntegrityError
from kvnet.format.chunks import ChunkEntry, decode_pages
from kvnet.format.hashes import ArtifactHash
from kvnet.format.limits import ENTRY_SIZE_BYTES, PAGE_ENTRIES
from kvnet.format.manifest import Manifest
from kvnet.store.index import ArtifactRow
from kvnet.store.interface import ArtifactRecord
from kvnet.trust.envelope import open_manifest

MAX_CACHED_ENTRIES: Final = 1 << 18
"""Chunk-list entries kept in memory over all records: about 40 MB at most."""

_PAGE_BYTES: Final = PAGE_ENTRIES * ENTRY_SIZE_BYTES


@dataclass(frozen=True, slots=True)
class _Fixed:
    """What never changes about an artifact."""

    manifest: Manifest
    entries: tuple[ChunkEntry, ...]
    pages: tuple[bytes, ...]


class RecordCache:
    """Turns rows into records. Signatures and chunk lists are checked when a row is read for the first time."""

    def __init__(self, max_entries: int = MAX_CACHED_ENTRIES) -> None:
        self._max_entries = max_entries
        self._kept: OrderedDict[ArtifactHash, _Fixed] = OrderedDict()
        self._n_entries = 0

    def record(self, row: ArtifactRow) -> ArtifactRecord:
        """The record of a row.

        Raises:
            MalformedError, TrustError, IntegrityError: the index was changed by somebody else.
        """
        fixed = self._kept.get(row.hash)
        if fixed is None:
            fixed = self._read(row)
        else:
            self._kept.move_to_end(row.hash)
        return ArtifactRecord(
            hash=row.hash,
            envelope=row.envelope,
            manifest=fixed.manifest,
            entries=fixed.entries,
            pages=fixed.pages,
            complete=row.complete,
            pinned=row.pinned,
            size_bytes=row.held_bytes,
            created_s=row.created_s,
            last_used_s=row.last_used_s,
        )

    def clear(self) -> None:
        """Keep nothing."""
        self._kept.clear()
        self._n_entries = 0

    def _read(self, row: ArtifactRow) -> _Fixed:
        signed = open_manifest(row.envelope)
        manifest = signed.manifest
        if signed.artifact_hash != row.hash:
            raise IntegrityError(
                "the index names another artifact than its manifest", hint="Run `kvnet store rebuild`."
            )
        pages = tuple(row.pages[start : start + _PAGE_BYTES] for start in range(0, len(row.pages), _PAGE_BYTES))
        fixed = _Fixed(manifest, decode_pages(pages, manifest.n_chunks, manifest.root), pages)
        self._kept[row.hash] = fixed
        self._n_entries += len(fixed.entries)
        while self._n_entries > self._max_entries and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._n_entries -= len(dropped.entries)
        return fixed
