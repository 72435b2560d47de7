"""Operations on containers, and the rebuilding of the index from packs."""

import time
from pathlib import Path

from kvnet.errors import TrustError, UsageError
from kvnet.format.hashes import ArtifactHash, artifact_text
from kvnet.trust.keys import publisher_text
from kvnet_node.operations import requests as r
from kvnet_node.operations.context import OperationContext
from kvnet_node.operations.fetching import name_artifact, note_version
from kvnet_node.operations.peer_names import known_names
from kvnet_node.operations.targets import held_artifact
from kvnet_node.services import Services


async def export(ctx: OperationContext, request: r.ExportRequest) -> r.ExportResult:
    """Write an artifact to a new container file."""
    services = ctx.services
    record = await held_artifact(services, request.target)
    revoked = services.identity.policy().revocation(record.manifest)
    if revoked is not None:
        raise TrustError(f"the artifact is not handed on: {revoked.text}", hint=revoked.hint)
    size_bytes = await services.lane.run(_export, services, record.hash, Path(request.path))
    return r.ExportResult(artifact_text(record.hash), request.path, size_bytes)


def _export(services: Services, artifact: ArtifactHash, path: Path) -> int:
    if path.exists() or path.is_symlink():
        raise UsageError(f"expected a file that does not exist yet, found {path}", hint="name another, or delete it")
    return services.store.export(artifact, path)


async def import_container(ctx: OperationContext, request: r.ImportRequest) -> r.ImportResult:
    """Take in an artifact from a container file, as strictly as from a peer."""
    services = ctx.services
    if request.name is not None:
        services.names.check_name(request.name)
        services.require_disk("a named context")
    record = await services.lane.run(
        services.store.import_container,
        Path(request.path),
        judge=services.identity.judge,
        keys_of=services.identity.keys_of,
        pinned=True,
    )
    if request.name is not None:
        note_version(ctx, *await services.lane.run(name_artifact, services, request.name, record))
    if services.node is not None:
        tokens = await services.lane.run(services.store.tokens_of, record.hash)
        services.node.published(record, services.identity.keys_of(record.manifest, tokens))
    return r.ImportResult(
        artifact=artifact_text(record.hash),
        bytes=record.manifest.total_size_bytes,
        tokens=record.manifest.n_tokens,
        signer=publisher_text(record.manifest.publisher),
        complete=record.complete,
        name=request.name or "",
        signer_name=known_names(services).signers.get(record.manifest.publisher, ""),
    )


async def rebuild(ctx: OperationContext, request: r.RebuildRequest) -> r.RebuildResult:  # noqa: ARG001
    """Make the index anew from the packs."""
    services = ctx.services
    started_s = time.monotonic()
    # Which chunks are damaged is known to the old index alone, so all of them are hashed for the new one.
    rebuilt = await services.lane.run(services.store.rebuild, services.identity.keys_of, verify_chunks=True)
    return r.RebuildResult(
        artifacts=rebuilt.artifacts,
        chunks=rebuilt.chunks,
        seconds=time.monotonic() - started_s,
        refused=[f"{problem.name}: {problem.reason}" for problem in rebuilt.problems],
    )
