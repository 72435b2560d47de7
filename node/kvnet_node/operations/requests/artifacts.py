"""Artifacts in the store: requests and results."""

import msgspec

from kvnet_node.operations.requests.base import Request, Result


class ArtifactSummary(msgspec.Struct, frozen=True):
    """One artifact in a list.

    Attributes:
        scope: what its namespace is called here, "" when this node is not in it.
        origin: of one without a name: "interrupted" (what an add that ended early had computed), "conversation",
            "fetch", or "add" when its name was removed; "" when that is not known.
        adding: the name that the interrupted add is to give.
    """

    artifact: str
    names: list[str]
    tokens: int
    bytes: int
    codec: str
    complete: bool
    pinned: bool
    signer: str
    own: bool
    created: int
    model: str = ""
    lossy: bool = False
    revoked: bool = False
    scope: str = ""
    origin: str = ""
    adding: str = ""


class ListRequest(Request, frozen=True):
    """List the artifacts of this store."""


class ListResult(Result, frozen=True, tag="list"):
    """All artifacts held, newest first."""

    artifacts: list[ArtifactSummary]


class OfferedRequest(Request, frozen=True):
    """List what members hold.

    Attributes:
        swarm: in which namespace; "" in all of this node's.
        all: what is in ``mine`` and has no name, too: conversations.
    """

    swarm: str = ""
    all: bool = False


class HolderEntry(msgspec.Struct, frozen=True):
    """A machine that holds something.

    Attributes:
        name: what it is called, else the end of its peer id.
        peer: peer id text.
        state: "serving", "paused" or "leaving" as it says itself; "away" when it is not connected.
        seen: when it was last connected, in seconds since 1970; 0 when that is not known.
    """

    name: str
    peer: str
    state: str
    seen: float = 0.0


class OfferedEntry(msgspec.Struct, frozen=True):
    """An artifact that members say they hold.

    Attributes:
        name: what its publisher calls it, or "".
        version: of the name; 0 without one.
        artifact: its hash text; "" while no member has shown its manifest.
        swarm: in which namespace.
        tokens, bytes, codec: as its holders say.
        model: what the model it was computed with is called, or "".
        signer: publisher text of who gave the name, or signed it; "" when not known.
        signed_by: what that member is called, or "".
        holders: the machines that hold it; it can be fetched now when one of them is serving.
        here: it is in this store too.
        refused: why this node would not use it; "" when it would, or that is not known yet.
    """

    name: str
    version: int
    artifact: str
    swarm: str
    tokens: int
    bytes: int
    codec: str
    model: str
    signer: str
    signed_by: str
    holders: list[HolderEntry]
    here: bool
    refused: str = ""


class OfferedResult(Result, frozen=True, tag="list peers"):
    """What members hold.

    Attributes:
        unnamed: artifacts in ``mine`` without a name, which are counted alone.
        removed: swarms that this machine was removed from; nothing of theirs can be had.
    """

    offered: list[OfferedEntry]
    unnamed: int = 0
    removed: list[str] = []


class ArtifactRequest(Request, frozen=True):
    """Something about one artifact: a full or short hash, ``NAME`` or ``NAME@3``."""

    target: str


class RemoveRequest(Request, frozen=True):
    """Remove a name's version or an artifact.

    Attributes:
        target: NAME, NAME@VERSION or a hash.
        everywhere: from the owner's other machines too, whatever it is called there.
    """

    target: str
    everywhere: bool = False


class ShowResult(Result, frozen=True, tag="show"):
    """Everything a manifest says, and what is held of it.

    Attributes:
        scope: what its namespace is called here; "" when this node is not in it.
        model: what its model is called here, else by a connected peer; "" when nobody knows it.
        verdict: whose rules accept it: "accepted" or the reason of the refusal.
        held_chunks: chunks held, of ``chunks``.
        fingerprint: named parts of the fingerprint, digests in hex.
        derived_from: artifact hash text, signer text and what the signer is called ("" unknown), of every source.
        ticket: what another device of the namespace fetches it with, addresses of the running node included.
        revoked: it, its publisher or a source is revoked.
        revocations: what of it is revoked by whom, and why, in their words.
        attestations: what others say who have looked into it.
        signer_name: what the signer is called; "" when that is not known.
    """

    artifact: str
    names: list[str]
    tokens: int
    blocks: int
    chunks: int
    held_chunks: int
    bytes: int
    codec: str
    complete: bool
    pinned: bool
    signer: str
    own: bool
    policy: str
    verdict: str
    namespace: str
    created: int
    producer: dict[str, str]
    fingerprint: dict[str, str]
    derived_from: list[dict[str, str]]
    context_bytes: int = 0
    ticket: str = ""
    lossy: bool = False
    revoked: bool = False
    revocations: list[str] = []
    attestations: list[str] = []
    scope: str = ""
    model: str = ""
    signer_name: str = ""


class VerifyRequest(Request, frozen=True):
    """Re-hash what is held; every artifact when ``target`` is empty."""

    target: str = ""


class VerifyResult(Result, frozen=True, tag="verify"):
    """What verification found.

    Attributes:
        artifacts, chunks, bytes: what was read and matched.
        bad_chunks: "artifact hash text/chunk index" of everything that did not match; quarantined.
        missing_chunks: chunks not held.
        incomplete: hash text of each artifact that lacks chunks, bad ones included.
        incomplete_pinned: those of them that are pinned, and so once were whole.
    """

    artifacts: int
    chunks: int
    bytes: int
    bad_chunks: list[str]
    missing_chunks: int = 0
    incomplete: list[str] = []
    incomplete_pinned: list[str] = []


class PinResult(Result, frozen=True, tag="pin", omit_defaults=True):
    """An artifact is pinned, or no longer.

    Attributes:
        artifact: artifact hash text.
        pinned: whether it is now.
        names: each NAME@VERSION that means it; for a person, and not in what ``--json`` prints.
    """

    artifact: str
    pinned: bool
    names: list[str] = []


class RemoveResult(Result, frozen=True, tag="rm"):
    """What ``rm`` removed.

    Attributes:
        artifact: artifact hash text of what was named.
        names: each NAME@VERSION that is gone.
        freed_bytes: bytes freed in the store.
        removed: the artifact itself is gone; False while another name means it.
        kept_by: each NAME@VERSION that still means the artifact.
        remaining: other versions of the same name, each NAME@VERSION, the oldest first.
        told: other machines of the owner that were told to remove it and are connected.
        asleep: those that are not, and remove it when they wake.
        stays_bytes: bytes of its chunks that stay.
        needed_by: whose they are too: names, else short hash and scope; none where they are only in use just now.
    """

    artifact: str
    names: list[str]
    freed_bytes: int
    removed: bool = True
    kept_by: list[str] = []
    remaining: list[str] = []
    told: list[str] = []
    asleep: list[str] = []
    stays_bytes: int = 0
    needed_by: list[str] = []


class CollectRequest(Request, frozen=True):
    """Remove what is not pinned until quota and free space are kept.

    Attributes:
        all: remove everything that is not pinned.
    """

    all: bool = False


class CollectResult(Result, frozen=True, tag="gc"):
    """What garbage collection removed, and how the store is afterwards.

    Attributes:
        held_bytes, quota_bytes: held, and to be held at most.
        artifacts, pinned: artifacts that are left, and those of them that are pinned.
        free_bytes, min_free_bytes: free on the disk, and to stay free.
    """

    removed: list[str]
    freed_bytes: int
    held_bytes: int
    quota_bytes: int
    artifacts: int = 0
    pinned: int = 0
    free_bytes: int = 0
    min_free_bytes: int = 0


class ExportRequest(Request, frozen=True):
    """Write an artifact to a container file; ``path`` is absolute and must not exist."""

    target: str
    path: str


class ExportResult(Result, frozen=True, tag="export"):
    """The container that was written."""

    artifact: str
    path: str
    bytes: int


class ImportRequest(Request, frozen=True):
    """Take an artifact from a container file; ``name`` makes it a named context."""

    path: str
    name: str | None = None


class ImportResult(Result, frozen=True, tag="import"):
    """The artifact that was taken in.

    Attributes:
        signer_name: what the signer is called; "" when that is not known.
    """

    artifact: str
    bytes: int
    tokens: int
    signer: str
    complete: bool
    name: str = ""
    signer_name: str = ""


class RebuildRequest(Request, frozen=True):
    """Make the index anew from the packs."""


class RebuildResult(Result, frozen=True, tag="store rebuild"):
    """What the new index holds."""

    artifacts: int
    chunks: int
    seconds: float
    refused: list[str] = []


class ScrubRequest(Request, frozen=True):
    """Read and hash everything that is held, and fetch again what went bad."""


class ScrubResult(Result, frozen=True, tag="store scrub"):
    """What a scrub found.

    Attributes:
        artifacts, chunks, bytes: what was looked at and matched.
        bad_chunks: chunks that did not match; they are not used any more.
        repaired: hash text of each artifact that peers made whole again.
        damaged: hash text of each artifact that stays damaged.
        seconds: that it took.
    """

    artifacts: int
    chunks: int
    bytes: int
    bad_chunks: int
    repaired: list[str]
    damaged: list[str]
    seconds: float
