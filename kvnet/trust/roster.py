"""Who is in a namespace, and which lookup secret counts, as its members' signed statements say.

It begins with the founder. A `Membership` that a member signed lets its subject in. A `Rekey` says who is out, vouches
for everybody it seals the new secret for, and is what the new secret comes from:

- In a swarm the founder alone may rekey; in ``mine`` every device may, but none removes the founder, and what the
  founder says comes first.
- Who was removed comes back only by a membership that is later than the removal. That somebody sealed a secret for them
  meanwhile, not knowing, does not count.
- Whom the removed had let in stays if the rekeying seals for them; otherwise they need a new invitation.
- A key that a member rotated to is a member in its place.

All nodes that know the same statements have the same roster, in whatever order those came. See ``docs/protocol.md``.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from heapq import heapify, heappop, heappush
from types import MappingProxyType
from typing import Final

from kvnet.trust.statement_bodies import MAX_MEMBERS, KeyRotation, Membership, Rekey
from kvnet.trust.statements import SignedStatement

DEVICE: Final = "device"
"""Role of a member of ``mine``: another machine of the same owner."""
COLLEAGUE: Final = "colleague"
"""Role of a member of a swarm."""


@dataclass(frozen=True, slots=True)
class Member:
    """Somebody in a namespace.

    Attributes:
        publisher: its publisher id.
        role: ``founder``, ``device`` or ``colleague``.
        label: what people call it; not escaped.
        peers: raw peer ids of its machines.
        invited_by: publisher id; empty for the founder.
        since_s: seconds since 1970 when it was let in, 0 for the founder.
        by: the statement it is a member by; None for the founder.
    """

    publisher: bytes
    role: str
    label: str = ""
    peers: tuple[bytes, ...] = ()
    invited_by: bytes = b""
    since_s: int = 0
    by: SignedStatement | None = None


class RekeyNeeded(Enum):
    """What the signer of the rekeying that counts has to do."""

    NOTHING = "nothing"
    MORE = "more"
    """Seal the same secret for members it is not sealed for yet."""
    FRESH = "fresh"
    """Make a new secret: this one is sealed for somebody who is out."""


@dataclass(frozen=True, slots=True)
class Roster:
    """The members of one namespace.

    Attributes:
        namespace: its id.
        founder: publisher id of who made it.
        members: publisher id -> member, the founder first.
        removed: publisher id -> sequence of the removal, for those who are out.
        rekey: the rekeying whose secret counts; None while the first secret does.
        grounds: all rekeyings that were ever allowed, each behind what made its signer a member then.
    """

    namespace: bytes
    founder: bytes
    members: Mapping[bytes, Member]
    removed: Mapping[bytes, int]
    rekey: SignedStatement | None
    grounds: tuple[SignedStatement, ...]

    def sealed_for(self, member: bytes) -> bytes | None:
        """The box with the secret that counts for a member; None when there is none."""
        if self.rekey is None:
            return None
        boxes = {each.member: each.box for each in _rekey(self.rekey).sealed}
        return boxes.get(member)

    @property
    def unsealed(self) -> tuple[bytes, ...]:
        """Members whom the secret that counts is not sealed for; nobody while the first secret counts."""
        if self.rekey is None:
            return ()
        sealed = {each.member for each in _rekey(self.rekey).sealed}
        return tuple(each for each in self.members if each not in sealed)

    @property
    def rekey_needed(self) -> RekeyNeeded:
        """What whoever made the secret that counts has to do about who is a member now."""
        if self.rekey is None:
            return RekeyNeeded.NOTHING
        if any(each.member not in self.members for each in _rekey(self.rekey).sealed):
            return RekeyNeeded.FRESH
        return RekeyNeeded.MORE if self.unsealed else RekeyNeeded.NOTHING

    def guests_of(self, publishers: Collection[bytes]) -> frozenset[bytes]:
        """Members that these have let in, and whom those have let in, and so on.

        Args:
            publishers: publisher ids; they are not among what is returned.
        """
        led, before = set(publishers), set[bytes]()
        while led != before:
            before = set(led)
            led |= {who for who in self.members if any(by.signer in led for by in _chain(self.members, who))}
        return frozenset(led - set(publishers))

    def proof_of(self, member: bytes) -> list[SignedStatement]:
        """The statements that make somebody a member, to show to whoever knows the founder's key alone.

        Args:
            member: publisher id; of somebody who is no member there is no proof.
        """
        return list(dict.fromkeys([*self.grounds, *_chain(self.members, member)]))


def build_roster(
    namespace: bytes, founder: bytes, statements: Iterable[SignedStatement], *, devices_remove: bool
) -> Roster:
    """The roster that these statements give.

    Args:
        namespace: id of the namespace; statements about others are passed over.
        founder: publisher id.
        statements: memberships, rekeyings and key rotations whose signatures and times have been checked.
        devices_remove: every member may remove others (``mine``); otherwise the founder alone.
    """
    memberships: list[SignedStatement] = []
    rekeys: list[SignedStatement] = []
    for statement in dict.fromkeys(statements):
        match statement.body:
            case Membership() if statement.body.namespace == namespace:
                memberships.append(statement)
            case KeyRotation():
                memberships.append(statement)
            case Rekey() if statement.body.namespace == namespace:
                rekeys.append(statement)
            case _:
                pass
    state = _State(founder, memberships)
    # The founder's first, whatever their time: a stolen device must not outrun them with an early date.
    rekeys.sort(key=lambda each: (each.signer != founder, *_order(each)))
    allowed = [each for each in rekeys if state.apply(each, may=devices_remove or each.signer == founder)]
    members = state.members()
    # A secret that somebody made who was removed since is known to them.
    counting = [each for each in allowed if each.signer in members]
    return Roster(
        namespace,
        founder,
        MappingProxyType(members),
        MappingProxyType({who: when for who, when in state.banned.items() if who not in members}),
        max(counting, key=_order, default=None),
        tuple(dict.fromkeys(state.grounds)),
    )


class _State:
    """Members and removed ones while rekeyings are gone through."""

    def __init__(self, founder: bytes, memberships: Iterable[SignedStatement]) -> None:
        self._founder = founder
        self._vouched: dict[bytes, SignedStatement] = {}
        self.banned: dict[bytes, int] = {}
        self._in_order = sorted(memberships, key=_order)
        self._members: dict[bytes, Member] | None = None
        self._said: dict[bytes, list[SignedStatement]] = {}
        for statement in self._in_order:
            self._said.setdefault(statement.signer, []).append(statement)
        self.grounds: list[SignedStatement] = []

    def apply(self, statement: SignedStatement, *, may: bool) -> bool:
        """Let a rekeying count; whether it does."""
        if not may or statement.signer not in (members := self.members()):
            return False
        self.grounds += [*_chain(members, statement.signer), statement]
        body = _rekey(statement)
        for who in body.removed:
            if who != self._founder and body.sequence > self.banned.get(who, -1):
                self.banned[who] = body.sequence
                self._vouched.pop(who, None)
                self._members = None
        for each in body.sealed:
            if each.member not in self.banned and each.member not in self._vouched:
                self._vouched[each.member] = statement
                self._members = None
        return True

    def members(self) -> dict[bytes, Member]:
        """Who is in at this point; worked out anew only when a rekeying has changed something."""
        if self._members is None:
            self._members = self._worked_out()
        return self._members

    def _worked_out(self) -> dict[bytes, Member]:
        """Whoever the founder, the vouched for and memberships lead to; at most `MAX_MEMBERS`.

        Whoever is nearer to the founder comes in first, then of each signer the first it has let in, and so on: so a
        member that lets in as many as there is room for keeps no others out.
        """
        found = {self._founder: Member(self._founder, "founder")}
        for who, by in self._vouched.items():
            if who in found or len(found) < MAX_MEMBERS:
                found.setdefault(who, Member(who, DEVICE, invited_by=by.signer, since_s=by.body.issued, by=by))
        waiting = [entry for who in found for entry in self._let_in_by(who, 1)]
        heapify(waiting)
        while waiting:
            (depth, *_), statement = heappop(waiting)
            known = found.get(_subject(statement))
            # First what costs least: a bad member may say much of those who are in already, or have no room any more.
            if not (_says_more(known, statement) if known is not None else len(found) < MAX_MEMBERS):
                continue
            entering = self._entering(statement)
            if entering is None:
                continue
            found[entering.publisher] = entering
            for entry in self._let_in_by(entering.publisher, depth + 1) if known is None else ():
                heappush(waiting, entry)
        return self._named(found)

    def _let_in_by(self, who: bytes, depth: int) -> list[tuple[tuple[int, int, int, bytes], SignedStatement]]:
        return [((depth, nth, *_order(each)), each) for nth, each in enumerate(self._said.get(who, ()))]

    def _entering(self, statement: SignedStatement) -> Member | None:
        """Who comes in by a membership or a rotation; None for those who were removed since, and for the founder."""
        body = statement.body
        if isinstance(body, KeyRotation):
            member = Member(body.new, DEVICE, invited_by=statement.signer, since_s=body.issued, by=statement)
        else:
            member = _member(statement)
        late = body.sequence > self.banned.get(member.publisher, -1)
        return member if late and member.publisher not in {self._founder, statement.signer} else None

    def _named(self, found: dict[bytes, Member]) -> dict[bytes, Member]:
        """Labels and machines alone: what members say of themselves, of those vouched for, and of the key before."""
        for statement in self._in_order:
            body = statement.body
            if isinstance(body, KeyRotation):
                old, new = found.get(statement.signer), found.get(body.new)
                if old is not None and new is not None and (new.by is statement or _only_vouched_for(new)):
                    found[body.new] = _named_as(new, old)
                continue
            who = _subject(statement)
            known = found.get(who)
            if known is None:
                continue
            if who == statement.signer:
                found[who] = _named_as(known, _member(statement), role=known.role)
            elif _only_vouched_for(known):
                found[who] = _named_as(known, _member(statement))
        return found


def _chain(members: Mapping[bytes, Member], member: bytes) -> list[SignedStatement]:
    """What makes somebody a member, back to the founder or to a rekeying, which stands on grounds of its own."""
    chain: list[SignedStatement] = []
    current = members.get(member)
    while current is not None and current.by is not None:
        chain.append(current.by)
        current = None if isinstance(current.by.body, Rekey) else members[current.by.signer]
    return chain[::-1]


def _says_more(known: Member, now: SignedStatement) -> bool:
    """Whether a statement replaces another one: the later word of the same signer. Proofs stay free of circles so."""
    before = known.by
    return before is not None and before.signer == now.signer and _order(before) < _order(now)


def _only_vouched_for(member: Member) -> bool:
    """Whether a rekeying alone makes it a member, which says no name."""
    return member.by is not None and isinstance(member.by.body, Rekey) and not member.label


def _named_as(member: Member, said: Member, *, role: str = "") -> Member:
    return replace(member, role=role or said.role, label=said.label, peers=said.peers)


def _membership(statement: SignedStatement) -> Membership:
    assert isinstance(statement.body, Membership)  # noqa: S101 - only such are asked about
    return statement.body


def _member(statement: SignedStatement) -> Member:
    body = _membership(statement)
    return Member(body.member, body.role, body.label, body.peers, statement.signer, body.issued, statement)


def _subject(statement: SignedStatement) -> bytes:
    """Whom a membership or a rotation lets in."""
    body = statement.body
    return body.new if isinstance(body, KeyRotation) else _membership(statement).member


def _order(statement: SignedStatement) -> tuple[int, bytes]:
    return statement.body.sequence, statement.envelope


def _rekey(statement: SignedStatement) -> Rekey:
    assert isinstance(statement.body, Rekey)  # noqa: S101 - only such are asked about
    return statement.body
