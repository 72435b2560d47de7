"""What a node has for others: served to peers, told to members, announced to the DHT; or none of it any more."""

from collections.abc import Sequence

from kvnet.exchange.announcer import Announcer, announced_keys
from kvnet.exchange.identity import Identity
from kvnet.exchange.lane import Lane
from kvnet.exchange.serving import ChunkServer
from kvnet.exchange.tables import Tables
from kvnet.format.hashes import ArtifactHash, PrefixKey
from kvnet.store.interface import ArtifactRecord, Store


class Offering:
    """The artifacts of this node that peers may have.

    Args:
        store: what is held.
        lane: where blocking store work runs.
        identity: namespaces and policy.
        server: serves them.
        announcer: announces them.
        announces: whether anything is announced; a node that does not serve announces nothing.

    Attributes:
        tables: tells members what is held; None: nobody is told.
    """

    def __init__(
        self,
        store: Store,
        lane: Lane,
        identity: Identity,
        server: ChunkServer,
        announcer: Announcer,
        *,
        announces: bool,
    ) -> None:
        self._store = store
        self._lane = lane
        self._identity = identity
        self._server = server
        self._announcer = announcer
        self._announces = announces
        self._announced: dict[ArtifactHash, list[bytes]] = {}
        self.tables: Tables | None = None

    async def begin(self) -> None:
        """Take up what an earlier run has announced, and announce everything that is held."""
        await self._announcer.load()
        await self._announce_all()
        await self._announcer.loaded()

    async def reload(self) -> None:
        """The namespaces have changed: serve and announce by them."""
        await self._server.load()
        self._announcer.clear()
        self._announced.clear()
        await self._announce_all()

    async def _announce_all(self) -> None:
        """Everything held, the newest last, so that it is announced first."""
        if self.tables is not None:
            self.tables.own.begin_reload()
        held = await self._lane.run(self._store.artifacts)
        may_serve = self._identity.policy().may_serve
        records = sorted((each for each in held if may_serve(each.manifest)), key=lambda each: each.manifest.created)
        rows: dict[ArtifactHash, list[tuple[int, PrefixKey]]] = {}
        for namespace in self._identity.namespaces():
            for key, artifact, n_blocks in await self._lane.run(self._store.prefix_rows, namespace.id):
                rows.setdefault(artifact, []).append((n_blocks, key))
        keys = {record.hash: [key for _, key in sorted(rows.get(record.hash, []))] for record in records}
        for record in records:
            self._announce(record, keys[record.hash])
        if self.tables is not None:
            self.tables.own.reload((record, keys[record.hash]) for record in records if keys[record.hash])

    def _announce(self, record: ArtifactRecord, keys: Sequence[PrefixKey]) -> None:
        """Only what is held whole: whoever follows a record finds all of it here."""
        if record.complete and self._announces and len(keys) == record.manifest.n_blocks:
            announced = announced_keys(self._identity, record.manifest, record.hash, list(keys))
            self._announced[record.hash] = announced
            self._announcer.add(announced)

    def hold(self, record: ArtifactRecord, keys: Sequence[PrefixKey]) -> None:
        """An artifact is in the store now; nothing happens with one that the policy does not let others have."""
        if not self._identity.policy().may_serve(record.manifest):
            return
        self._server.offer(record, keys)
        self._announce(record, keys)
        if self.tables is not None:
            self.tables.own.hold(record, keys)

    def used(self, artifact: ArtifactHash) -> None:
        """An artifact was reused: it is announced before those that nobody uses."""
        self._announcer.used(self._announced.get(artifact, ()))

    def drop(self, artifact: ArtifactHash) -> None:
        """Serve and announce an artifact no longer; keys that others share go on being announced."""
        self._server.withdraw(artifact)
        if self.tables is not None:
            self.tables.own.drop(artifact)
        gone = self._announced.pop(artifact, [])
        shared = {key for keys in self._announced.values() for key in keys}
        self._announcer.remove(key for key in gone if key not in shared)
