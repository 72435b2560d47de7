"""Removing from all machines of one owner: a signed statement that each of them follows, at once or when it wakes."""

from kvnet.errors import UsageError
from kvnet.format.hashes import ArtifactHash, artifact_text
from kvnet.store.names import NamedVersion
from kvnet.trust.statement_bodies import Removal
from kvnet_node.operations import requests as r
from kvnet_node.operations.swarms import asleep, awake, connected
from kvnet_node.services import Services


async def remove_everywhere(services: Services, meant: NamedVersion | ArtifactHash) -> r.RemoveResult:
    """Remove artifacts of ``mine`` here, and have the owner's other machines do the same, under whatever name.

    Raises:
        UsageError: an artifact that is not in ``mine``: what others were given is theirs.
        StoreError: it could not be written.
    """
    mine = services.identity.swarms.mine
    artifacts = (meant.artifact, *meant.others) if isinstance(meant, NamedVersion) else (meant,)
    for artifact in artifacts:
        record = await services.lane.run(services.store.get, artifact)
        if record is not None and record.manifest.namespace != mine.id:
            raise UsageError(
                f"expected an artifact of mine, found one of another namespace: {artifact_text(artifact)}",
                hint="kvnet rm without --everywhere removes it here; what members have fetched is theirs",
            )
    rosters = services.memberships.rosters
    roster = rosters.roster(mine.id)
    key = (rosters.own_key(roster) if roster is not None else None) or services.identity.signing_key()
    # What the name means last: whoever is killed in between has the name, and says the same once more.
    for artifact in reversed(artifacts):
        body = Removal(sequence=0, issued=0, expires=0, namespace=mine.id, artifact=artifact)
        await rosters.say(mine, key, body)
    result = await services.lane.run(_remove_here, services, artifacts)
    freed_bytes = result.freed_bytes + await services.background.run(services.store.compact)
    for artifact in artifacts:
        if services.node is not None:
            services.node.removed(artifact)
    if roster is None:
        return r.RemoveResult(result.artifact, result.names, freed_bytes)
    here = connected(services, mine)
    return r.RemoveResult(
        result.artifact,
        result.names,
        freed_bytes,
        told=awake(services, roster, here),
        asleep=asleep(services, roster, here),
    )


def _remove_here(services: Services, artifacts: tuple[ArtifactHash, ...]) -> r.RemoveResult:
    names: list[str] = []
    freed_bytes = 0
    for artifact in artifacts:
        names += services.names.forget(artifact)
        # The removal that was just said may have been followed here already.
        if services.store.get(artifact) is not None:
            freed_bytes += services.store.release(artifact)
    return r.RemoveResult(artifact_text(artifacts[0]), names, freed_bytes)
