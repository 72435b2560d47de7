"""Operations on namespaces: only files carry their secrets, results carry public ids."""

from pathlib import Path

from kvnet_node.operations.context import OperationContext
from kvnet_node.operations.requests import (
    NamespaceEntry,
    NamespaceFileRequest,
    NamespaceListRequest,
    NamespaceListResult,
    NamespaceResult,
)


async def list_namespaces(context: OperationContext, request: NamespaceListRequest) -> NamespaceListResult:  # noqa: ARG001
    """All namespaces of this node."""
    services = context.services
    entries = []
    swarms = {each.id: each.name for each in services.identity.swarms.swarms()}
    for index, namespace in enumerate(services.identity.namespaces()):
        count = await services.lane.run(services.store.count, namespace.id)
        current = index == 0
        name = namespace.name if current else swarms.get(namespace.id) or f"kept-{namespace.id.hex()[:16]}"
        entries.append(NamespaceEntry(name, namespace.id.hex(), count, current))
    return NamespaceListResult(entries)


async def export(context: OperationContext, request: NamespaceFileRequest) -> NamespaceResult:
    """Write ``mine`` to a new file."""
    namespace_id = context.services.identity.export_namespace(Path(request.path))
    return NamespaceResult(namespace_id.hex(), request.path)


async def import_namespace(context: OperationContext, request: NamespaceFileRequest) -> NamespaceResult:
    """Make the namespace of a file ``mine``."""
    services = context.services
    before = services.identity.namespaces()[0].id
    namespace_id, kept = services.identity.import_namespace(
        Path(request.path), keep_old=request.keep_old, count=services.store.count
    )
    changed = namespace_id != before
    if changed:
        await services.namespaces_changed()
    return NamespaceResult(namespace_id.hex(), request.path, kept.hex() if kept else "", changed)
