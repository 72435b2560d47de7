"""The chunk list of a manifest: from pages that any peer may send to entries that the manifest's root vouches for."""

from collections.abc import Sequence

from kvnet.errors import IntegrityError
from kvnet.format.chunks import ChunkEntry, decode_page, page_count, page_size_bytes, pages_root
from kvnet.format.manifest import Manifest


def verify_chunk_list(manifest: Manifest, pages: Sequence[bytes]) -> tuple[ChunkEntry, ...]:
    """The entries of a chunk list, after everything about them was checked.

    The root covers all pages together, so all of them must come from one peer, for it to be clear whom to blame.

    Args:
        manifest: signed; its root is what counts.
        pages: all pages in order, as received.

    Raises:
        IntegrityError: the pages are not those of the root: the peer that sent them lied, or they were damaged.
        MalformedError: they are, but make no chunk list of this manifest: its publisher made a broken artifact.
    """
    expected = [page_size_bytes(manifest.n_chunks, page) for page in range(page_count(manifest.n_chunks))]
    if [len(page) for page in pages] != expected:
        raise IntegrityError(f"expected a chunk list of {len(expected)} pages, {sum(expected)} bytes in all")
    if pages_root(pages) != manifest.root:
        raise IntegrityError("expected a chunk list that matches the root in the manifest, found another")
    entries = tuple(entry for page in pages for entry in decode_page(page))
    manifest.check_entries(entries)
    return entries
