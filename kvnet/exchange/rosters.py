"""The rosters of this node's namespaces, worked out anew whenever a statement about members comes.

A large roster takes milliseconds, and a bad member can say something new fifty times a second: what peers tell is then
worked out together, for no more than a tenth of the time. What this node says itself counts at once.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from kvnet.errors import StoreError
from kvnet.exchange.session import PeerSession
from kvnet.exchange.statements import Heard, Statements
from kvnet.format.hashes import NamespaceId, blake3_hash
from kvnet.network.news import News
from kvnet.protocol.gossip import Allowance, answer, is_ordered, short
from kvnet.protocol.messages.control import Reply, Request
from kvnet.protocol.messages.refusals import RefusalReason, Refused
from kvnet.protocol.messages.statements import GetStatements
from kvnet.trust.envelope import StatementType
from kvnet.trust.keys import PublisherKey
from kvnet.trust.machines import keys_of_machine
from kvnet.trust.namespace import Namespace
from kvnet.trust.roster import Roster, build_roster
from kvnet.trust.statement_bodies import AnyStatement, KeyRotation, Membership
from kvnet.trust.statements import SignedStatement, next_sequence, sign_statement, timely

if TYPE_CHECKING:
    from kvnet.exchange.node import ExchangeNode

_ABOUT_MEMBERS: Final = (StatementType.MEMBERSHIP, StatementType.REKEY, StatementType.KEY_ROTATION)

FREE_S: Final = 0.005
"""Seconds of processor time that working everything out may take without a pause after it."""
SHARE: Final = 0.1
"""Part of the time that it may take otherwise."""

FORMER_ASKS_PER_S: Final = 2.0
"""Requests answered of those who prove a former lookup secret, of all peers together."""
FORMER_ASKS_BURST: Final = 64.0


@dataclass(frozen=True, slots=True)
class Scope:
    """What this node knows of one of its namespaces besides the secrets.

    Attributes:
        namespace: as it is now.
        founder: publisher id of who made it.
        devices: it is of one person's machines, and each of them may remove others.
    """

    namespace: Namespace
    founder: bytes
    devices: bool


Scopes = Callable[[], tuple[Scope, ...]]
"""Those of this node's namespaces that have a founder; the same tuple until something changes."""

Keys = Callable[[], Sequence[PublisherKey]]
"""All publisher keys of this node, the newest last; read afresh at every use."""


class _Known:
    """What was worked out, and from which scopes."""

    def __init__(self, scopes: tuple[Scope, ...], rosters: Mapping[bytes, Roster]) -> None:
        self.scopes = scopes
        self.rosters = rosters
        self.members = MappingProxyType({id_: frozenset(each.members) for id_, each in rosters.items()})
        self.departed = MappingProxyType(
            {
                id_: MappingProxyType({who: when // 1000 for who, when in each.removed.items()})
                for id_, each in rosters.items()
                if each.removed
            }
        )


class Rosters:
    """Who is in which namespace.

    Args:
        statements: where what members say is kept.
        scopes: of this node.
        keys: of this node.
        now: seconds since 1970.
    """

    def __init__(self, statements: Statements, scopes: Scopes, keys: Keys, *, now: Callable[[], float]) -> None:
        self._statements = statements
        self._scopes = scopes
        self._keys = keys
        self._now = now
        self._known: _Known | None = None
        self._stale = False
        self._rest_until_s = 0.0
        self._changed = News()
        self._former_asks: Allowance | None = None
        for kind in _ABOUT_MEMBERS:
            statements.subscribe(kind, self._heard)

    def attach(self, node: "ExchangeNode") -> None:
        """Tell peers of this node who prove a lookup secret that was replaced what leads to the new one."""
        node.answer_former_with(self._answer_former)

    def _answer_former(self, session: PeerSession, request: Request) -> Reply:
        if not isinstance(request, GetStatements) or not is_ordered(request):
            return Refused(request_id=request.request_id, reason=RefusalReason.UNKNOWN)
        now_s = trio.current_time()
        if self._former_asks is None:
            self._former_asks = Allowance(FORMER_ASKS_PER_S, FORMER_ASKS_BURST, now_s)
        if not self._former_asks.take(1, now_s):
            return Refused(request_id=request.request_id, reason=RefusalReason.BUSY)
        told = self._for_former(session.opened.namespaces[request.slot])
        return answer(request, {short(blake3_hash(each)): each for each in told})

    def _for_former(self, namespace: Namespace) -> list[bytes]:
        """The rekeyings that count, and why their signers may: enough to follow, and no word of who came since."""
        roster = self.roster(namespace.id)
        if roster is None:
            return []
        return [each.envelope for each in roster.grounds]

    def _heard(self, heard: Heard) -> None:
        if heard.session is None:
            self.renew()
            return
        self._stale = True
        self._changed.tell()

    @property
    def settles_s(self) -> float:
        """Seconds until what peers have told is worked out; infinite when that is done."""
        return max(0.0, self._rest_until_s - time.monotonic()) if self._stale else float("inf")

    def renew(self) -> None:
        """Work everything out anew at the next use: namespaces or statements have changed."""
        self._known = None
        self._changed.tell()

    @property
    def next_change(self) -> trio.Event:
        """Set at the next change from now on."""
        return self._changed.next

    def scopes(self) -> list[Scope]:
        """Those of this node's namespaces that have a founder."""
        return list(self._scopes())

    def _said(self, namespace: NamespaceId, kinds: Iterable[StatementType] = _ABOUT_MEMBERS) -> list[SignedStatement]:
        """The statements about members that count in a namespace."""
        return [each for kind in kinds for each in self._statements.all(kind, namespace=namespace)]

    def _worked_out(self) -> _Known:
        """What is known; worked out anew when something has changed. The policy asks at every use of anything."""
        scopes = self._scopes()
        if self._known is None or self._known.scopes is not scopes or self.settles_s == 0.0:
            self._stale, began_s = False, time.thread_time()
            rosters: dict[bytes, Roster] = {}
            for scope in scopes:
                namespace = scope.namespace.id
                rosters[namespace] = build_roster(
                    namespace, scope.founder, self._said(namespace), devices_remove=scope.devices
                )
            self._known = _Known(scopes, rosters)
            took_s = time.thread_time() - began_s
            self._rest_until_s = time.monotonic() + (took_s / SHARE if took_s > FREE_S else 0.0)
        return self._known

    def roster(self, namespace: bytes) -> Roster | None:
        """The members of a namespace; None when this node is not in it, or it has no founder."""
        return self._worked_out().rosters.get(namespace)

    def members(self) -> Mapping[bytes, frozenset[bytes]]:
        """Publisher ids of the members of each namespace that has a founder: whose artifacts are believed in it."""
        return self._worked_out().members

    def departed(self) -> Mapping[bytes, Mapping[bytes, int]]:
        """Namespace id -> publisher id -> seconds since 1970 when it was removed, for those who are out."""
        return self._worked_out().departed

    def own_key(self, roster: Roster) -> PublisherKey | None:
        """The key with which this node speaks in a namespace: the founder's, else its newest that is a member."""
        keys = {key.public: key for key in self._keys()}
        if roster.founder in keys:
            return keys[roster.founder]
        return next((key for key in reversed(list(keys.values())) if key.public in roster.members), None)

    def said_by_members(self, roster: Roster) -> list[SignedStatement]:
        """What its members have said of each other and of themselves."""
        said = self._statements.all(StatementType.MEMBERSHIP, namespace=NamespaceId(roster.namespace))
        return [each for each in said if each.signer in roster.members]

    def keys_of_machine(self, roster: Roster, publisher: bytes) -> frozenset[bytes]:
        """All members that are keys of one member's machine, by that machine's own word."""
        kinds = (StatementType.MEMBERSHIP, StatementType.KEY_ROTATION)
        return keys_of_machine(roster, publisher, self._said(NamespaceId(roster.namespace), kinds))

    def latest_membership(self, body: Membership, key: PublisherKey) -> SignedStatement | None:
        """What this key said last of a member, when it says the same and still counts."""
        last = self._statements.latest(StatementType.MEMBERSHIP, body.subject, key.public)
        if last is None or last.body != msgspec.structs.replace(
            body, sequence=last.body.sequence, issued=last.body.issued
        ):
            return None
        roster = self.roster(NamespaceId(body.namespace))
        return last if roster is not None and body.member in roster.members else None

    def newest_word(self, roster: Roster, about: Collection[bytes]) -> int:
        """The highest sequence of what would let these in again, or count for more than their removal; 0 for nothing.

        What they have signed themselves is left out: it goes with them, whatever date they gave it.

        Args:
            roster: of the namespace.
            about: publisher ids.
        """
        said = self._said(NamespaceId(roster.namespace))
        speaking = roster.members.keys() - set(about)
        return max(
            (each.body.sequence for each in said if each.signer in speaking and _lets_in(each, about)), default=0
        )

    async def say(
        self, namespace: Namespace, key: PublisherKey, body: AnyStatement, *, above: int = 0
    ) -> SignedStatement:
        """Sign a statement with one of this node's keys, keep it, and tell the members.

        Args:
            namespace: in which it is told.
            key: that signs.
            body: its sequence and time of issue are set here.
            above: a sequence that it must be above, also when this clock is behind those of others.

        Raises:
            StoreError: it could not be kept.
        """
        now_s = self._now()
        draft = sign_statement(body, key)
        last = self._statements.latest(draft.kind, body.subject, key.public)
        sequence = next_sequence(now_s, max(above, last.body.sequence if last is not None else 0))
        statement = sign_statement(_dated(body, sequence, int(now_s)), key)
        late = timely(statement.body, now_s)
        if late is not None:
            raise StoreError(
                f"expected a clock that goes on, found that what this node has to say next cannot count: {late}",
                hint="set this machine's clock right; if it is, it was ahead before, or that of a member who spoke of "
                "this: wait that long",
            )
        self._statements.take([statement.envelope], namespace)
        await self._statements.settled()
        kept = self._statements.latest(statement.kind, body.subject, key.public)
        if kept is None or kept.body.sequence < sequence:
            raise StoreError(
                f"expected to keep a {statement.kind.value} of this node, found that it cannot be written",
                hint="kvnet status shows what is wrong with the disk",
            )
        return statement


def _lets_in(statement: SignedStatement, publishers: Collection[bytes]) -> bool:
    match statement.body:
        case Membership(member=member):
            return member in publishers
        case KeyRotation(new=new):
            return new in publishers
        case _:
            return True


def _dated(body: AnyStatement, sequence: int, issued_s: int) -> AnyStatement:
    return msgspec.structs.replace(body, sequence=sequence, issued=issued_s)
