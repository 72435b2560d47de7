"""Operations that widen the scope of an artifact: share with a swarm, publish to everybody."""

import time
from functools import partial

from kvnet.errors import ConfigError, UsageError
from kvnet.exchange.sharing import Shared, share
from kvnet.format.hashes import ArtifactHash, artifact_text
from kvnet.store.names import NamedVersion
from kvnet.trust.keys import publisher_text
from kvnet.trust.namespace import PUBLIC, Namespace
from kvnet_node.namespace_files import MINE
from kvnet_node.operations import requests as r
from kvnet_node.operations.context import OperationContext
from kvnet_node.operations.shared import tell_name
from kvnet_node.operations.swarms import removed_from
from kvnet_node.operations.targets import held_artifact, resolve_version
from kvnet_node.services import Services
from kvnet_node.swarms import no_swarm


async def share_with(ctx: OperationContext, request: r.ShareRequest) -> r.ShareResult:
    """Make an artifact one of a swarm, or of the public namespace, too."""
    services = ctx.services
    namespace = _target(services, request.swarm)
    meant = await resolve_version(services, request.target)
    record = await held_artifact(services, request.target)
    wanted: tuple[ArtifactHash, ...] = (record.hash,)
    if isinstance(meant, NamedVersion):
        wanted = (meant.artifact, *meant.others)
    shared: list[Shared] = []
    for artifact in () if request.dry_run else wanted:
        made = partial(share, services.store, services.identity, artifact, namespace, created_s=int(time.time()))
        shared.append(await services.lane.run(made))
    for each in shared:
        if services.node is not None:
            services.node.published(each.record, each.keys)
    hashes = [each.record.hash for each in shared]
    called = await _called(services, meant, record.hash)
    if called is not None and hashes and namespace != PUBLIC:
        await tell_name(ctx, called, hashes[0], namespace)
    roster = services.memberships.rosters.roster(namespace.id)
    known = set(roster.members) if roster is not None else set()
    own = {key.public for key in services.identity.publisher_keys()}
    sources = {span.publisher for each in shared for span in each.record.manifest.derived_from}
    return r.ShareResult(
        swarm=namespace.name,
        source=artifact_text(record.hash),
        artifacts=[artifact_text(each) for each in hashes],
        tokens=record.manifest.n_tokens,
        bytes=record.manifest.total_size_bytes,
        has_context=record.manifest.context_size_bytes > 0,
        existed=bool(shared) and all(each.existed for each in shared),
        strangers=sorted(publisher_text(each) for each in sources - known) if roster is not None else [],
        members=len(known - own),
        ticket=services.ticket(hashes[0], serving=ctx.serving) if hashes else "",
        name=called.name if called is not None else "",
    )


async def _called(
    services: Services, meant: NamedVersion | ArtifactHash, artifact: ArtifactHash
) -> NamedVersion | None:
    """The version of a name that was meant; of a hash the newest that means it here, if there is one."""
    if isinstance(meant, NamedVersion):
        return meant
    versions = (await services.lane.run(services.names.by_artifact)).get(artifact, [])
    return max(versions, key=lambda each: each.created_s, default=None)


def _target(services: Services, swarm: str) -> Namespace:
    if swarm == PUBLIC.name:
        if PUBLIC not in services.identity.namespaces():
            raise ConfigError(
                "expected a node that takes part in public sharing, found public.enabled off",
                hint="set `public.enabled = true` in config.toml and start the node again",
            )
        return PUBLIC
    if swarm == MINE:
        raise UsageError("expected the name of a swarm, found mine, where it is already", hint="kvnet swarm list")
    namespace = services.identity.swarms.named(swarm)
    if namespace is None:
        raise no_swarm(swarm)
    if swarm in removed_from(services):
        raise UsageError(
            f"expected a swarm that this machine is in, found {swarm}, which it was removed from",
            hint="joining anew takes a new invitation",
        )
    return namespace
