"""Which keys of a roster are one machine's, so that whoever removes a machine removes all of them, and nobody else.

A machine may sign with several keys: one has rotated to another, or has let another in with its own peer ids. Both are
the word of the machine that is removed, so that neither may take anybody else along, or save the machine itself: peer
ids that a member claims for itself prove nothing, and whom somebody else has let in as well is not its key.
"""

from collections.abc import Collection, Iterable

from kvnet.trust.roster import Roster
from kvnet.trust.statement_bodies import KeyRotation, Membership
from kvnet.trust.statements import SignedStatement


def keys_of_machine(roster: Roster, publisher: bytes, statements: Iterable[SignedStatement]) -> frozenset[bytes]:
    """The members that go when a member is removed, itself among them.

    Args:
        roster: of the namespace.
        publisher: publisher id of a member.
        statements: memberships and rotations told in the namespace, whose signatures have been checked.
    """
    ever = {*roster.members, *roster.removed}
    rotated: list[tuple[bytes, bytes]] = []
    let_in: list[tuple[bytes, Membership]] = []
    sponsors: dict[bytes, set[bytes]] = {}
    for statement in statements:
        body = statement.body
        if isinstance(body, KeyRotation):
            rotated.append((statement.signer, body.new))
        elif isinstance(body, Membership) and _speaks_of_another(statement, body, roster, ever):
            sponsors.setdefault(body.member, set()).add(statement.signer)
            let_in.append((statement.signer, body))
    found = {publisher}
    before: set[bytes] = set()
    while found != before:
        before = set(found)
        for old, new in rotated:
            if old in found or new in found:
                found |= {old, new}
        for signer, body in let_in:
            if not _with_its_own_peers(roster, signer, body):
                continue
            if body.member in found:
                found.add(signer)
            elif signer in found and body.member != roster.founder and sponsors[body.member] <= found:
                found.add(body.member)
    return frozenset(found & set(roster.members))


def _speaks_of_another(statement: SignedStatement, body: Membership, roster: Roster, ever: Collection[bytes]) -> bool:
    return body.namespace == roster.namespace and statement.signer in ever and statement.signer != body.member


def _with_its_own_peers(roster: Roster, signer: bytes, body: Membership) -> bool:
    member = roster.members.get(signer)
    return member is not None and not set(member.peers).isdisjoint(body.peers)
