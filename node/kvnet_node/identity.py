"""Who this node is: publisher keys, namespaces, and the publishers it trusts; the network keeps the peer key.

Everything is made at first use. Every secret is a file of its own, 0600 from its first byte, and is never printed,
logged or sent. The caller owns the lock of the data directory, so no two processes write here at once.
"""

import datetime as dt
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvnet.errors import ConfigError, TrustError, UsageError, elsewhere
from kvnet.exchange.measured import Measurements
from kvnet.exchange.rosters import Rosters
from kvnet.exchange.statements import Statements
from kvnet.format.hashes import NamespaceId, PrefixKey
from kvnet.format.manifest import Manifest
from kvnet.format.prefix import block_keys
from kvnet.trust.keys import PublisherKey, parse_publisher_text, publisher_text
from kvnet.trust.namespace import Namespace, decode_namespace_file, encode_namespace_file
from kvnet.trust.policy import Refusal, TrustPolicy
from kvnet.trust.statement_bodies import KeyRotation
from kvnet.trust.statements import SignedStatement
from kvnet_node.invitations import InvitationBook
from kvnet_node.namespace_files import check_private, read_bounded
from kvnet_node.paths import DataPaths, keep_private, write_private
from kvnet_node.swarms import SwarmFiles

SEED_BYTES = 32

_KEY_FILE = re.compile(r"publisher-(\d{4})\.key")
_NEXT_KEY_FILE = "next-publisher.key"
_SEED_LINE = re.compile(rb"kvnet publisher key 1\n([0-9a-f]{64})\n")


class TrustedPublisher(msgspec.Struct, frozen=True):
    """A publisher this node trusts."""

    publisher: str
    label: str
    since: str


class _TrustedFile(msgspec.Struct, frozen=True):
    publishers: list[TrustedPublisher]


@dataclass(frozen=True, slots=True)
class OwnKey:
    """A publisher key of this node, the public half."""

    publisher: str
    current: bool


class NodeIdentity:
    """The identity in one data directory; fulfils ``kvnet.exchange.identity.Identity``.

    Args:
        paths: of the data directory.
        policy: "own" or "trusted".
        public: this node is in the public namespace too.

    Attributes:
        swarms: the namespaces, and what else is known of them.
        invitations: those of this node that are open.
        rosters: who is in which namespace; None where nobody reads statements.
    """

    def __init__(self, paths: DataPaths, policy: str, *, public: bool = False) -> None:
        self._paths = paths
        self._policy_name = policy
        self._keys: list[PublisherKey] = []
        self._trusted: list[TrustedPublisher] = []
        self.swarms = SwarmFiles(paths.namespaces_dir, public=public)
        self.invitations = InvitationBook(paths.invitations_file)
        self.rosters: Rosters | None = None
        self._statements: Statements | None = None
        self.numerics = Measurements()
        """What other machines were measured to compute; filled by whoever measures."""

    def load(self) -> None:
        """Read everything, and make what is missing.

        Raises:
            ConfigError: a file that is not what it should be, or that others may read.
        """
        numbered = sorted(path for path in self._paths.keys_dir.glob("*.key") if _KEY_FILE.fullmatch(path.name))
        self._keys = [PublisherKey(_read_seed(path)) for path in numbered]
        if not self._keys:
            self.new_key()
        self.swarms.load()
        self.invitations.load()
        self._load_trusted()

    def _load_trusted(self) -> None:
        try:
            content = self._paths.trusted_file.read_bytes()
        except FileNotFoundError:
            self._trusted = []
            return
        try:
            self._trusted = msgspec.json.decode(content, type=_TrustedFile).publishers
            for entry in self._trusted:
                parse_publisher_text(entry.publisher)
        except (msgspec.DecodeError, UsageError) as error:
            raise ConfigError(
                f"expected a list of trusted publishers in {self._paths.trusted_file}, found something else: {error}"
            ) from error

    def hear(self, statements: Statements, *, now: Callable[[], float] = time.time) -> Rosters:
        """Have what is said of keys, artifacts and members count, from now on; returns who is in which namespace."""
        self._statements = statements
        self.rosters = Rosters(statements, self.swarms.scopes, self.publisher_keys, now=now)
        return self.rosters

    # --- what the use cases read ---

    def signing_key(self) -> PublisherKey:
        """The publisher key that signs what this node adds: the newest."""
        return self._keys[-1]

    def policy(self) -> TrustPolicy:
        """Whose artifacts may be used now."""
        members: Mapping[bytes, frozenset[bytes]] = self.rosters.members() if self.rosters is not None else {}
        founders: dict[bytes, bytes] = {scope.namespace.id: scope.founder for scope in self.swarms.scopes()}
        mine = self.swarms.mine.id
        policy = TrustPolicy(
            self._policy_name,  # type: ignore[arg-type]
            own=frozenset(key.public for key in self._keys),
            trusted=frozenset(parse_publisher_text(entry.publisher) for entry in self._trusted),
            members=members,
            departed=self.rosters.departed() if self.rosters is not None else {},
            founders=founders,
            devices=members.get(mine, frozenset()),
            founder=founders.get(mine, b""),
        )
        return policy if self._statements is None else self._statements.applied(policy)

    def namespaces(self) -> tuple[Namespace, ...]:
        """Every namespace this node is in; ``mine`` first."""
        return self.swarms.all()

    def former(self) -> tuple[Namespace, ...]:
        """The same under lookup secrets that were replaced."""
        return self.swarms.former()

    def publisher_keys(self) -> list[PublisherKey]:
        """All publisher keys of this node, the newest last."""
        return list(self._keys)

    def keys_of(self, manifest: Manifest, tokens: list[int]) -> list[PrefixKey]:
        """The prefix keys of an artifact's token ids; empty when its namespace is none of this node's."""
        for namespace in self.namespaces():
            if namespace.id == manifest.namespace:
                return block_keys(namespace.prefix_root(manifest.fingerprint.hash), tokens)
        return []

    def judge(self, manifest: Manifest) -> None:
        """Ask the policy about an artifact whose signature has been checked.

        Raises:
            TrustError: it refuses; the reason and the next step are in it.
        """
        verdict = self.policy().judge(manifest)
        if isinstance(verdict, Refusal):
            raise TrustError(f"the artifact is not used: {verdict.text}", hint=verdict.hint)

    @property
    def policy_name(self) -> str:
        """The trust policy in force."""
        return self._policy_name

    # --- keys ---

    def publisher(self) -> str:
        """Publisher text of the signing key."""
        return publisher_text(self.signing_key().public)

    def own_keys(self) -> list[OwnKey]:
        """All keys of this node, the newest first."""
        newest = self._keys[-1].public
        return [OwnKey(publisher_text(key.public), key.public == newest) for key in reversed(self._keys)]

    def new_key(self) -> str:
        """Make a new signing key and return its publisher text; older ones stay this node's own."""
        seed = secrets.token_bytes(SEED_BYTES)
        _write_seed(self._free_key_file(), seed)
        self._keys.append(PublisherKey(seed))
        return self.publisher()

    def next_key(self) -> PublisherKey:
        """The key that will sign once `adopt_next_key` is called; on disk, and the same one until then.

        It is there before anybody is told of it, and signs nothing before its predecessor has said that it may.
        """
        file = self._next_key_file
        if not file.exists():
            _write_seed(file, secrets.token_bytes(SEED_BYTES))
        return PublisherKey(_read_seed(file))

    def adopt_next_key(self) -> str:
        """Sign with `next_key` from now on; returns its publisher text. Older ones stay this node's own."""
        key = self.next_key()
        self._next_key_file.replace(self._free_key_file())
        self._keys.append(key)
        return self.publisher()

    def finish_rotation(self, rotations: Iterable[SignedStatement]) -> None:
        """Adopt the next key where one of this node's has given way to it and the process ended right then.

        Args:
            rotations: those that count.
        """
        if not self._next_key_file.exists():
            return
        following, own = self.next_key().public, {key.public for key in self._keys}
        for each in rotations:
            if isinstance(each.body, KeyRotation) and each.body.new == following and each.signer in own:
                self.adopt_next_key()
                return

    @property
    def _next_key_file(self) -> Path:
        return self._paths.keys_dir / _NEXT_KEY_FILE

    def _free_key_file(self) -> Path:
        number = 1 + max((int(match[1]) for match in map(_KEY_FILE.fullmatch, self._key_names()) if match), default=0)
        return self._paths.keys_dir / f"publisher-{number:04d}.key"

    def _key_names(self) -> list[str]:
        directory = self._paths.keys_dir
        return [path.name for path in directory.iterdir()] if directory.is_dir() else []

    # --- trusted publishers ---

    def trusted(self) -> list[TrustedPublisher]:
        """The publishers this node trusts, oldest first."""
        return list(self._trusted)

    def trust(self, publisher: str, label: str) -> tuple[str, bool]:
        """Trust a publisher.

        Returns:
            Its publisher text, and whether that changed anything.

        Raises:
            UsageError: not a publisher text, or this node's own key.
        """
        text = publisher_text(parse_publisher_text(publisher))
        if any(key.publisher == text for key in self.own_keys()):
            raise UsageError(
                f"{text} is this node's own key, which is always believed",
                hint=f"run {elsewhere('kvnet key show')} on the other machine and trust what it prints",
            )
        if any(entry.publisher == text for entry in self._trusted):
            return text, False
        since = dt.datetime.now(tz=dt.UTC).date().isoformat()
        self._write_trusted([*self._trusted, TrustedPublisher(text, label, since)])
        return text, True

    def untrust(self, publisher_or_label: str) -> str:
        """Trust a publisher no longer; it is named by publisher text or by its label.

        Raises:
            UsageError: nobody trusted has that text or label, or several have the label.
        """
        matching = [entry for entry in self._trusted if publisher_or_label in {entry.publisher, entry.label} - {""}]
        if len(matching) != 1:
            several = f"{len(matching)}: {', '.join(entry.publisher for entry in matching)}"
            raise UsageError(
                f"expected one trusted publisher named {publisher_or_label!r}, found {several if matching else 'none'}",
                hint="name one of them by its publisher id" if matching else "kvnet key list shows them",
            )
        self._write_trusted([entry for entry in self._trusted if entry is not matching[0]])
        return matching[0].publisher

    def _write_trusted(self, publishers: list[TrustedPublisher]) -> None:
        keep_private(
            self._paths.trusted_file, msgspec.json.format(msgspec.json.encode(_TrustedFile(publishers))) + b"\n"
        )
        self._trusted = publishers

    # --- namespaces ---

    def export_namespace(self, target: Path) -> NamespaceId:
        """Write ``mine`` to a new file, 0600.

        Raises:
            UsageError: something is there already (a terminal or another device included), or it cannot be written.
        """
        mine = self.namespaces()[0]
        try:
            write_private(target, encode_namespace_file(mine), replace=False)
        except FileExistsError as error:
            raise UsageError(
                f"expected a file that does not exist yet, found {target}",
                hint="secrets are written to a new file only; name another, or delete this one",
            ) from error
        except OSError as error:
            raise UsageError(f"{target} cannot be written: {error.strerror or error}") from error
        return mine.id

    def import_namespace(
        self, source: Path, *, keep_old: bool, count: Callable[[NamespaceId], int]
    ) -> tuple[NamespaceId, NamespaceId | None]:
        """Make the namespace of a file this node's ``mine``.

        Args:
            source: what ``export_namespace`` wrote.
            keep_old: keep the one it replaces, for what is in it.
            count: how many artifacts of a namespace the store holds.

        Returns:
            The id of ``mine`` now, and of the namespace kept (None when none was).

        Raises:
            UsageError: the file cannot be read.
            MalformedError: it is no namespace file.
            StoreError: the old namespace holds artifacts and ``keep_old`` is False, or too many are kept.
        """
        new = decode_namespace_file(read_bounded(source))
        before = self.swarms.mine.id
        if new.id == before and new.lookup_secret == self.swarms.mine.lookup_secret:
            return before, None
        kept = self.swarms.join_mine(new, None, keep_old=keep_old, count=count)
        return new.id, kept


def _write_seed(path: Path, seed: bytes) -> None:
    write_private(path, b"kvnet publisher key 1\n" + seed.hex().encode() + b"\n", replace=False)


def _read_seed(path: Path) -> bytes:
    check_private(path)
    with path.open("rb") as file:
        match = _SEED_LINE.fullmatch(file.read(256))
    if match is None:
        raise ConfigError(
            f"expected a publisher key in {path}, found something else",
            hint="move the file away; without it this node is no longer the publisher it was",
        )
    return bytes.fromhex(match[1].decode())
