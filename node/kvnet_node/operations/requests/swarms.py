"""Swarms, invitations, sharing: requests and results. An invitation is a secret, and is in the result that made it."""

import msgspec

from kvnet_node.operations.requests.base import Request, Result


class InviteRequest(Request, frozen=True):
    """Make an invitation.

    Attributes:
        swarm: name of the namespace it opens; ``mine`` for a device of the same person.
        lifetime_s: seconds until it expires.
        uses: how many may join with it.
        label: what its guest is called; empty for what the guest calls itself.
        own_label: what this node is called, if it becomes the founder.
    """

    swarm: str
    lifetime_s: float
    uses: int
    label: str = ""
    own_label: str = ""


class InviteResult(Result, frozen=True, tag="invite"):
    """An invitation.

    Attributes:
        invitation: its text; a secret until it is used up or has expired.
        swarm: what it opens.
        role: ``device`` or ``colleague``.
        expires: seconds since 1970.
        uses: how many may join with it.
        addresses: where its guest looks for this node.
        made: the swarm was made just now, and this node is its founder.
    """

    invitation: str
    swarm: str
    role: str
    expires: int
    uses: int
    addresses: list[str]
    made: bool = False


class JoinRequest(Request, frozen=True):
    """Join with an invitation.

    Attributes:
        invitation: its text.
        name: what to call the swarm here; empty for what the invitation calls it.
        label: what this node calls itself.
        keep_old: keep the namespace that was ``mine``, when this replaces it.
    """

    invitation: str
    name: str = ""
    label: str = ""
    keep_old: bool = False


class JoinResult(Result, frozen=True, tag="join"):
    """A membership.

    Attributes:
        swarm: what the namespace is called here.
        namespace: its id.
        role: ``device`` or ``colleague``.
        inviter: publisher text of who let this node in.
        inviter_label: what people call it.
        members: names of the other members known now.
        kept: id of the namespace that was ``mine`` and is kept; empty for none.
        changed: False when this node was a member already.
        running: it counts in a running node already.
    """

    swarm: str
    namespace: str
    role: str
    inviter: str
    inviter_label: str
    members: list[str]
    kept: str = ""
    changed: bool = True
    running: bool = False


class SwarmRequest(Request, frozen=True):
    """Something about one swarm, or all."""

    swarm: str = ""


class SwarmEntry(msgspec.Struct, frozen=True):
    """One namespace of this node.

    Attributes:
        name: what it is called here.
        id: of the namespace.
        role: ``founder``, ``device``, ``colleague``, ``removed``, or ``alone`` where nobody was invited to.
        members: how many, this node included.
        artifacts: how many of it are held here.
        invitations: open ones of this node.
    """

    name: str
    id: str
    role: str
    members: int
    artifacts: int
    invitations: int


class SwarmListResult(Result, frozen=True, tag="swarm list"):
    """All namespaces that this node shares or can share."""

    swarms: list[SwarmEntry]


class MemberEntry(msgspec.Struct, frozen=True):
    """One member.

    Attributes:
        label: what people call it.
        name: the same, with a part of its peer id when another member has the same label.
        publisher: publisher text.
        role: ``founder``, ``device`` or ``colleague``.
        invited_by: name, or publisher text, of who let it in; empty for the founder.
        seen: seconds since 1970 when a machine of it was last connected; 0 for never.
        connected: one of its machines is connected now.
        own: it is this node.
        peers: peer ids of its machines.
    """

    label: str
    name: str
    publisher: str
    role: str
    invited_by: str
    seen: float
    connected: bool
    own: bool
    peers: list[str]


class SwarmMembersResult(Result, frozen=True, tag="swarm members"):
    """The members of a namespace."""

    swarm: str
    members: list[MemberEntry]


class SwarmRemoveRequest(Request, frozen=True):
    """Remove a member.

    Attributes:
        swarm: from which namespace.
        member: its label, publisher text or peer id, or the end of an id.
        guests: whom it has let in goes as well.
        dry_run: only say who would be removed.
    """

    swarm: str
    member: str
    guests: bool = False
    dry_run: bool = False


class SwarmRemoveResult(Result, frozen=True, tag="swarm remove"):
    """Members that are removed, all keys of the same machines.

    Attributes:
        removed: publisher texts.
        label: what people call it.
        stays: how many members there are now.
        asleep: names of members that are not connected and will follow when they wake.
        let_in: whom it had let in and who is a member still: label and publisher text.
    """

    swarm: str
    removed: list[str]
    label: str
    stays: int
    asleep: list[str]
    let_in: list[str] = []


class LeaveRequest(Request, frozen=True):
    """Leave a swarm.

    Attributes:
        dry_run: leave nothing; say only what leaving means.
    """

    swarm: str
    dry_run: bool = False


class LeaveResult(Result, frozen=True, tag="leave"):
    """A swarm was left, or would be.

    Attributes:
        artifacts: held here, which nothing keeps from being evicted afterwards.
        role: this machine's until then: founder, colleague, "removed", or "alone" where nobody was ever invited.
        others: members besides this machine.
        founder: what the founder is called; "" when it is this machine, or there is none.
    """

    swarm: str
    artifacts: int
    role: str = ""
    others: int = 0
    founder: str = ""


class ShareRequest(Request, frozen=True):
    """Widen the scope of an artifact.

    Attributes:
        target: NAME, NAME@VERSION or a hash.
        swarm: to whom; ``public`` for everybody.
        dry_run: only say what would become readable.
    """

    target: str
    swarm: str
    dry_run: bool = False


class ShareResult(Result, frozen=True, tag="share"):
    """What members of a swarm, or everybody, can look up and read now.

    Attributes:
        swarm: who.
        source: hash text of the artifact that was shared.
        artifacts: hash texts there, one for each codec it is stored with.
        tokens: of it.
        bytes: of its chunks.
        has_context: the messages of a named context are in it.
        existed: it was shared before.
        strangers: publisher texts of sources that the members do not know, and so do not use it.
        members: how many other members can read it; 0 for everybody, or when there are none yet.
        ticket: what somebody there fetches it with.
        name: what members are told that it is called; "" when it has no name here.
    """

    swarm: str
    source: str
    artifacts: list[str]
    tokens: int
    bytes: int
    has_context: bool
    existed: bool
    strangers: list[str]
    members: int
    ticket: str = ""
    name: str = ""
