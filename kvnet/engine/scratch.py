"""An unsigned manifest around freshly exported tiles, for measuring on one machine; never for anyone else."""

from collections.abc import Sequence
from pathlib import Path

from kvnet.engine.interface import ModelInfo
from kvnet.engine.kv_state import ChunkRef, Exported, ExportRequest, RestorePlan
from kvnet.errors import CompatibilityError
from kvnet.format.chunks import ChunkEntry, ChunkKind, ChunkPlan, encode_pages, layer_groups, pages_root
from kvnet.format.hashes import ChunkHash, NamespaceId, PrefixKey, blake3_hash
from kvnet.format.manifest import Manifest, encode_manifest
from kvnet.format.prefix import PUBLIC_PREFIX_SECRET, block_keys, prefix_root, tokens_to_bytes


def scratch_restore(
    info: ModelInfo,
    request: ExportRequest,
    exported: Exported,
    *,
    n_tokens: int | None = None,
    earlier: Sequence[ChunkRef] = (),
) -> RestorePlan:
    """A plan that restores what an export has just written.

    Args:
        info: the model it was exported from.
        request: the export; without context chunks.
        exported: its result.
        n_tokens: how many tokens to reuse; all by default.
        earlier: tiles of blocks before ``request.first_block``, which the export did not write.

    Raises:
        CompatibilityError: the model's K/V cannot be shared.
    """
    fingerprint = info.fingerprint
    if fingerprint is None:
        raise CompatibilityError(f"{info.name} cannot be exported: {info.refusal}")
    tokens = list(request.tokens)
    groups = layer_groups(fingerprint.layers)
    plan = ChunkPlan(n_tokens=len(tokens), layers=fingerprint.layers, groups=groups, context_size_bytes=0)
    refs = [
        *earlier,
        *(ChunkRef(c.index, request.pack_path, c.offset, c.length_bytes, c.hash) for c in exported.chunks),
    ]
    entries = _entries(plan, tokens, refs)
    manifest = Manifest(
        version=1,
        fingerprint=fingerprint,
        namespace=NamespaceId(bytes(32)),
        n_tokens=len(tokens),
        block_tokens=256,
        groups=groups,
        codec=request.codec,
        n_chunks=len(plan),
        total_size_bytes=sum(entry.length_bytes for entry in entries),
        root=pages_root(encode_pages(entries)),
        last_prefix_key=PrefixKey(block_keys(prefix_root(PUBLIC_PREFIX_SECRET, fingerprint.hash), tokens)[-1]),
        producer=info.producer,
        continuation=(),
        derived_from=(),
        context_size_bytes=0,
        created=1,
        publisher=bytes(32),
    )
    return RestorePlan(encode_manifest(manifest), len(tokens) if n_tokens is None else n_tokens, tuple(refs))


def _entries(plan: ChunkPlan, tokens: list[int], refs: Sequence[ChunkRef]) -> list[ChunkEntry]:
    tiles = {ref.index: ChunkEntry(ref.length_bytes, ref.hash) for ref in refs}
    entries: list[ChunkEntry] = []
    for index in range(len(plan)):
        spec = plan[index]
        if spec.kind == ChunkKind.TOKENS:
            run = tokens_to_bytes(tokens[spec.first_token : spec.first_token + spec.n_tokens])
            entries.append(ChunkEntry(len(run), ChunkHash(blake3_hash(run))))
        else:
            entries.append(tiles[index])
    return entries


def new_pack(path: Path) -> Path:
    """An empty private file to export into."""
    path.touch(mode=0o600, exist_ok=False)
    return path
