"""What a person means by an artifact: a name, a version of a name, a full hash or a short one."""

import re

from kvnet.errors import NotInStoreError, UnknownNameError, UsageError
from kvnet.format.hashes import ARTIFACT_PREFIX, ArtifactHash, looks_like_hash
from kvnet.store.interface import ArtifactRecord
from kvnet_node.wiring import Services

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}(?:@[1-9][0-9]{0,8})?")


async def resolve_target(services: Services, text: str) -> ArtifactHash:
    """The artifact that a text names; an exact name wins over a short hash.

    Raises:
        UsageError: neither a name nor a hash.
        UnknownNameError: a name that means nothing here.
        AmbiguousHashError: a short hash that fits several artifacts.
        NotInStoreError: a hash of nothing that is held here.
    """
    is_hash = looks_like_hash(text)
    if _NAME.fullmatch(text) and not text.startswith(ARTIFACT_PREFIX):
        try:
            return (await services.lane.run(services.names.resolve, text)).artifact
        except UnknownNameError:
            if not is_hash:
                raise
            try:
                return await services.lane.run(services.store.resolve, text)
            except NotInStoreError:
                pass
            raise
    if not is_hash:
        raise UsageError(
            f"expected a name, or an artifact hash or at least 8 characters of one, found {text[:80]!r}",
            hint="kvnet list shows names and hashes",
        )
    return await services.lane.run(services.store.resolve, text)


async def held_artifact(services: Services, text: str) -> ArtifactRecord:
    """The record of the artifact that a text names.

    Raises:
        NotInStoreError: the name or hash is known, the artifact is not held (any more).
        UsageError: as ``resolve_target``.
    """
    artifact = await resolve_target(services, text)
    record = await services.lane.run(services.store.get, artifact)
    if record is None:
        raise NotInStoreError(
            f"expected the artifact of {text} in this store, found it gone", hint="kvnet fetch gets it from peers"
        )
    return record
