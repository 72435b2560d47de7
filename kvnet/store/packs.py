"""Pack files: their names and folders, and reading back what one says about itself."""

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvnet.errors import MalformedError, UsageError
from kvnet.format.chunks import ChunkEntry, decode_pages, page_count, page_size_bytes
from kvnet.format.container import (
    HEADER_SIZE_BYTES,
    TRAILER_SIZE_BYTES,
    ContainerLayout,
    Placement,
    parse_envelope_area,
    parse_footer,
    parse_header,
    parse_trailer,
)
from kvnet.format.hashes import ARTIFACT_PREFIX, ArtifactHash, artifact_text, blake3_hash, parse_artifact_text
from kvnet.store.index import PlacedChunk
from kvnet.store.interface import Problem
from kvnet.store.osfile import OsFiles
from kvnet.trust.envelope import SignedManifest, open_manifest

PACK_SUFFIX: Final = ".kva"
PARTIAL_SUFFIX: Final = ".part"
_PACK_NAME: Final = re.compile(rf"({ARTIFACT_PREFIX}[a-z2-7]{{52}})(?:\.[1-9][0-9]{{0,8}})?\.kva")
_SHARD_NAME: Final = re.compile(r"[a-z2-7]{2}")


@dataclass(frozen=True, slots=True)
class StorePaths:
    """The folders of one store.

    Attributes:
        root: the store's directory.
    """

    root: Path

    @property
    def packs(self) -> Path:
        """Finished packs, in a folder per two characters of their artifact hash."""
        return self.root / "packs"

    @property
    def temporary(self) -> Path:
        """Packs being written; emptied when the store opens."""
        return self.root / "tmp"

    @property
    def partial(self) -> Path:
        """Packs of fetches that were interrupted, each with its journal."""
        return self.root / "partial"

    @property
    def pins(self) -> Path:
        """An empty file per pinned artifact."""
        return self.root / "pins"

    @property
    def removed(self) -> Path:
        """An empty file per removed artifact whose pack is still there: it must not come back."""
        return self.root / "removed"

    @property
    def quarantine(self) -> Path:
        """What lay among the packs and is none."""
        return self.root / "quarantine"

    @property
    def index(self) -> Path:
        """The index."""
        return self.root / "index.sqlite"

    def folders(self) -> tuple[Path, ...]:
        """Every folder."""
        return (self.root, self.packs, self.temporary, self.partial, self.pins, self.removed, self.quarantine)

    def partial_pack(self, artifact: ArtifactHash) -> Path:
        """The path of an artifact's partial pack."""
        return self.partial / f"{artifact_text(artifact)}{PARTIAL_SUFFIX}"

    def pack(self, name: str) -> Path:
        """The path of a pack by its name in the index."""
        return self.packs / name


@dataclass(frozen=True, slots=True)
class FoundPack:
    """A file among the packs that has the name of a pack."""

    name: str
    artifact: ArtifactHash
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class PackContents:
    """What a pack says about itself, everything checked but the chunks' own bytes.

    Attributes:
        signed: its manifest.
        pages: the chunk list in pages.
        entries: the same as entries.
        chunks: the chunks in it; when they were hashed, only those that match.
        damaged: how many did not match.
    """

    signed: SignedManifest
    pages: tuple[bytes, ...]
    entries: tuple[ChunkEntry, ...]
    chunks: tuple[PlacedChunk, ...]
    damaged: int = 0


def pack_name(artifact: ArtifactHash, number: int = 1) -> str:
    """The name of an artifact's pack; the first has no number. Later ones bring chunks that were missing."""
    text = artifact_text(artifact)
    shard = text[len(ARTIFACT_PREFIX) : len(ARTIFACT_PREFIX) + 2]
    return f"{shard}/{text}{f'.{number}' if number > 1 else ''}{PACK_SUFFIX}"


def artifact_of_pack(name: str) -> ArtifactHash | None:
    """The artifact that a pack's file name says; ``None`` for any other name."""
    match = _PACK_NAME.fullmatch(name.rpartition("/")[2])
    if match is None:
        return None
    try:
        return parse_artifact_text(match[1])
    except UsageError:
        return None


def scan_packs(paths: StorePaths) -> Iterator[FoundPack | Problem]:
    """Everything in the folder of packs. Symbolic links are reported, never followed.

    Hidden files are passed over: macOS puts its own beside ours, such as ``.DS_Store``, and ``._NAME`` for each of ours
    on drives of other systems.
    """
    for shard in _visible(paths.packs):
        if not shard.is_dir(follow_symlinks=False) or not _SHARD_NAME.fullmatch(shard.name):
            yield Problem(Path(shard.path), "no folder of packs; left alone")
            continue
        for entry in _visible(Path(shard.path)):
            artifact = artifact_of_pack(entry.name)
            found = entry.stat(follow_symlinks=False)
            in_place = artifact is not None and pack_name(artifact).partition("/")[0] == shard.name
            if artifact is None or not in_place or not stat.S_ISREG(found.st_mode):
                yield Problem(Path(entry.path), "no pack by its name, place or kind; left alone")
                continue
            yield FoundPack(f"{shard.name}/{entry.name}", artifact, found.st_size, found.st_mtime_ns)


def _visible(folder: Path) -> list[os.DirEntry[str]]:
    found = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    return sorted(found, key=lambda entry: entry.name)


def read_pack(files: OsFiles, path: Path, *, verify_chunks: bool = False) -> PackContents:
    """Read what a pack says about itself.

    Args:
        files: the seam to the operating system.
        path: the pack.
        verify_chunks: also hash every chunk.

    Raises:
        MalformedError: not a pack, cut short, or contradicting itself.
        TrustError: the signature is not the publisher's.
        IntegrityError: the chunk list or the footer does not match its hash.
        UnsupportedVersionError, CompatibilityError: of a version or a kind that this build does not read.
        OSError: the disk failed.
    """
    handle = files.open_for_reading(path)
    try:
        size = files.size_bytes(handle)
        layout = parse_header(files.read(handle, HEADER_SIZE_BYTES, 0))
        if size < layout.data_offset + TRAILER_SIZE_BYTES:
            raise MalformedError(f"pack: expected at least {layout.data_offset} bytes, found {size}")
        envelope = parse_envelope_area(files.read(handle, layout.envelope_size, layout.envelope_offset))
        signed = open_manifest(envelope)
        if signed.manifest.n_chunks != layout.n_chunks:
            raise MalformedError(f"pack: expected {signed.manifest.n_chunks} chunks, found {layout.n_chunks}")
        pages = _read_pages(files, handle, layout)
        entries = decode_pages(pages, layout.n_chunks, signed.manifest.root)
        signed.manifest.check_entries(entries)
        footer_offset = parse_trailer(files.read(handle, TRAILER_SIZE_BYTES, size - TRAILER_SIZE_BYTES), size, layout)
        places = parse_footer(files.read(handle, size - footer_offset, footer_offset), footer_offset, layout)
        chunks = tuple(_placed(entries, place) for place in places)
        good = chunks
        if verify_chunks:
            good = tuple(c for c in chunks if blake3_hash(files.read(handle, c.length_bytes, c.offset)) == c.hash)
    finally:
        files.close(handle)
    return PackContents(signed, pages, entries, good, len(chunks) - len(good))


def _read_pages(files: OsFiles, handle: int, layout: ContainerLayout) -> tuple[bytes, ...]:
    data = memoryview(files.read(handle, layout.pages_size, layout.pages_offset))
    pages: list[bytes] = []
    start = 0
    for page in range(page_count(layout.n_chunks)):
        size = page_size_bytes(layout.n_chunks, page)
        pages.append(bytes(data[start : start + size]))
        start += size
    return tuple(pages)


def _placed(entries: tuple[ChunkEntry, ...], place: Placement) -> PlacedChunk:
    entry = entries[place.index]
    if entry.length_bytes != place.length_bytes:
        raise MalformedError(
            f"pack: expected {entry.length_bytes} bytes of chunk {place.index}, found {place.length_bytes}"
        )
    return PlacedChunk(entry.hash, place.offset, place.length_bytes)
