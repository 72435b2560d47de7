"""Enrolment over control sessions: the inviter's side, which lets guests in, and the guest's."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import trio

from kvnet.errors import KvnetError, PeerRefusedError, TrustError, elsewhere
from kvnet.exchange.lane import Lane
from kvnet.exchange.rosters import Rosters, Scope
from kvnet.exchange.session import PeerSession
from kvnet.format.hashes import NamespaceId
from kvnet.protocol.enrolment import Admission, OpenInvitation, check_enrolled, make_enrol, may_enrol
from kvnet.protocol.gossip import Allowance
from kvnet.protocol.messages.control import Reply, Request
from kvnet.protocol.messages.enrolment import Enrol, Enrolled
from kvnet.protocol.messages.handshake import Capability
from kvnet.protocol.messages.refusals import RefusalReason, Refused
from kvnet.protocol.messages.statements import MAX_TOLD, MAX_TOLD_BYTES
from kvnet.trust.keys import PublisherKey
from kvnet.trust.namespace import encode_namespace_file
from kvnet.trust.roster import Roster
from kvnet.trust.statement_bodies import MAX_MEMBERS, Invitation, Membership
from kvnet.trust.statements import SignedStatement

if TYPE_CHECKING:
    from trio_typing import TaskStatus

    from kvnet.exchange.node import ExchangeNode

_log = logging.getLogger(__name__)

ATTEMPTS_PER_S: Final = 2.0
"""Enrolments tried, of all peers together; each costs two hashes and a signature check."""
ATTEMPTS_BURST: Final = 20.0


@dataclass(frozen=True, slots=True)
class HeldInvitation:
    """An invitation of this node.

    Attributes:
        opens: what is checked when it is used.
        namespace: id of the namespace it opens.
        role: of whoever joins with it.
        label: what its guest is called; empty for what the guest calls itself.
        signer: publisher id of the key that signed it, which signs the membership too.
        issued_s: seconds since 1970: whoever was removed later does not come back with it.
    """

    opens: OpenInvitation
    namespace: NamespaceId
    role: str
    label: str
    signer: bytes
    issued_s: int


class InvitationKeep(Protocol):
    """Where a node keeps its invitations."""

    def find(self, invitation: bytes) -> HeldInvitation | None:
        """The invitation of an id."""
        ...

    def use(self, invitation: bytes, publisher: bytes) -> bool:
        """Count a use, at once and for good: it is on disk when this returns. Blocking.

        Returns:
            Whether there was one left, or this publisher has used it before.
        """
        ...

    def withdraw(self, namespace: NamespaceId, used_by: Iterable[bytes]) -> int:
        """Give up the invitations of a namespace that one of these publishers has used. Blocking; returns how many."""
        ...


class Reception:
    """Lets guests in who prove an invitation of this node.

    Args:
        rosters: of this node's namespaces.
        invitations: of this node.
        keys: of this node.
        lane: where blocking work runs.
        now: seconds since 1970.
    """

    def __init__(
        self,
        rosters: Rosters,
        invitations: InvitationKeep,
        keys: Callable[[], Sequence[PublisherKey]],
        lane: Lane,
        *,
        now: Callable[[], float],
    ) -> None:
        self._rosters = rosters
        self._invitations = invitations
        self._keys = keys
        self._lane = lane
        self._now = now
        self._attempts: Allowance | None = None
        self._admissions: trio.MemorySendChannel[tuple[PeerSession, Enrol, HeldInvitation]] | None = None

    def attach(self, node: "ExchangeNode") -> None:
        """Answer the peers of this node, from its next session on."""
        node.offer_capability(Capability.ENROL)
        node.answer_with(Enrol, self._answer)

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Let guests in, one after the other, until cancelled."""
        sender, receiver = trio.open_memory_channel[tuple[PeerSession, Enrol, HeldInvitation]](int(ATTEMPTS_BURST))
        self._admissions = sender
        task_status.started()
        async with receiver:
            async for session, enrol, held in receiver:
                session.reply(await self._admit(session, enrol, held))

    def _answer(self, session: PeerSession, request: Request) -> Reply | None:
        assert isinstance(request, Enrol)  # noqa: S101 - the node hands out requests by their kind
        now_s = trio.current_time()
        if self._attempts is None:
            self._attempts = Allowance(ATTEMPTS_PER_S, ATTEMPTS_BURST, now_s)
        if self._admissions is None or not self._attempts.take(1, now_s):
            return Refused(request_id=request.request_id, reason=RefusalReason.BUSY)
        held = self._invitations.find(request.invitation)
        roster = self._rosters.roster(held.namespace) if held is not None else None
        removed: tuple[bytes, ...] = ()
        opens = None
        if held is not None and roster is not None:
            opens = held.opens
            removed = tuple(who for who, when in roster.removed.items() if when >= held.issued_s * 1000)
        if not may_enrol(request, session.occasion.reversed(), opens, removed=removed, now_s=self._now()):
            return _refused(request)
        assert held is not None  # noqa: S101 - nobody may enrol without an invitation that is there
        try:
            self._admissions.send_nowait((session, request, held))
        except trio.WouldBlock:
            return Refused(request_id=request.request_id, reason=RefusalReason.BUSY)
        return None

    async def _admit(self, session: PeerSession, enrol: Enrol, held: HeldInvitation) -> Reply:
        try:
            scope = next((s for s in self._rosters.scopes() if s.namespace.id == held.namespace), None)
            key = next((key for key in self._keys() if key.public == held.signer), None)
            if scope is None or key is None or not self._has_room(enrol, held):
                return _refused(enrol)
            if not await self._lane.run(self._invitations.use, enrol.invitation, enrol.publisher):
                return _refused(enrol)
            own_word = await self._let_in(session, enrol, held, scope, key)
            roster = self._rosters.roster(held.namespace)
            assert roster is not None  # noqa: S101 - it has a scope
            told = _to_show(roster, enrol.publisher, own_word, self._rosters.said_by_members(roster))
        except KvnetError as error:
            # Nothing is lost: who was counted may come again.
            _log.warning("a guest with an invitation was not let in: %s", error)
            return Refused(request_id=enrol.request_id, reason=RefusalReason.BUSY)
        _log.info("a guest has joined %s", scope.namespace.name)
        namespace = encode_namespace_file(scope.namespace)
        return Enrolled(request_id=enrol.request_id, namespace=namespace, statements=told)

    def _has_room(self, enrol: Enrol, held: HeldInvitation) -> bool:
        roster = self._rosters.roster(held.namespace)
        if roster is None or held.signer not in roster.members:
            return False
        return enrol.publisher in roster.members or len(roster.members) < MAX_MEMBERS

    async def _let_in(
        self, session: PeerSession, enrol: Enrol, held: HeldInvitation, scope: Scope, key: PublisherKey
    ) -> SignedStatement:
        """The membership that this node signs; the one it has signed before when that says the same."""
        body = Membership(
            sequence=0,
            issued=0,
            expires=0,
            namespace=held.namespace,
            member=enrol.publisher,
            peers=(session.peer,),
            role="device" if scope.devices else "colleague",
            label=held.label or enrol.label,
        )
        before = self._rosters.latest_membership(body, key)
        return before or await self._rosters.say(scope.namespace, key, body)


def _refused(enrol: Enrol) -> Refused:
    """One answer for a wrong, used-up, expired, withdrawn or unknown invitation."""
    return Refused(request_id=enrol.request_id, reason=RefusalReason.UNKNOWN)


def _to_show(
    roster: Roster, guest: bytes, own_word: SignedStatement, others: Sequence[SignedStatement]
) -> tuple[bytes, ...]:
    """First what proves the guest's membership, then whoever else is in, as far as one message goes."""
    proof = [*roster.proof_of(own_word.signer), own_word, *roster.proof_of(guest)]
    chosen: list[bytes] = []
    room_bytes = MAX_TOLD_BYTES
    for statement in dict.fromkeys(each.envelope for each in [*proof, *others]):
        if len(chosen) < MAX_TOLD and len(statement) <= room_bytes:
            chosen.append(statement)
            room_bytes -= len(statement)
    return tuple(chosen)


async def enrol(
    session: PeerSession,
    signed: SignedStatement,
    invitation: Invitation,
    key: PublisherKey,
    label: str,
    *,
    now_s: float,
) -> Admission:
    """Join with an invitation, over an open session with the inviter.

    Args:
        session: with the peer that the invitation names.
        signed: the invitation.
        invitation: its body.
        key: publisher key of the guest.
        label: what the guest calls itself.
        now_s: seconds since 1970.

    Raises:
        TrustError: the inviter does not take the invitation, or does not show that it may invite.
        NetworkError: it does not answer.
    """
    if bytes(session.peer) != invitation.peer:
        raise TrustError("expected a session with the peer that the invitation names, found another peer")
    if Capability.ENROL not in session.opened.capabilities:
        raise TrustError(
            "expected an inviter that lets guests in, found a node that does not",
            hint=f"start it with `{elsewhere('kvnet node start')}`, with this version of kvnet",
        )
    try:
        reply = await session.ask(make_enrol(invitation, session.occasion, key, label))
    except PeerRefusedError as error:
        if error.reason == RefusalReason.BUSY:
            raise
        raise TrustError(
            "expected an invitation that the inviter takes, found one that it refuses: used up, expired, or withdrawn",
            hint=f"ask for a new one: `{elsewhere('kvnet invite')}` on the other machine",
        ) from error
    assert isinstance(reply, Enrolled)  # noqa: S101 - the session machine lets no other reply through
    return check_enrolled(reply, invitation, signed.signer, key.public, now_s=now_s)
