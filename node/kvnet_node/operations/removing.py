"""Removing an artifact, here or from all machines of one owner. What others need of it stays, and is named.

From all machines it goes by a signed statement, which each of them follows at once or when it wakes.
"""

from collections.abc import Mapping

import msgspec

from kvnet.errors import UsageError
from kvnet.format.hashes import ArtifactHash, ChunkHash, artifact_text, short_text
from kvnet.store.interface import Store
from kvnet.store.names import NameBook, NamedVersion
from kvnet.trust.statement_bodies import Removal
from kvnet_node.namespace_files import MINE
from kvnet_node.operations import requests as r
from kvnet_node.operations.context import OperationContext
from kvnet_node.operations.swarms import asleep, awake, connected
from kvnet_node.operations.targets import resolve_version
from kvnet_node.services import Services


async def remove(ctx: OperationContext, request: r.RemoveRequest) -> r.RemoveResult:
    """Remove what a text means: a name's version, and its artifact with the last name; or a hash, with its names."""
    services = ctx.services
    meant = await resolve_version(services, request.target)
    artifacts = (meant.artifact, *meant.others) if isinstance(meant, NamedVersion) else (meant,)
    chunks = await services.lane.run(_chunks_of, services.store, artifacts)
    if request.everywhere:
        result = await remove_everywhere(services, artifacts)
    else:
        result = await services.lane.run(remove_meant, services.store, services.names, meant)
        if result.removed:
            # Others need the lane meanwhile.
            compacted_bytes = await services.background.run(services.store.compact)
            result = msgspec.structs.replace(result, freed_bytes=result.freed_bytes + compacted_bytes)
    if result.removed:
        scopes = {bytes(each.id): each.name for each in services.identity.namespaces()}
        stays_bytes, needed_by = await services.lane.run(what_stays, services.store, services.names, chunks, scopes)
        result = msgspec.structs.replace(result, stays_bytes=stays_bytes, needed_by=needed_by)
    if services.node is not None:
        for artifact in artifacts:
            if await services.lane.run(services.store.get, artifact) is None:
                services.node.removed(artifact)
    return result


def remove_meant(store: Store, names: NameBook, meant: NamedVersion | ArtifactHash) -> r.RemoveResult:
    """Remove the artifact, and its names last: whoever is killed in between says the same once more. Blocking.

    Packs that others use in part are written anew by ``Store.compact`` afterwards.
    """
    if isinstance(meant, NamedVersion):
        artifact = meant.artifact
        left = {
            each: [version for version in versions if version.text != meant.text]
            for each, versions in names.by_artifact().items()
        }
        kept_by = [version.text for version in left.get(artifact, [])]
        remaining = [each.text for versions in left.values() for each in versions if each.name == meant.name]
        # What a name means may have been removed before.
        doomed = not kept_by and store.get(artifact) is not None
        # The same state in other codecs had no other name.
        others = [each for each in meant.others if not left.get(each) and store.get(each) is not None]
    else:
        artifact, kept_by, remaining, others = meant, [], [], []
        # A hash means what is held.
        named = any(version.artifact == artifact for version in names.by_artifact().get(artifact, []))
        doomed = not named or store.get(artifact) is not None
    freed = sum(store.release(each) for each in ([artifact] if doomed else []) + others)
    gone = names.remove(meant.name, meant.version) if isinstance(meant, NamedVersion) else names.forget(artifact)
    return r.RemoveResult(artifact_text(artifact), gone, freed, doomed, kept_by, remaining)


def _chunks_of(store: Store, artifacts: tuple[ArtifactHash, ...]) -> dict[ChunkHash, int]:
    records = [record for each in artifacts if (record := store.get(each)) is not None]
    return {entry.hash: entry.length_bytes for record in records for entry in record.entries if entry.length_bytes}


def what_stays(
    store: Store, names: NameBook, chunks: Mapping[ChunkHash, int], scopes: Mapping[bytes, str]
) -> tuple[int, list[str]]:
    """What of an artifact that was removed is held still, and for whom. Blocking.

    Args:
        store: it was removed from.
        names: of artifacts in it.
        chunks: of what was removed, with their lengths in bytes.
        scopes: what namespaces are called, by id.

    Returns:
        Bytes of its chunks that stay, and the artifacts that need them: by name, else by short hash and scope, who
        needs most first; none where they are only in use just now.
    """
    stays = {chunk for chunk in chunks if store.has_chunk(chunk)}
    if not stays:
        return 0, []
    named = names.by_artifact()
    needed_by: list[tuple[int, str]] = []
    for record in store.artifacts():
        if shared := stays.intersection(entry.hash for entry in record.entries):
            called = [version.text for version in named.get(record.hash, [])] or [short_text(record.hash)]
            scope = scopes.get(record.manifest.namespace, "")
            text = ", ".join(called) + (f" in {scope}" if scope not in {"", MINE} else "")
            needed_by.append((sum(chunks[chunk] for chunk in shared), text))
    needed_by.sort(reverse=True)
    return sum(chunks[chunk] for chunk in stays), [text for _, text in needed_by]


async def remove_everywhere(services: Services, artifacts: tuple[ArtifactHash, ...]) -> r.RemoveResult:
    """Remove artifacts of ``mine`` here, and have the owner's other machines do the same, under whatever name.

    Raises:
        UsageError: an artifact that is not in ``mine``: what others were given is theirs.
        StoreError: it could not be written.
    """
    mine = services.identity.swarms.mine
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
    before = await services.lane.run(services.store.usage)
    # What the name means last: whoever is killed in between has the name, and says the same once more.
    for artifact in reversed(artifacts):
        body = Removal(sequence=0, issued=0, expires=0, namespace=mine.id, artifact=artifact)
        await rosters.say(mine, key, body)
    result = await services.lane.run(_remove_here, services, artifacts)
    await services.background.run(services.store.compact)
    # By what is held: the removal may have been followed as soon as it was said, by another task of this node.
    after = await services.lane.run(services.store.usage)
    freed_bytes = max(0, before.held_bytes - after.held_bytes)
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
    for artifact in artifacts:
        names += services.names.forget(artifact)
        # The removal that was just said may have been followed here already.
        if services.store.get(artifact) is not None:
            services.store.release(artifact)
    return r.RemoveResult(artifact_text(artifacts[0]), names, 0)
