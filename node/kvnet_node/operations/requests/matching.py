"""Requests about peers' models, and about what this node does for peers."""

import msgspec

from kvnet_node.operations.requests.base import Request, Result


class PeerModelEntry(msgspec.Struct, frozen=True):
    """A model of a peer, beside the one here that is most like it.

    Attributes:
        name: what the peer calls it.
        ours: name of the one here; "" when none has anything to do with it.
        relation: ``same``, ``near`` (the same model in another form) or ``other``.
        verdict: ``exact``, ``tolerant`` or ``incompatible``; "" when there is nothing to compare.
        measured: two samples were compared.
        difference: the largest found, as a share; None when nothing was found or the samples cannot be compared.
        reasons: why the verdict is not better.
        advice: what to do about it.
    """

    name: str
    ours: str = ""
    relation: str = "other"
    verdict: str = ""
    measured: bool = False
    difference: float | None = None
    reasons: list[str] = []
    advice: str = ""


class MatchRequest(Request, frozen=True):
    """Compare the models here with those of peers.

    Attributes:
        models: names of those to compare; empty for all.
        load: load models that are not known yet.
    """

    models: list[str] = []
    load: bool = True


class MatchedPeer(msgspec.Struct, frozen=True):
    """How a model here compares with that of a peer.

    Attributes:
        name: what the peer is called; "" when it is no member.
    """

    peer: str
    model: PeerModelEntry
    name: str = ""


class MatchedModel(msgspec.Struct, frozen=True):
    """A model here.

    Attributes:
        unknown: why it cannot be compared yet; "" when it can.
        peers: those who have it, or another form of it.
    """

    name: str
    unknown: str = ""
    peers: list[MatchedPeer] = []


class MatchResult(Result, frozen=True, tag="model match"):
    """Which models this machine has in common with its peers.

    Attributes:
        models: those of this machine.
        silent: peers that tell of no model: none is loaded there yet, or they cannot.
        members: how many peers were asked.
    """

    models: list[MatchedModel]
    silent: list[str] = []
    members: int = 0


class PauseRequest(Request, frozen=True):
    """Serve nothing for now.

    Attributes:
        for_s: seconds; None until it is ended.
    """

    for_s: float | None = None


class ResumeRequest(Request, frozen=True):
    """Serve again."""


class PauseResult(Result, frozen=True, tag="node pause"):
    """The node is paused.

    Attributes:
        running: a node is running, and its members were told.
        left_s: seconds left; None when it has no end.
    """

    running: bool
    left_s: float | None = None


class ResumeResult(Result, frozen=True, tag="node resume"):
    """The node is not paused.

    Attributes:
        running: a node is running, and its members were told.
        was_paused: it was, a moment ago.
        why_not: why it still serves nothing; "" when it serves, or does not run.
    """

    running: bool
    was_paused: bool
    why_not: str = ""
