"""What a person means by an artifact: a name, a version of a name, a full hash or a short one."""

import difflib
import re
from contextlib import suppress

from kvnet.errors import NotInStoreError, UnknownNameError, UsageError
from kvnet.format.hashes import ARTIFACT_PREFIX, SHORT_CHARACTERS, ArtifactHash, looks_like_hash
from kvnet.store.interface import ArtifactRecord
from kvnet.store.names import NamedVersion
from kvnet_node.services import Services

MAX_CLOSE = 3
CLOSE_CUTOFF = 0.6
"""How many names are offered in place of an unknown one, and how much of it they share (`difflib`'s own measure)."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}(?:@[1-9][0-9]{0,8})?")


async def resolve_target(services: Services, text: str) -> ArtifactHash:
    """The artifact that a text names; an exact name wins over a short hash.

    Raises:
        UsageError: neither a name nor a hash.
        UnknownNameError: a name that means nothing here.
        AmbiguousHashError: a short hash that fits several artifacts.
        NotInStoreError: a hash of nothing that is held here.
    """
    meant = await resolve_version(services, text)
    return meant.artifact if isinstance(meant, NamedVersion) else meant


async def resolve_version(services: Services, text: str) -> NamedVersion | ArtifactHash:
    """The version of a name, or the artifact of a hash, that a text means; raises as ``resolve_target``."""
    is_hash = looks_like_hash(text)
    if _NAME.fullmatch(text) and not text.startswith(ARTIFACT_PREFIX):
        try:
            return await services.lane.run(services.names.resolve, text)
        except UnknownNameError:
            if is_hash:
                with suppress(NotInStoreError):
                    return await services.lane.run(services.store.resolve, text)
            # What begins like a hash is one that was cut too short, and no name to be given.
            if not text.startswith(ARTIFACT_PREFIX[:-1]):
                raise await _unknown_name(services, text) from None
    if not is_hash:
        raise UsageError(
            f"expected a name or an artifact hash: `{ARTIFACT_PREFIX}` and at least {SHORT_CHARACTERS} more "
            f"characters, or {SHORT_CHARACTERS} or more characters of the part after it; found {text[:80]!r}",
            hint="kvnet list shows names and hashes",
        )
    return await services.lane.run(services.store.resolve, text)


async def _unknown_name(services: Services, text: str) -> UnknownNameError:
    """That nothing here is called so, and what is called nearly so."""
    name, at, version = text.partition("@")
    names = await services.lane.run(services.names.names)
    if name in names:
        there = ", ".join(each.text for each in await services.lane.run(services.names.versions, name))
        return UnknownNameError(
            f"no version {version} of {name} on this node; there are: {there}", hint=f"{name} alone is the newest"
        )
    close = difflib.get_close_matches(name, names, n=MAX_CLOSE, cutoff=CLOSE_CUTOFF)
    hint = f"did you mean {' or '.join(f'{each}{at}{version}' for each in close)}? " if close else ""
    return UnknownNameError(f"no named context {name} on this node", hint=f"{hint}kvnet list shows names and hashes")


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
