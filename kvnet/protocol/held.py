"""Held: what a node would serve to whom, by namespace, under the names that go over the wire. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvnet.format.chunks import ChunkEntry
from kvnet.format.hashes import ArtifactHash, LookupKey, PrefixKey
from kvnet.format.manifest import Manifest
from kvnet.trust.namespace import Namespace


class HeldArtifact(Protocol):
    """An artifact this node holds, as far as serving is concerned; the store's records are such."""

    @property
    def hash(self) -> ArtifactHash:
        """Its artifact hash."""

    @property
    def envelope(self) -> bytes:
        """Its signed manifest."""

    @property
    def manifest(self) -> Manifest:
        """The manifest in it."""

    @property
    def entries(self) -> Sequence[ChunkEntry]:
        """Its chunk list."""

    @property
    def pages(self) -> Sequence[bytes]:
        """The pages of its chunk list, as they are sent."""


@dataclass(slots=True)
class _Shelf:
    """What is held in one namespace, under the names its members use on the wire."""

    namespace: Namespace
    artifacts: dict[LookupKey, HeldArtifact] = field(default_factory=dict)
    holders: dict[LookupKey, set[LookupKey]] = field(default_factory=dict)
    keys_of: dict[LookupKey, list[LookupKey]] = field(default_factory=dict)

    def add(self, artifact: HeldArtifact, prefix_keys: Iterable[PrefixKey]) -> None:
        name = self.namespace.keyed_artifact(artifact.hash)
        self.artifacts[name] = artifact
        self.keys_of[name] = list(dict.fromkeys(map(self.namespace.lookup_key, prefix_keys)))
        for key in self.keys_of[name]:
            self.holders.setdefault(key, set()).add(name)

    def remove(self, artifact: ArtifactHash) -> None:
        name = self.namespace.keyed_artifact(artifact)
        if self.artifacts.pop(name, None) is None:
            return
        for key in self.keys_of.pop(name):
            self.holders[key].discard(name)
            if not self.holders[key]:
                del self.holders[key]


class HeldTable:
    """What this node would serve, by namespace. Prefix keys and artifact hashes are kept in their keyed form.

    Args:
        namespaces: those this node is in now.
    """

    def __init__(self, namespaces: Sequence[Namespace]) -> None:
        self._shelves = {namespace: _Shelf(namespace) for namespace in namespaces}

    def add(self, artifact: HeldArtifact, prefix_keys: Iterable[PrefixKey]) -> bool:
        """Offer an artifact.

        Args:
            artifact: held, complete or in part.
            prefix_keys: its key of each block, the first block first.

        Returns:
            Whether this node is in its namespace; otherwise it is offered to nobody.
        """
        self.remove(artifact.hash)
        keys = list(prefix_keys)
        offered = False
        for namespace, shelf in self._shelves.items():
            if namespace.id == artifact.manifest.namespace:
                shelf.add(artifact, keys)
                offered = True
        return offered

    def remove(self, artifact: ArtifactHash) -> None:
        """Offer an artifact no longer."""
        for shelf in self._shelves.values():
            shelf.remove(artifact)

    def __len__(self) -> int:
        return sum(len(shelf.artifacts) for shelf in self._shelves.values())

    def find(self, namespace: Namespace | None, name: LookupKey) -> HeldArtifact | None:
        """An artifact by its keyed name in a namespace; None stands for one that is not proved."""
        shelf = self._shelf(namespace)
        return None if shelf is None else shelf.artifacts.get(name)

    def match(self, namespace: Namespace | None, keys: Sequence[bytes]) -> list[tuple[int, LookupKey, HeldArtifact]]:
        """Artifacts that have one of the keys, each at its deepest: (key index, keyed name, artifact)."""
        shelf = self._shelf(namespace)
        if shelf is None:
            return []
        found: dict[LookupKey, int] = {}
        for key_index, key in enumerate(keys):
            for name in shelf.holders.get(LookupKey(key), ()):
                found.setdefault(name, key_index)
        return [(key_index, name, shelf.artifacts[name]) for name, key_index in found.items()]

    def knows(self, namespace: Namespace) -> bool:
        """Whether this node is in a namespace still, with this very lookup secret."""
        return namespace in self._shelves

    def _shelf(self, namespace: Namespace | None) -> _Shelf | None:
        return None if namespace is None else self._shelves.get(namespace)
