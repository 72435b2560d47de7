"""Enrolment: what a guest with an invitation sends, what the inviter checks, and what the guest checks in return.

The guest proves the invitation's secret with a MAC over the session's *occasion* (`kvnet.protocol.membership`: role,
both peer ids as the transport has authenticated them, both nonces), its publisher id and its label, and signs the same
with its publisher key. A proof that a third peer passes on, or one from another session, does not fit; nobody can enrol
somebody else's key.

The inviter does the same work whatever is wrong, and answers all that is wrong alike. The namespace's secrets go out in
the answer alone, over the authenticated session; an invitation seen after it was used up or has expired opens nothing.
"""

import hmac
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from kvnet.errors import KvnetError, TrustError
from kvnet.format.hashes import derive_key, keyed_hash
from kvnet.protocol.membership import Occasion
from kvnet.protocol.messages.enrolment import Enrol, Enrolled
from kvnet.trust.keys import PublisherKey, publisher_text, verify_signature
from kvnet.trust.namespace import Namespace, decode_namespace_file
from kvnet.trust.roster import DEVICE, Roster, build_roster
from kvnet.trust.statement_bodies import Invitation, Membership
from kvnet.trust.statements import SignedStatement, open_statement, timely

_MAC_CONTEXT: Final = "kvnet 2026-11 enrolment proof"
_SIGNED: Final = b"kvnet 2026-11 enrolment\0"
_NOBODYS_SECRET: Final = derive_key("kvnet 2026-11 no invitation", b"")
"""Stands in for the secret of an invitation that is not there, so that the same is computed."""


@dataclass(frozen=True, slots=True)
class OpenInvitation:
    """What the inviter remembers of an invitation.

    Attributes:
        secret: of the invitation.
        expires_s: seconds since 1970.
        uses: how many may join with it.
        used_by: publisher ids of those who did.
    """

    secret: bytes
    expires_s: float
    uses: int
    used_by: Collection[bytes] = ()


@dataclass(frozen=True, slots=True)
class Admission:
    """What a guest got.

    Attributes:
        namespace: with its secrets, named as the invitation names it.
        roster: who is in it, as far as the answer shows.
        statements: that show it, to keep.
    """

    namespace: Namespace
    roster: Roster
    statements: tuple[SignedStatement, ...]


def make_enrol(invitation: Invitation, occasion: Occasion, key: PublisherKey, label: str) -> Enrol:
    """The request of a guest.

    Args:
        invitation: that it has.
        occasion: of the session, ``own`` being the guest.
        key: its publisher key.
        label: what it calls itself.
    """
    said = _said(invitation.id, occasion, key.public, label)
    return Enrol(
        request_id=0,
        invitation=invitation.id,
        proof=_proof(invitation.secret, said),
        publisher=key.public,
        signature=key.sign(_SIGNED + said),
        label=label,
    )


def may_enrol(
    enrol: Enrol, occasion: Occasion, known: OpenInvitation | None, *, removed: Collection[bytes], now_s: float
) -> bool:
    """Whether a guest is let in. Everything is computed whatever the answer, so that the time taken tells nothing.

    Args:
        enrol: its request.
        occasion: of the session, ``own`` being the guest.
        known: the invitation of that id; None when there is none.
        removed: publisher ids that were removed from the namespace: no old invitation lets them back in.
        now_s: seconds since 1970.
    """
    said = _said(enrol.invitation, occasion, enrol.publisher, enrol.label)
    open_one = known or OpenInvitation(_NOBODYS_SECRET, now_s + 1.0, 1)
    proved = hmac.compare_digest(_proof(open_one.secret, said), enrol.proof)
    signed = verify_signature(enrol.publisher, _SIGNED + said, enrol.signature)
    free = enrol.publisher in open_one.used_by or len(open_one.used_by) < open_one.uses
    fresh = now_s < open_one.expires_s
    welcome = enrol.publisher not in removed
    return all((known is not None, proved, signed, free, fresh, welcome))


def check_enrolled(
    enrolled: Enrolled, invitation: Invitation, inviter: bytes, own: bytes, *, now_s: float
) -> Admission:
    """What the answer gives, once it shows that the guest is a member by the inviter's word and that by the founder's.

    Args:
        enrolled: the answer.
        invitation: that was used.
        inviter: publisher id of who signed the invitation.
        own: publisher id of the guest.
        now_s: seconds since 1970.

    Raises:
        TrustError: it shows something else, or not enough.
        MalformedError: bytes that are no statement or no namespace file.
        IntegrityError: a namespace file that was changed.
    """
    given = decode_namespace_file(enrolled.namespace)
    if given.id != invitation.namespace:
        raise _refused("the namespace that the invitation names, found another one")
    statements = tuple(open_statement(envelope) for envelope in enrolled.statements)
    for statement in statements:
        late = timely(statement.body, now_s)
        if late is not None:
            raise TrustError(
                f"expected statements that count now, found one of which {late}",
                hint="are both machines' clocks right?",
            )
    roster = build_roster(given.id, invitation.founder, statements, devices_remove=invitation.role == DEVICE)
    if inviter not in roster.members:
        raise _refused(
            f"the inviter {publisher_text(inviter)} among the members, found no chain from the founder to it"
        )
    admitted = any(
        isinstance(each.body, Membership) and (each.body.member, each.signer) == (own, inviter) for each in statements
    )
    if own not in roster.members or not admitted:
        raise _refused("a membership that the inviter has signed, found none that counts")
    return Admission(Namespace(invitation.swarm, given.prefix_secret, given.lookup_secret), roster, statements)


def _said(invitation: bytes, occasion: Occasion, publisher: bytes, label: str) -> bytes:
    """What the guest proves and signs; every part before the label has a length of its own."""
    seen = occasion.encode()
    return invitation + len(seen).to_bytes(2, "big") + seen + publisher + label.encode("utf-8")


def _proof(secret: bytes, said: bytes) -> bytes:
    return keyed_hash(derive_key(_MAC_CONTEXT, secret), said)


def _refused(words: str) -> KvnetError:
    return TrustError(
        f"expected {words}", hint="ask for a new invitation; the inviter may run another version of kvnet"
    )
