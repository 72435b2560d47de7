"""Being a member: invite, join, remove and leave, for one data directory."""

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from kvnet.errors import PeerUnreachableError, TrustError, UsageError
from kvnet.exchange.enrolment import Reception, enrol
from kvnet.exchange.lane import Lane
from kvnet.exchange.node import ExchangeNode
from kvnet.exchange.rekeying import Rekeyer
from kvnet.exchange.session import PeerSession
from kvnet.exchange.statements import Statements
from kvnet.format.hashes import NamespaceId
from kvnet.protocol.enrolment import Admission
from kvnet.protocol.ids import PeerId
from kvnet.trust.envelope import StatementType
from kvnet.trust.keys import PublisherKey
from kvnet.trust.namespace import PUBLIC, Namespace
from kvnet.trust.roster import COLLEAGUE, DEVICE, Member, Roster
from kvnet.trust.statement_bodies import MAX_MEMBERS, Invitation, Membership
from kvnet.trust.statements import MAX_INVITATION_LIFE_S, SignedStatement, sign_statement, timely
from kvnet_node.calling import machine_called
from kvnet_node.identity import NodeIdentity
from kvnet_node.invitations import new_secrets
from kvnet_node.inviter import full_addresses, reach, shortened
from kvnet_node.joined import Joined
from kvnet_node.namespace_files import MINE, Known
from kvnet_node.swarms import no_swarm

if TYPE_CHECKING:
    from trio_typing import TaskStatus

MAX_LABEL_CHARACTERS: Final = 64


class Memberships:
    """What a node does as a member.

    Args:
        identity: of the data directory; it reads the rosters from here on.
        statements: of the node.
        lane: where blocking work runs.
        changed: called after namespaces or their secrets have changed.
        random: fresh random bytes.
        now: seconds since 1970.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        statements: Statements,
        lane: Lane,
        *,
        changed: Callable[[], Awaitable[None]],
        random: Callable[[int], bytes],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._identity = identity
        self._statements = statements
        self._lane = lane
        self._namespaces_changed = changed
        self._now = now
        self.rosters = identity.hear(statements, now=now)
        self.reception = Reception(self.rosters, identity.invitations, identity.publisher_keys, lane, now=now)
        self.rekeyer = Rekeyer(
            self.rosters,
            identity.swarms,
            identity.invitations,
            identity.publisher_keys,
            lane,
            changed=changed,
            random=random,
        )

    def attach(self, node: ExchangeNode) -> None:
        """Let guests in and lead sleepers to new secrets, from the node's next session on."""
        self.reception.attach(node)
        self.rosters.attach(node)

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Let guests in and follow rekeyings until cancelled; the statements are read and being checked already."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.reception.run)
            await nursery.start(self.rekeyer.run)
            task_status.started()

    # --- inviting -----------------------------------------------------------------------------------------------------

    async def invite(
        self,
        swarm: str,
        *,
        lifetime_s: float,
        uses: int,
        guest_label: str,
        own_label: str,
        peer: PeerId,
        addresses: Sequence[str],
    ) -> SignedStatement:
        """Make an invitation; the swarm is made when this node is in none of that name.

        Args:
            swarm: its name, ``mine`` for a device of the same person.
            lifetime_s: seconds until it expires.
            uses: how many may join with it.
            guest_label: what its guest is called; empty for what the guest calls itself.
            own_label: what the founder is called, if this makes this node one.
            peer: this node's peer id.
            addresses: where it listens.

        Raises:
            UsageError: a lifetime or a number of uses that cannot be, or not a name for a swarm.
            TrustError: this node is no member any more.
            StoreError: it cannot be written, or too many are open.
        """
        if not 1 <= lifetime_s <= MAX_INVITATION_LIFE_S:
            raise UsageError(f"expected an invitation that lasts from 1 s to 30 days, found {lifetime_s:,.0f} s")
        if not 1 <= uses <= MAX_MEMBERS:
            raise UsageError(f"expected 1 to {MAX_MEMBERS} uses of an invitation, found {uses}")
        namespace, roster, key = await self._begun(swarm, own_label, peer)
        if len(roster.members) >= MAX_MEMBERS:
            raise TrustError(f"expected at most {MAX_MEMBERS} members of {swarm}, found as many")
        id_, secret = new_secrets()
        issued_s = int(self._now())
        body = Invitation(
            sequence=int(self._now() * 1000),
            issued=issued_s,
            expires=issued_s + int(lifetime_s),
            id=id_,
            secret=secret,
            role="device" if swarm == MINE else "colleague",
            swarm=namespace.name,
            namespace=namespace.id,
            founder=roster.founder,
            peer=bytes(peer),
            addresses=shortened(addresses, peer),
            uses=uses,
        )
        label = guest_label[:MAX_LABEL_CHARACTERS]
        await self._lane.run(partial(self._identity.invitations.add, body, signer=key.public, label=label))
        return sign_statement(body, key)

    async def _begun(self, swarm: str, own_label: str, peer: PeerId) -> tuple[Namespace, Roster, PublisherKey]:
        """The namespace to invite to, with a founder: this node, when there is none yet."""
        files = self._identity.swarms
        namespace = files.named(swarm)
        fresh = namespace is None
        if namespace is None:
            namespace = await self._lane.run(files.make_swarm, swarm)
        if not files.known(namespace.id).founder:
            known = Known(founder=self._identity.signing_key().public, joined_s=int(self._now()))
            await self._lane.run(files.know, namespace.id, known)
            self.rosters.renew()
        founder = files.known(namespace.id).founder
        key = next((each for each in self._identity.publisher_keys() if each.public == founder), None)
        if key is not None and not self._has_called_itself(namespace, key):
            await self._call_itself(namespace, key, own_label, peer)
        if fresh:
            await self._namespaces_changed()
        roster = self.rosters.roster(namespace.id)
        key_or_none = self.rosters.own_key(roster) if roster is not None else None
        if roster is None or key_or_none is None:
            raise TrustError(
                f"expected to be a member of {swarm}, found that this node was removed",
                hint=f"kvnet leave {swarm} forgets it here",
            )
        return namespace, roster, key_or_none

    def _has_called_itself(self, namespace: Namespace, key: PublisherKey) -> bool:
        return self._statements.latest(StatementType.MEMBERSHIP, namespace.id + key.public, key.public) is not None

    async def _call_itself(self, namespace: Namespace, key: PublisherKey, label: str, peer: PeerId) -> None:
        role = DEVICE if namespace.name == MINE else COLLEAGUE
        body = Membership(
            sequence=0,
            issued=0,
            expires=0,
            namespace=namespace.id,
            member=key.public,
            peers=(bytes(peer),),
            role=role,  # type: ignore[arg-type]
            label=label[:MAX_LABEL_CHARACTERS],
        )
        await self.rosters.say(namespace, key, body)

    # --- joining ------------------------------------------------------------------------------------------------------

    async def join(
        self,
        node: ExchangeNode,
        signed: SignedStatement,
        invitation: Invitation,
        *,
        name: str,
        label: str,
        keep_old: bool,
        count: Callable[[NamespaceId], int],
    ) -> Joined:
        """Enrol with an invitation, and be a member from here on.

        Args:
            node: this node; it dials the inviter.
            signed: the invitation.
            invitation: its body.
            name: what to call the swarm here; empty for what the invitation calls it.
            label: what this node calls itself.
            keep_old: keep the namespace that was ``mine``, when this replaces it and it holds something.
            count: how many artifacts of a namespace the store holds.

        Raises:
            UsageError: an invitation of this node itself, or a name that is taken.
            TrustError: it has expired, or the inviter does not take it.
            NetworkError: the inviter is not reached.
            StoreError: no room for one more namespace, or it cannot be written.
        """
        before = self._member_already(invitation)
        if before is not None:
            return before
        self._check_joinable(invitation, node, name, keep_old=keep_old, count=count)
        session, admission = await self._enrol(node, signed, invitation, label[:MAX_LABEL_CHARACTERS])
        joined = await self._become_member(signed, invitation, admission, name, keep_old=keep_old, count=count)
        # The session that the invitation came over has ended: what was joined is proved in another one.
        await node.open_session(session.peer)
        return joined

    async def _enrol(
        self, node: ExchangeNode, signed: SignedStatement, invitation: Invitation, label: str
    ) -> tuple[PeerSession, Admission]:
        key = self._identity.signing_key()
        session = await reach(node, invitation)
        try:
            return session, await enrol(session, signed, invitation, key, label, now_s=self._now())
        except PeerUnreachableError:
            if not session.closed.is_set():
                raise
        # It ended meanwhile: that of an inviter does when it makes a swarm. Asking again uses nothing up.
        session = await reach(node, invitation)
        return session, await enrol(session, signed, invitation, key, label, now_s=self._now())

    def _member_already(self, invitation: Invitation) -> Joined | None:
        held = next((each for each in self._identity.namespaces() if each.id == invitation.namespace), None)
        roster = self.rosters.roster(NamespaceId(invitation.namespace))
        key = self.rosters.own_key(roster) if roster is not None else None
        if held is None or roster is None or key is None or key.public not in roster.members:
            return None
        member = roster.members[key.public]
        return Joined(held, member.role, member.invited_by, roster, changed=False)

    def _check_joinable(
        self,
        invitation: Invitation,
        node: ExchangeNode,
        name: str,
        *,
        keep_old: bool,
        count: Callable[[NamespaceId], int],
    ) -> None:
        """Everything that can be refused before an invitation is used up."""
        if invitation.peer == bytes(node.peer_id):
            raise UsageError(
                "expected an invitation of another node, found one of this node", hint="run this on the other machine"
            )
        late = timely(invitation, self._now())
        if late is not None:
            raise TrustError(
                f"expected an invitation that still counts, found that {late}",
                hint="ask for a new one, or set this machine's clock right",
            )
        files = self._identity.swarms
        if invitation.role == DEVICE:
            if name not in {"", MINE}:
                raise UsageError("expected no name for an invitation of a device, which is for mine")
            files.check_replaceable(NamespaceId(invitation.namespace), keep_old=keep_old, count=count)
        elif not any(each.id == invitation.namespace for each in files.all()):
            try:
                files.check_new(name or invitation.swarm)
            except UsageError as error:
                raise UsageError(error.message, hint="kvnet join --as NAME calls it otherwise here") from error

    async def _become_member(
        self,
        signed: SignedStatement,
        invitation: Invitation,
        admission: Admission,
        name: str,
        *,
        keep_old: bool,
        count: Callable[[NamespaceId], int],
    ) -> Joined:
        files, given = self._identity.swarms, admission.namespace
        known = Known(
            founder=invitation.founder,
            inviter=signed.signer,
            addresses=full_addresses(invitation),
            joined_s=int(self._now()),
        )
        envelopes = [each.envelope for each in admission.statements]
        # On disk before the secrets are: whoever is killed in between is no member, rather than one who was removed.
        self._statements.take(envelopes, given)
        await self._statements.settled()
        kept: NamespaceId | None = None
        if invitation.role == DEVICE:
            kept = files.join_mine(given, known, keep_old=keep_old, count=count)
            namespace = files.mine
        else:
            called = Namespace(name or given.name, given.prefix_secret, given.lookup_secret)
            namespace = await self._lane.run(files.join_swarm, called, known)
        self.rosters.renew()
        # Once more: as long as nobody here was a member some of them may have found no room.
        self._statements.take(envelopes, namespace)
        await self._statements.settled()
        await self._namespaces_changed()
        return Joined(namespace, invitation.role, signed.signer, admission.roster, kept)

    # --- members ------------------------------------------------------------------------------------------------------

    def roster_of(self, swarm: str) -> tuple[Namespace, Roster]:
        """The namespace of a name, and who is in it.

        Raises:
            UsageError: no such swarm, or nobody was ever invited to it.
        """
        namespace = self._identity.swarms.named(swarm)
        if namespace is None:
            raise no_swarm(swarm)
        roster = self.rosters.roster(namespace.id)
        if roster is None:
            raise UsageError(
                f"expected {swarm} to have members, found that nobody has been invited to it",
                hint="kvnet invite --device invites another machine of yours" if swarm == MINE else "",
            )
        return namespace, roster

    def who_goes(self, swarm: str, wanted: str, *, guests: bool = False) -> tuple[Namespace, list[Member], list[bytes]]:
        """Whom removing a member would remove: all keys of its machines, and the guests that go with it.

        Args:
            swarm: name of the namespace.
            wanted: label, publisher id or peer id of the member, or the end of an id.
            guests: whom it has let in, and those in turn, go as well; they may be invited again.

        Raises:
            UsageError: no member is called so, or several are, or it is this node.
        """
        namespace, roster = self.roster_of(swarm)
        gone = machine_called(roster, wanted, self.rosters.keys_of_machine)
        own = {key.public for key in self._identity.publisher_keys()}
        if any(each.publisher in own for each in gone):
            raise UsageError(
                "expected another member, found this node itself",
                hint=f"kvnet leave {swarm}" if swarm != MINE else "run it on another of your machines",
            )
        let_in = roster.guests_of({each.publisher for each in gone}) if guests else frozenset()
        return namespace, gone, sorted(let_in - own)

    async def remove(self, swarm: str, wanted: str, *, guests: bool = False) -> tuple[Namespace, list[Member]]:
        """Remove a member, with all keys of its machines; arguments as of `who_goes`.

        Raises:
            UsageError: as `who_goes`.
            TrustError: this node may not remove them.
        """
        namespace, gone, let_in = self.who_goes(swarm, wanted, guests=guests)
        await self.rekeyer.remove(namespace.id, [each.publisher for each in gone], guests=frozenset(let_in))
        return namespace, gone

    async def leave(self, swarm: str) -> Namespace:
        """Forget a swarm, its secrets and its invitations.

        Raises:
            UsageError: no such swarm, or ``mine``.
        """
        left = await self._lane.run(self._identity.swarms.leave, swarm)
        await self._lane.run(self._identity.invitations.withdraw_all, left.id)
        await self._statements.forget(left.id)
        self.rosters.renew()
        await self._namespaces_changed()
        return left

    async def finish_leaving(self) -> None:
        """Forget what is left of swarms that this node was leaving when its process ended.

        Raises:
            StoreError: it cannot be written.
        """
        # What was said to everybody counts again when public sharing is turned on again.
        held = {PUBLIC.id, *(each.id for each in self._identity.namespaces())}
        await self._lane.run(self._identity.swarms.drop_unknown)
        await self._lane.run(self._identity.invitations.withdraw_others, held)
        await self._statements.forget_others(held)
