"""The node itself: requests and results."""

from typing import Any

import msgspec

from kvnet_node.operations.requests.base import Request, Result
from kvnet_node.operations.requests.matching import PeerModelEntry
from kvnet_node.operations.requests.prompts import BreakEven


class StatusRequest(Request, frozen=True):
    """How the node is."""


class WritesEntry(msgspec.Struct, frozen=True):
    """What the node may write to its disk, and has written today (UTC).

    Attributes:
        day_bytes: what it may write in a day without being asked for by name.
        left_bytes: what is left of that.
        kept_bytes: written today of its own accord,
        fetched_bytes: for prompts,
        named_bytes: and for `add` and `fetch` by name, which is not limited.
    """

    day_bytes: int
    left_bytes: int
    kept_bytes: int
    fetched_bytes: int
    named_bytes: int


class LiveEntry(msgspec.Struct, frozen=True):
    """Conversations a loaded model keeps in memory: how many, their bytes, and how many bytes there may be."""

    model: str
    n_caches: int
    size_bytes: int
    cap_bytes: int


class StatusResult(Result, frozen=True, tag="status"):
    """How the node is.

    Attributes:
        live: what the loaded models keep in memory between requests; a model too busy to say is left out.
        running: a node process serves this data directory.
        store_away: why the store cannot be used at the moment; "" while it can.
        ram_only: the store is in RAM and ends with the node.
        writes: what may be written to its disk, and was written today.
        model: the model of requests that name none.
        no_model: why there is none.
        endpoint: URLs of the HTTP endpoint, each before ``/v1``.
        bulk: where bulk connections are taken, and whether they are encrypted.
        reuse_verified: models that passed ``kvnet selftest`` on this machine.
    """

    running: bool
    data_dir: str
    version: str
    publisher: str
    peer: str
    policy: str
    artifacts: int
    held_bytes: int
    quota_bytes: int
    pid: int = 0
    uptime_s: float = 0.0
    addresses: list[str] = []
    endpoint: list[str] = []
    bulk: str = ""
    peers: int = 0
    model: str = ""
    no_model: str = ""
    engines: list[str] = []
    reuse_verified: list[str] = []
    counters: dict[str, int] = {}
    store_away: str = ""
    ram_only: bool = False
    writes: WritesEntry | None = None
    live: list[LiveEntry] = []
    not_serving: str = ""
    pause_left_s: float | None = None
    removed: list[str] = []


class StopRequest(Request, frozen=True):
    """End the running node."""


class StopResult(Result, frozen=True, tag="node stop"):
    """The node was asked to end; ``pid`` is the process that goes."""

    pid: int


class PeersRequest(Request, frozen=True):
    """List connected peers, after connecting to the given addresses.

    Attributes:
        models: ask for their models, and load those here that are not known yet.
    """

    connect: list[str] = []
    models: bool = False


class PeerEntry(msgspec.Struct, frozen=True):
    """One connected peer.

    Attributes:
        member: it proved to share a namespace with this node.
        chunks: how chunks come from it: ``bulk``, or ``stream`` and why; "" when none have been fetched.
        scopes: names of the namespaces that both are in.
        state: ``serving``, ``paused`` or ``leaving``, as it says; "" where nobody listens.
        rtt_s: seconds of a round trip; 0 when unknown.
        rate_bytes_s: what it delivered lately, in bytes a second; 0 when unknown.
        standing: from 1, nothing against it, towards 0.
        banned: it is not asked for a while.
        models: what it has, as far as it told.
        tells_models: it answers when it is asked for its models.
        name: what it is called as a member, told apart from others of the same label; "" when it is called nothing.
    """

    peer: str
    addresses: list[str]
    member: bool = False
    chunks: str = ""
    scopes: list[str] = []
    state: str = ""
    rtt_s: float = 0.0
    rate_bytes_s: float = 0.0
    standing: float = 1.0
    banned: bool = False
    models: list[PeerModelEntry] = []
    tells_models: bool = False
    name: str = ""


class NeighbourEntry(msgspec.Struct, frozen=True):
    """A node on the local network.

    Attributes:
        state: ``member``, ``stranger`` (it shares no namespace), ``connected``, ``found``, ``unreachable``,
            ``no session`` (it is connected and opens none) or ``other version``.
        reason: why it is unreachable, or opens no session.
    """

    peer: str
    addresses: list[str]
    state: str
    reason: str = ""


class AwayMember(msgspec.Struct, frozen=True):
    """A member that is not connected.

    Attributes:
        name: what it is called.
        seen: when it was last connected, in seconds since 1970; 0 when that is not known.
    """

    name: str
    seen: float = 0.0


class PeersResult(Result, frozen=True, tag="peers"):
    """Connected peers.

    Attributes:
        own_addresses: where this node can be reached.
        neighbours: nodes on the local network, connected or not.
        discovery: where neighbours are looked for, or why not; "" when no node runs.
        remembered: members met before, which are reached again without an address.
        removed: swarms that this machine was removed from.
        away: members, of the other swarms, that are not connected.
    """

    peers: list[PeerEntry]
    own_addresses: list[str] = []
    neighbours: list[NeighbourEntry] = []
    discovery: str = ""
    remembered: int = 0
    removed: list[str] = []
    away: list[AwayMember] = []


class SelftestRequest(Request, frozen=True):
    """Prove export and restore of one model on this machine."""

    model: str | None = None


class SelftestResult(Result, frozen=True, tag="selftest"):
    """What the self test measured; ``report`` holds every single case."""

    model: str
    passed: bool
    equal_text: bool
    max_logit_difference: float
    cold_ttft_s: float
    restored_ttft_s: float
    prefix_tokens: int
    report: dict[str, Any] = {}


class CalibrateRequest(Request, frozen=True):
    """Measure what this machine does with one model."""

    model: str | None = None


class PrefillPoint(msgspec.Struct, frozen=True):
    """At ``position`` tokens, prefill runs at ``tokens_s`` tokens a second."""

    position: int
    tokens_s: float


class CodecSpeed(msgspec.Struct, frozen=True):
    """One codec here: stored bytes by raw bytes, and raw bytes decoded per second; None when it needs no decoding."""

    codec: str
    stored_share: float
    decode_bytes_s: float | None


class CalibrateResult(Result, frozen=True, tag="bench calibrate"):
    """What was measured, and what it says of links.

    Attributes:
        model: its name.
        device, versions: of what computed.
        measured: seconds since 1970.
        prefill: speed by position.
        restore_bytes_s, restore_fixed_s: raw K/V bytes restored per second, and seconds of any restore.
        codecs: each codec.
        kv_bytes_per_token: raw bytes.
        break_even: the link rate needed, by position and codec.
        seconds: the measuring took.
    """

    model: str
    device: str
    versions: str
    measured: int
    prefill: list[PrefillPoint]
    restore_bytes_s: float
    restore_fixed_s: float
    codecs: list[CodecSpeed]
    kv_bytes_per_token: int
    break_even: list[BreakEven]
    seconds: float
