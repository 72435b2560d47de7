"""The namespaces of one data directory, and in which order what is known of them is written.

Joining writes what is known of a namespace before its secrets, leaving removes the secrets first: a process that ends
in between leaves words about a namespace that this node is not in, and the next start drops them. A namespace whose
founder is not known was made here, and nobody has been invited to it. The files: `kvnet_node.namespace_files`.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvnet.errors import StoreError, UsageError, elsewhere
from kvnet.exchange.rosters import Scope
from kvnet.format.hashes import NamespaceId
from kvnet.trust.namespace import PUBLIC, Namespace
from kvnet_node.namespace_files import MINE, Known, NamespaceFiles, fresh_namespace

RESERVED_NAMES: Final = frozenset({MINE, "public", "kept", "former"})
MAX_NAMESPACES: Final = 8
"""A proof of membership has 8 entries."""


class SwarmFiles:
    """The namespaces in one directory. The caller owns the lock of the data directory.

    Args:
        directory: made 0700 at first use.
        public: this node is in the public namespace too.
        now: seconds since 1970.
    """

    def __init__(self, directory: Path, *, public: bool = False, now: Callable[[], float] = time.time) -> None:
        self._on_disk = NamespaceFiles(directory, now)
        self._public = public
        self._files: dict[NamespaceId, tuple[Path, Namespace]] = {}
        self._former: tuple[Namespace, ...] = ()
        self._known: dict[str, Known] = {}
        self._scopes: tuple[Scope, ...] = ()

    def load(self) -> None:
        """Read everything; make ``mine`` when there is none.

        Raises:
            ConfigError: a file that is not what it should be, or that others may read.
        """
        files = self._on_disk.read()
        former, known = self._on_disk.read_former(files.keys()), self._on_disk.read_known()
        # All at once: while one thread reads the files, another asks what is there.
        self._files, self._former, self._known = files, former, known
        self._scopes = self._scopes_now()

    def drop_unknown(self) -> None:
        """Forget what is known of namespaces that this node is not in."""
        there = {namespace.hex() for namespace in self._files}
        if not self._known.keys() <= there:
            self._write_known({each: known for each, known in self._known.items() if each in there})

    # --- reading ------------------------------------------------------------------------------------------------------

    @property
    def mine(self) -> Namespace:
        """This node's own namespace."""
        return next(iter(self._files.values()))[1]

    def all(self) -> tuple[Namespace, ...]:
        """Every namespace this node is in; ``mine`` first, the public one last."""
        found = [namespace for _, namespace in self._files.values()]
        return (*found, PUBLIC) if self._public else tuple(found)

    def former(self) -> tuple[Namespace, ...]:
        """The same under lookup secrets that were replaced of late, the newest first."""
        return self._former

    def swarms(self) -> tuple[Namespace, ...]:
        """Those that were made or joined by name."""
        return tuple(namespace for path, namespace in self._files.values() if self._on_disk.is_swarm(path))

    def named(self, name: str) -> Namespace | None:
        """``mine`` or the swarm of a name."""
        return self.mine if name == MINE else next((each for each in self.swarms() if each.name == name), None)

    def known(self, namespace: NamespaceId) -> Known:
        """What else is known of a namespace."""
        return self._known.get(namespace.hex(), Known())

    def scopes(self) -> tuple[Scope, ...]:
        """Those whose founder is known; the same tuple until something changes."""
        return self._scopes

    def _scopes_now(self) -> tuple[Scope, ...]:
        devices = {namespace.id for path, namespace in self._files.values() if not self._on_disk.is_swarm(path)}
        return tuple(
            Scope(namespace, founder, namespace.id in devices)
            for _, namespace in self._files.values()
            if (founder := self.known(namespace.id).founder)
        )

    def addresses(self) -> tuple[str, ...]:
        """Where members were when this node joined them, each once."""
        joined = [self.known(namespace.id).addresses for _, namespace in self._files.values()]
        return tuple(dict.fromkeys(address for addresses in joined for address in addresses))

    # --- changing -----------------------------------------------------------------------------------------------------

    def make_swarm(self, name: str) -> Namespace:
        """Make a new swarm.

        Raises:
            UsageError: not a name for one, or there is one of that name.
            StoreError: no room for one more namespace.
        """
        self.check_new(name)
        swarm = fresh_namespace(name)
        self._put(swarm)
        return swarm

    def check_new(self, name: str) -> None:
        """Whether a swarm of that name can be made or joined.

        Raises:
            UsageError: not a name for one, or there is one of that name.
            StoreError: no room for one more namespace.
        """
        Namespace(name, bytes([1]) * 32, bytes([1]) * 32)
        if name in RESERVED_NAMES:
            raise UsageError(f"expected the name of a swarm, found {name}, which means something else")
        if self.named(name) is not None:
            raise UsageError(
                f"expected a name that no swarm of this node has, found {name}", hint="choose another name"
            )
        self._require_room()

    def _require_room(self) -> None:
        if len(self.all()) >= MAX_NAMESPACES:
            raise StoreError(
                f"a node is in at most {MAX_NAMESPACES} namespaces; this one is in as many",
                hint="kvnet swarm list shows them; kvnet leave NAME leaves one",
            )

    def join_swarm(self, given: Namespace, known: Known) -> Namespace:
        """Take in a swarm; its name here is that of ``given``.

        Raises:
            UsageError: another swarm has this name.
            StoreError: no room for one more namespace.
        """
        held = self._files.get(given.id)
        if held is None:
            self.check_new(given.name)
        self.know(given.id, known)
        if held is None:
            self._put(given)
        else:
            self._replace(held[0], Namespace(held[1].name, given.prefix_secret, given.lookup_secret))
        return self._files[given.id][1]

    def join_mine(
        self, given: Namespace, known: Known | None, *, keep_old: bool, count: Callable[[NamespaceId], int]
    ) -> NamespaceId | None:
        """Make a namespace this node's ``mine``.

        Args:
            given: its secrets.
            known: what else is known of it.
            keep_old: keep the one it replaces, for what is in it.
            count: how many artifacts of a namespace the store holds.

        Returns:
            The id of the namespace kept; None when none was.

        Raises:
            StoreError: the old namespace holds artifacts and ``keep_old`` is False, or too many are kept.
        """
        old, new = self.mine, Namespace(MINE, given.prefix_secret, given.lookup_secret)
        kept = None
        if new.id != old.id:
            kept = self._keep(old, count(old.id), keep_old=keep_old, becomes=new.id)
        if known is not None:
            self.know(new.id, known)
        if new.id == old.id:
            self._replace(self._files[old.id][0], new)
        else:
            self._on_disk.write(self._on_disk.mine, new)
            for path, namespace in list(self._files.values()):
                if namespace.id == new.id:
                    self._on_disk.remove(path)
        self.load()
        return kept

    def check_replaceable(self, new: NamespaceId, *, keep_old: bool, count: Callable[[NamespaceId], int]) -> None:
        """Whether a namespace can become ``mine``, before anything is written.

        Args:
            new: its id.
            keep_old: keep the one it replaces, for what is in it.
            count: how many artifacts of a namespace the store holds.

        Raises:
            StoreError: the old namespace holds artifacts and ``keep_old`` is False, or too many are kept.
        """
        old = self.mine.id
        if new != old and (held := count(old)):
            self._check_keeping(held, keep_old=keep_old, becomes=new)

    def _check_keeping(self, held: int, *, keep_old: bool, becomes: NamespaceId) -> None:
        if not keep_old:
            raise StoreError(
                f"the namespace to be replaced holds {held} artifact{'s' if held != 1 else ''}, "
                "which nobody could look up any more",
                hint="--keep-old keeps it for them",
            )
        if becomes not in self._files:
            self._require_room()

    def _keep(self, old: Namespace, held: int, *, keep_old: bool, becomes: NamespaceId) -> NamespaceId | None:
        if not held:
            return None
        self._check_keeping(held, keep_old=keep_old, becomes=becomes)
        self._on_disk.write(self._on_disk.kept(old.id), old)
        return old.id

    def leavable(self, name: str) -> Namespace:
        """The swarm of a name, which can be left.

        Raises:
            UsageError: no swarm of that name, or ``mine``.
        """
        if name == MINE:
            raise UsageError(
                "expected the name of a swarm, found mine, which every node has",
                hint=f"to take this machine out, run {elsewhere('kvnet swarm remove')} on another of yours",
            )
        swarm = self.named(name)
        if swarm is None:
            raise no_swarm(name)
        return swarm

    def leave(self, name: str) -> Namespace:
        """Forget a swarm and its secrets.

        Raises:
            UsageError: no swarm of that name, or ``mine``.
        """
        swarm = self.leavable(name)
        self._on_disk.remove(self._files[swarm.id][0])
        self._write_known({each: known for each, known in self._known.items() if each != swarm.id.hex()})
        self.load()
        return swarm

    def rekey(self, namespace: NamespaceId, lookup_secret: bytes) -> None:
        """Replace a lookup secret, and keep the former one among the former."""
        path, held = self._files[namespace]
        if held.lookup_secret != lookup_secret:
            self._replace(path, Namespace(held.name, held.prefix_secret, lookup_secret))

    def _replace(self, path: Path, new: Namespace) -> None:
        held = self._files[new.id][1]
        # It may be kept already, by an attempt that got no further: twice would push older ones out.
        kept = {(each.id, each.lookup_secret) for each in self._on_disk.read_former(self._files)}
        if held.lookup_secret != new.lookup_secret and (held.id, held.lookup_secret) not in kept:
            self._on_disk.write_former(held)
        self._on_disk.write(path, new)
        self.load()

    def know(self, namespace: NamespaceId, known: Known) -> None:
        """Write down what else is known of a namespace."""
        self._write_known({**self._known, namespace.hex(): known})

    def _write_known(self, known: dict[str, Known]) -> None:
        self._on_disk.write_known(known)
        self._known = known
        self._scopes = self._scopes_now()

    def _put(self, swarm: Namespace) -> None:
        self._on_disk.write(self._on_disk.swarm(swarm.name), swarm)
        self.load()


def no_swarm(name: str) -> UsageError:
    """There is no swarm of this name on this node."""
    return UsageError(
        f"expected a swarm of this node, found {name[:80]!r}",
        hint="kvnet swarm list shows them; kvnet invite --colleague --swarm NAME makes one",
    )
