"""Keys, trusted publishers and namespaces: requests and results."""

import msgspec

from kvnet_node.operations.requests.base import Request, Result


class KeyRequest(Request, frozen=True):
    """Make, show or list publisher keys."""


class KeyResult(Result, frozen=True, tag="key"):
    """One publisher key of this node; the secret never leaves its file."""

    publisher: str
    peer: str
    current: bool = True


class TrustRequest(Request, frozen=True):
    """Trust a publisher, or no longer.

    Attributes:
        publisher: publisher text.
        label: a name for the person reading lists.
    """

    publisher: str
    label: str = ""


class TrustResult(Result, frozen=True, tag="trust"):
    """Whether a publisher is trusted now, and whether that changed."""

    publisher: str
    trusted: bool
    changed: bool
    label: str = ""


class RotateResult(Result, frozen=True, tag="key rotate"):
    """A new signing key, which whoever believed the old one believes too.

    Attributes:
        publisher: the new key.
        old: the one that gives way.
        told: connected members that are told now.
    """

    publisher: str
    old: str
    told: int = 0


class RevokeRequest(Request, frozen=True):
    """Revoke artifacts or a key.

    Attributes:
        target: NAME, NAME@VERSION, a full or short hash, or publisher text.
        reason: in words.
        dry_run: say what it would do, and do nothing.
        guests: whom the machine of a key has let in is removed as well.
    """

    target: str
    reason: str = ""
    dry_run: bool = False
    guests: bool = False


class RevokeResult(Result, frozen=True, tag="revoke"):
    """What is revoked.

    Attributes:
        kind: "artifact" or "publisher".
        targets: artifact hash texts, or one publisher text.
        names: what people here call the artifacts.
        scopes: names of the namespaces in which it is told.
        whom: for whom it counts, in words.
        held: artifacts held here that are used and served no more because of it.
        told: connected members that are told now; others hear of it when they connect.
        done: False when it was only asked what would be done.
        removed_from: names of the namespaces that a key is removed from with all keys of its machine.
        still_in: where it stays a member: the name, and what helps.
        asleep: what the members are called that are not connected; they follow when they wake.
        let_in: whom its machine had let in and who is a member still: label and publisher text.
    """

    kind: str
    targets: list[str]
    names: list[str]
    scopes: list[str]
    whom: str
    held: int
    told: int = 0
    done: bool = True
    removed_from: list[str] = []
    still_in: list[str] = []
    asleep: list[str] = []
    let_in: list[str] = []


class KeyEntry(msgspec.Struct, frozen=True):
    """One key in a list.

    Attributes:
        role: "signing" (the one new artifacts are signed with), "own" or "trusted".
        state: "revoked", "rotated" (gave way to another key), or "".
    """

    publisher: str
    role: str
    label: str = ""
    since: str = ""
    state: str = ""


class KeyListResult(Result, frozen=True, tag="key list"):
    """Own and trusted publisher keys."""

    keys: list[KeyEntry]
    policy: str


class NamespaceEntry(msgspec.Struct, frozen=True):
    """One namespace of this node: its public id and how many artifacts it holds, no secrets."""

    name: str
    id: str
    artifacts: int
    current: bool


class NamespaceListRequest(Request, frozen=True):
    """List namespaces."""


class NamespaceListResult(Result, frozen=True, tag="namespace list"):
    """All namespaces of this node."""

    namespaces: list[NamespaceEntry]


class NamespaceFileRequest(Request, frozen=True):
    """Export ``mine`` to, or import it from, a file.

    Attributes:
        path: absolute.
        keep_old: on import, keep the namespace it replaces for what is held already.
    """

    path: str
    keep_old: bool = False


class NamespaceResult(Result, frozen=True, tag="namespace"):
    """The namespace that was exported or imported; an import of what is ``mine`` already changed nothing."""

    id: str
    path: str
    kept: str = ""
    changed: bool = True
