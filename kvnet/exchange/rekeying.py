"""Rekeying: give a namespace a new lookup secret without those who are removed, and follow when others do.

Whoever is awake follows at once; whoever was asleep proves the old secret when it wakes, gets the statements for it and
nothing else, and follows then. The signer of the rekeying that counts seals its secret for members who came in unknown
to it, and makes another one when it was sealed for somebody who turns out to be removed.
"""

import logging
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, Final, Protocol

import trio

from kvnet.errors import KvnetError, TrustError
from kvnet.exchange.enrolment import InvitationKeep
from kvnet.exchange.lane import Lane
from kvnet.exchange.rosters import Keys, Rosters, Scope
from kvnet.format.hashes import NamespaceId
from kvnet.trust.keys import PublisherKey
from kvnet.trust.namespace import SECRET_SIZE_BYTES
from kvnet.trust.roster import RekeyNeeded, Roster
from kvnet.trust.sealing import EPHEMERAL_SIZE_BYTES, can_be_sealed_for, seal_for
from kvnet.trust.statement_bodies import MAX_MEMBERS, Membership, Rekey, SealedSecret
from kvnet.trust.statements import SignedStatement

if TYPE_CHECKING:
    from trio_typing import TaskStatus

_log = logging.getLogger(__name__)

RETRY_S: Final = 30.0
"""Seconds after which what failed is tried again."""


class SecretKeep(Protocol):
    """Where a node keeps its namespaces' secrets."""

    def rekey(self, namespace: NamespaceId, lookup_secret: bytes) -> None:
        """Replace a lookup secret, and keep the former one among the former; on disk when this returns. Blocking."""
        ...


class Rekeyer:
    """Makes and follows rekeyings.

    Args:
        rosters: of this node's namespaces.
        secrets: of this node.
        invitations: of this node: those that somebody removed has used are given up.
        keys: of this node.
        lane: where blocking work runs.
        changed: called after secrets have changed, so that peers are shown and told what counts now.
        random: fresh random bytes.
    """

    def __init__(
        self,
        rosters: Rosters,
        secrets: SecretKeep,
        invitations: InvitationKeep,
        keys: Keys,
        lane: Lane,
        *,
        changed: Callable[[], Awaitable[None]],
        random: Callable[[int], bytes],
    ) -> None:
        self._rosters = rosters
        self._secrets = secrets
        self._invitations = invitations
        self._keys = keys
        self._lane = lane
        self._secrets_changed = changed
        self._random = random
        self._working = trio.Lock()

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Follow until cancelled."""
        task_status.started()
        while True:
            next_change, retry_s = self._rosters.next_change, float("inf")
            try:
                await self.follow()
            except KvnetError as error:
                _log.warning("a rekeying could not be followed: %s", error)
                retry_s = RETRY_S
            settles_s = self._rosters.settles_s
            with trio.move_on_after(min(retry_s, settles_s)) as waiting:
                await next_change.wait()
            if waiting.cancelled_caught and settles_s < retry_s:
                # Whoever waits for a change has seen the one before what peers have told since.
                self._rosters.renew()

    async def follow(self) -> None:
        """Do now what the statements known now ask for.

        Raises:
            KvnetError: it could not be written.
        """
        async with self._working:
            changed = [await self._follow_one(scope) for scope in self._rosters.scopes()]
            if any(changed):
                self._rosters.renew()
                await self._secrets_changed()

    async def _follow_one(self, scope: Scope) -> bool:
        namespace = scope.namespace
        roster = self._rosters.roster(namespace.id)
        if roster is None:
            return False
        if roster.removed:
            await self._lane.run(self._invitations.withdraw, namespace.id, roster.removed)
        await self._vouch_for_own(scope, roster)
        roster = await self._mend(scope, self._rosters.roster(namespace.id) or roster)
        secret = self._secret(roster)
        if secret is None or secret == namespace.lookup_secret:
            return False
        await self._lane.run(self._secrets.rekey, namespace.id, secret)
        _log.info("%s has a new lookup secret", namespace.name)
        return True

    async def _vouch_for_own(self, scope: Scope, roster: Roster) -> None:
        """Whatever this node signs or has signed is by a member, where one of its keys is."""
        speaks = self._rosters.own_key(roster)
        if speaks is None:
            return
        as_before = roster.members[speaks.public]
        for key in self._keys():
            if key.public in roster.members or key.public in roster.removed:
                continue
            body = Membership(
                sequence=0,
                issued=0,
                expires=0,
                namespace=scope.namespace.id,
                member=key.public,
                peers=as_before.peers,
                role="device" if scope.devices else "colleague",
                label=as_before.label,
            )
            await self._rosters.say(scope.namespace, speaks, body)

    async def _mend(self, scope: Scope, roster: Roster) -> Roster:
        """Rekey again where this node made the secret that counts, and it is sealed for too many or too few."""
        maker, needed = self._maker(roster), roster.rekey_needed
        if maker is None or needed is RekeyNeeded.NOTHING:
            return roster
        if needed is RekeyNeeded.MORE and not any(map(can_be_sealed_for, roster.unsealed)):
            return roster
        secret = self._random(SECRET_SIZE_BYTES) if needed is RekeyNeeded.FRESH else self._secret(roster)
        if secret is not None:
            await self._say(scope, roster, maker, secret, ())
        return self._rosters.roster(scope.namespace.id) or roster

    def _maker(self, roster: Roster) -> PublisherKey | None:
        """The own key that signed the rekeying that counts; None when somebody else did."""
        signer = roster.rekey.signer if roster.rekey is not None else b""
        return next((key for key in self._keys() if key.public == signer), None)

    def _secret(self, roster: Roster) -> bytes | None:
        """The lookup secret of the rekeying that counts, as far as it is sealed for this node."""
        for key in self._keys():
            box = roster.sealed_for(key.public)
            secret = key.open_sealed(box) if box is not None else None
            if secret is not None and len(secret) == SECRET_SIZE_BYTES and any(secret):
                return secret
        return None

    async def remove(
        self, namespace: NamespaceId, publishers: Collection[bytes], *, guests: Collection[bytes] = ()
    ) -> SignedStatement:
        """Remove members: a new lookup secret, sealed for everybody else. It counts here when this returns.

        Args:
            namespace: its id.
            publishers: publisher ids; members of this namespace.
            guests: members whom those have let in and nobody vouches for: they need a new invitation.

        Raises:
            TrustError: this node may not remove them.
            StoreError: it could not be written.
        """
        scope = next((each for each in self._rosters.scopes() if each.namespace.id == namespace), None)
        roster = self._rosters.roster(namespace)
        if scope is None or roster is None:
            raise TrustError("expected a namespace that this node is in, found none")
        key = self._rosters.own_key(roster)
        if key is None or not (scope.devices or key.public == roster.founder):
            raise TrustError(
                f"expected the founder of {scope.namespace.name} to remove members, found a node that is not",
                hint="kvnet swarm members shows who the founder is",
            )
        if roster.founder in publishers:
            raise TrustError(
                "expected somebody else than the founder, who cannot be removed",
                hint="make a new swarm and invite everybody else; for mine: kvnet namespace import of a new one",
            )
        if len(roster.removed) + len(publishers) > MAX_MEMBERS:
            raise TrustError(
                f"expected at most {MAX_MEMBERS} members that were removed from {scope.namespace.name}, found more",
                hint="make a new swarm and invite those who stay",
            )
        async with self._working:
            said = await self._say(scope, roster, key, self._random(SECRET_SIZE_BYTES), publishers, guests)
        await self.follow()
        return said

    async def _say(
        self,
        scope: Scope,
        roster: Roster,
        key: PublisherKey,
        secret: bytes,
        removed: Collection[bytes],
        guests: Collection[bytes] = (),
    ) -> SignedStatement:
        stay = [each for each in roster.members if each not in removed and each not in guests]
        boxes = [(each, seal_for(each, secret, self._random(EPHEMERAL_SIZE_BYTES))) for each in stay]
        out = sorted({*roster.removed, *removed})
        body = Rekey(
            sequence=0,
            issued=0,
            expires=0,
            namespace=scope.namespace.id,
            removed=tuple(out[:MAX_MEMBERS]),
            sealed=tuple(SealedSecret(member=each, box=box) for each, box in boxes if box is not None),
        )
        # Else a removal by a clock that is behind would take nobody out, and nobody would notice.
        above = self._rosters.newest_word(roster, out)
        return await self._rosters.say(scope.namespace, key, body, above=above)
