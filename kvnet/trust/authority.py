"""What revocations and rotations come to: whose word counts for what. Pure.

- The revocation of an artifact counts when its publisher signed it, or a key of this node, or one of the owner's
  devices.
- The revocation of a key counts everywhere when that key signed it itself, or a key of this node, or one of the owner's
  devices; and in a namespace when its founder did. A device whose own key is revoked is heard about its own key and its
  own artifacts alone. A key of this node comes before the founder of ``mine``, and that before other devices: so a
  stolen device cannot silence the rest.
- Where a key was believed, the one it rotated to is believed too. What the old one signed before stays good, what it
  signs later does not count. A key that rotated to two others is followed to neither: one of the two was not its owner.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from kvnet.trust.envelope import StatementType
from kvnet.trust.statement_bodies import KeyRotation, Revocation
from kvnet.trust.statements import SignedStatement

MAX_ROTATIONS: Final = 16
"""Rotations one after another that are followed."""


def _nothing() -> Mapping[bytes, frozenset[bytes]]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Keys:
    """Whose word counts for more than what is its own.

    Attributes:
        own: publisher ids of this node.
        devices: publisher ids of the owner's machines, this one's included or not.
        founder: publisher id of the founder of ``mine``; empty when there is none.
        founders: namespace id -> publisher id of its founder.
    """

    own: frozenset[bytes] = frozenset()
    devices: frozenset[bytes] = frozenset()
    founder: bytes = b""
    founders: Mapping[bytes, bytes] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Rotated:
    """A key that its owner uses no more.

    Attributes:
        new: the key in its place; empty when it is not clear which.
        since_s: seconds since 1970.
    """

    new: bytes
    since_s: int


@dataclass(frozen=True, slots=True)
class Standing:
    """What statements say of keys and artifacts, as far as it counts on this node.

    Attributes:
        revoked: publishers that count for nothing anywhere.
        revoked_in: namespace id -> publishers that count for nothing there.
        artifacts: artifact hash -> who revokes it.
        believed: publishers whose word counts on any artifact.
        rotated: publisher -> what became of it.
        withheld: namespace id -> publishers of whom a revocation is known to be missing there.
    """

    revoked: frozenset[bytes] = frozenset()
    revoked_in: Mapping[bytes, frozenset[bytes]] = field(default_factory=_nothing)
    artifacts: Mapping[bytes, frozenset[bytes]] = field(default_factory=_nothing)
    believed: frozenset[bytes] = frozenset()
    rotated: Mapping[bytes, Rotated] = field(default_factory=lambda: MappingProxyType({}))
    withheld: Mapping[bytes, frozenset[bytes]] = field(default_factory=_nothing)

    def is_revoked(self, publisher: bytes, namespace: bytes) -> bool:
        """Whether a publisher counts for nothing in a namespace."""
        return publisher in self.revoked or publisher in self.revoked_in.get(namespace, frozenset())

    def is_revoked_artifact(self, artifact: bytes, publisher: bytes) -> bool:
        """Whether an artifact of this publisher is revoked by somebody whose word counts."""
        return not self.artifacts.get(artifact, frozenset()).isdisjoint(self.believed | {publisher})

    def is_withheld(self, publisher: bytes, namespace: bytes) -> bool:
        """Whether a revocation of this publisher's is known to exist that has not arrived."""
        return publisher in self.withheld.get(namespace, frozenset())

    def followed(self, publishers: AbstractSet[bytes]) -> frozenset[bytes]:
        """These publishers, and those they rotated to."""
        found = set(publishers)
        for publisher in publishers:
            current = publisher
            for _ in range(MAX_ROTATIONS):
                rotated = self.rotated.get(current)
                if rotated is None or not rotated.new or rotated.new in found:
                    break
                current = rotated.new
                found.add(current)
        return frozenset(found)


def standing(
    statements: Iterable[SignedStatement],
    keys: Keys,
    *,
    scopes: Mapping[bytes, AbstractSet[bytes]],
    withheld: Mapping[bytes, frozenset[bytes]] | None = None,
) -> Standing:
    """What these statements come to on a node with these keys.

    Args:
        statements: revocations and rotations that outrank all others of their signers; others are passed over.
        keys: whose word counts for more.
        scopes: envelope -> ids of the namespaces it was told in.
        withheld: as in `Standing`.
    """
    revocations: list[tuple[SignedStatement, Revocation]] = []
    rotations: list[tuple[bytes, KeyRotation]] = []
    for statement in statements:
        if isinstance(statement.body, Revocation):
            revocations.append((statement, statement.body))
        elif isinstance(statement.body, KeyRotation):
            rotations.append((statement.signer, statement.body))
    of_keys = [(said, body) for said, body in revocations if body.kind == "publisher"]
    self_revoked = {said.signer: body.sequence for said, body in of_keys if body.target == said.signer}
    rotated = _rotated(rotations, self_revoked)
    revoked = _revoked_everywhere(of_keys, keys)
    return Standing(
        revoked=revoked,
        revoked_in=_revoked_in(of_keys, keys, scopes, revoked, rotated),
        artifacts=_artifacts(revocations),
        believed=(keys.own | keys.devices) - revoked,
        rotated=rotated,
        withheld=withheld or {},
    )


def _rotated(rotations: Iterable[tuple[bytes, KeyRotation]], self_revoked: Mapping[bytes, int]) -> dict[bytes, Rotated]:
    """Rotations after a key has revoked itself do not count: whoever makes them has stolen it."""
    of_key: dict[bytes, list[KeyRotation]] = {}
    for signer, body in rotations:
        if body.sequence < self_revoked.get(signer, 2**63):
            of_key.setdefault(signer, []).append(body)
    return {
        signer: Rotated(bodies[0].new if len(bodies) == 1 else b"", min(body.issued for body in bodies))
        for signer, bodies in of_key.items()
    }


def _revoked_everywhere(of_keys: Iterable[tuple[SignedStatement, Revocation]], keys: Keys) -> frozenset[bytes]:
    said = [(statement.signer, body.target) for statement, body in of_keys]
    revoked = {target for signer, target in said if signer == target}
    # A key of this node that was revoked has been stolen, perhaps: it takes nothing from the one in its place.
    speaking = keys.own - revoked
    revoked |= {target for signer, target in said if signer in speaking}
    # No other machine takes this node's own keys from it, or those of whoever stands above it.
    safe = set(keys.own)
    if keys.founder and keys.founder not in revoked:
        safe.add(keys.founder)
        revoked |= {target for signer, target in said if signer == keys.founder and target not in keys.own}
    heard = keys.devices - revoked
    revoked |= {target for signer, target in said if signer in heard and target not in safe}
    return frozenset(revoked)


def _revoked_in(
    of_keys: Iterable[tuple[SignedStatement, Revocation]],
    keys: Keys,
    scopes: Mapping[bytes, AbstractSet[bytes]],
    revoked: frozenset[bytes],
    rotated: Mapping[bytes, Rotated],
) -> dict[bytes, frozenset[bytes]]:
    plain = Standing(rotated=rotated)
    found: dict[bytes, set[bytes]] = {}
    for namespace, founder in keys.founders.items():
        speakers = plain.followed({founder}) - revoked
        for statement, body in of_keys:
            if statement.signer in speakers and namespace in scopes.get(statement.envelope, frozenset()):
                found.setdefault(namespace, set()).add(body.target)
    return {namespace: frozenset(targets) for namespace, targets in found.items()}


def _artifacts(revocations: Iterable[tuple[SignedStatement, Revocation]]) -> dict[bytes, frozenset[bytes]]:
    found: dict[bytes, set[bytes]] = {}
    for statement, body in revocations:
        if body.kind == "artifact":
            found.setdefault(body.target, set()).add(statement.signer)
    return {artifact: frozenset(signers) for artifact, signers in found.items()}


RELEVANT: Final = frozenset({StatementType.REVOCATION, StatementType.KEY_ROTATION})
"""The types that `standing` looks at."""
