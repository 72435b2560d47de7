"""Golden vectors of what makes members: proofs, invitations, enrolment, sealed secrets and rosters.

`regenerate_vectors.py` writes them to ``tests/vectors/membership.json``. Every key, nonce and date is fixed.
"""

from typing import Any, Final

from kvnet.format.hashes import derive_key
from kvnet.protocol.enrolment import make_enrol
from kvnet.protocol.ids import PeerId
from kvnet.protocol.membership import Occasion, Role, proof_entry
from kvnet.protocol.messages.base import encode_message
from kvnet.protocol.messages.enrolment import Enrolled
from kvnet.trust.invitation import invitation_text
from kvnet.trust.keys import PublisherKey
from kvnet.trust.namespace import Namespace, encode_namespace_file
from kvnet.trust.roster import build_roster
from kvnet.trust.sealing import seal_for
from kvnet.trust.statement_bodies import Invitation, KeyRotation, Membership, Rekey, SealedSecret
from kvnet.trust.statements import SignedStatement, rotation_message, sign_statement

NAMESPACE: Final = Namespace("team", bytes(range(32)), bytes(range(32, 64)))
NEW_SECRETS: Final = {1: bytes(range(64, 96)), 2: bytes(range(96, 128))}
ISSUED_S: Final = 1_800_000_000
LABEL: Final = "Zoë's laptop"
NAMES: Final = ("founder", "ann", "bob", "cat", "dan")

INVITER, GUEST = (PeerId(bytes.fromhex("002408011220") + bytes([fill]) * 32) for fill in (0xA1, 0xB2))
OCCASION: Final = Occasion(Role.INITIATOR, GUEST, INVITER, bytes([0x11]) * 32, bytes([0x22]) * 32)


def seed(name: str) -> bytes:
    """The seed of somebody's publisher key."""
    return bytes([NAMES.index(name) + 1]) * 32


def key(name: str) -> PublisherKey:
    """Somebody's publisher key."""
    return PublisherKey(seed(name))


def lets_in(signer: str, member: str, at: int) -> SignedStatement:
    """A membership, so many seconds after the first of all."""
    body = Membership(
        sequence=(ISSUED_S + at) * 1000,
        issued=ISSUED_S + at,
        expires=0,
        namespace=NAMESPACE.id,
        member=key(member).public,
        peers=(),
        role="colleague",
        label=member,
    )
    return sign_statement(body, key(signer))


def rekeys(signer: str, at: int, secret: int, *, out: tuple[str, ...] = (), stay: tuple[str, ...]) -> SignedStatement:
    """A rekeying that seals one of `NEW_SECRETS` for those who stay."""
    sealed = []
    for name in stay:
        box = seal_for(key(name).public, NEW_SECRETS[secret], bytes([0xE0 + NAMES.index(name)]) * 32)
        if box is None:
            raise ValueError(f"expected a key that can be sealed for, found that of {name}")
        sealed.append(SealedSecret(member=key(name).public, box=box))
    body = Rekey(
        sequence=(ISSUED_S + at) * 1000,
        issued=ISSUED_S + at,
        expires=0,
        namespace=NAMESPACE.id,
        removed=tuple(key(name).public for name in out),
        sealed=tuple(sealed),
    )
    return sign_statement(body, key(signer))


def rotates(old: str, new: str, at: int) -> SignedStatement:
    """A key that gives way to another."""
    sequence = (ISSUED_S + at) * 1000
    signature = key(new).sign(rotation_message(key(old).public, key(new).public, sequence))
    body = KeyRotation(sequence=sequence, issued=ISSUED_S + at, expires=0, new=key(new).public, new_signature=signature)
    return sign_statement(body, key(old))


def _rosters() -> dict[str, tuple[bool, list[SignedStatement]]]:
    """Whether it is ``mine``, and what was told, in no particular order."""
    ann, bob, cat = lets_in("founder", "ann", 1), lets_in("ann", "bob", 2), lets_in("bob", "cat", 3)
    without_bob = rekeys("founder", 10, 1, out=("bob",), stay=("founder", "ann", "cat"))
    return {
        "nobody was ever invited": (False, []),
        "a chain of invitations": (False, [cat, bob, ann]),
        "the word of a stranger": (False, [lets_in("bob", "cat", 1), ann]),
        "one is removed, and whom it let in is vouched for": (False, [without_bob, cat, ann, bob]),
        "one is removed, and whom it let in is not": (
            False,
            [ann, bob, cat, rekeys("founder", 10, 1, out=("bob",), stay=("founder", "ann"))],
        ),
        "one comes back by a later word": (False, [ann, bob, cat, without_bob, lets_in("ann", "bob", 11)]),
        "an earlier word brings nobody back": (False, [ann, bob, cat, without_bob, lets_in("cat", "bob", 9)]),
        "a colleague cannot rekey a swarm": (
            False,
            [ann, bob, cat, rekeys("ann", 10, 1, out=("cat",), stay=("founder", "ann", "bob"))],
        ),
        "any device rekeys mine": (
            True,
            [ann, bob, cat, rekeys("ann", 10, 1, out=("cat",), stay=("founder", "ann", "bob"))],
        ),
        "no device removes the founder": (
            True,
            [ann, bob, rekeys("ann", 10, 1, out=("founder", "bob"), stay=("ann",))],
        ),
        "of two devices the founder's word comes first, whatever the dates": (
            True,
            [
                ann,
                bob,
                rekeys("ann", 4, 2, out=("bob",), stay=("founder", "ann")),
                rekeys("founder", 10, 1, out=("ann",), stay=("founder", "bob")),
            ],
        ),
        "the later of two rekeyings counts": (
            False,
            [
                ann,
                bob,
                cat,
                rekeys("founder", 20, 2, out=("cat",), stay=("founder", "ann")),
                without_bob,
            ],
        ),
        "a key gave way to another": (False, [ann, rotates("ann", "dan", 5), lets_in("dan", "bob", 6)]),
    }


def membership_vectors() -> dict[str, Any]:
    """What `docs/protocol.md` says of members in sections 4 and 19, in bytes."""
    founder, guest = key("founder"), key("ann")
    invitation = Invitation(
        sequence=ISSUED_S * 1000,
        issued=ISSUED_S,
        expires=ISSUED_S + 86_400,
        id=bytes([0x33]) * 16,
        secret=bytes([0x44]) * 32,
        role="colleague",
        swarm=NAMESPACE.name,
        namespace=NAMESPACE.id,
        founder=founder.public,
        peer=INVITER,
        addresses=("/ip4/192.168.1.5/tcp/5864", "/ip6/2001:db8::1/tcp/5864"),
        uses=1,
    )
    signed = sign_statement(invitation, founder)
    enrol = make_enrol(invitation, OCCASION, guest, LABEL)
    file = encode_namespace_file(NAMESPACE)
    enrolled = Enrolled(request_id=0, namespace=file, statements=(lets_in("founder", "ann", 1).envelope,))
    box = seal_for(guest.public, NEW_SECRETS[1], bytes([0xEE]) * 32)
    return {
        "seeds": {name: seed(name).hex() for name in NAMES},
        "publishers": {name: key(name).public.hex() for name in NAMES},
        "namespace": {
            "name": NAMESPACE.name,
            "prefix_secret": NAMESPACE.prefix_secret.hex(),
            "lookup_secret": NAMESPACE.lookup_secret.hex(),
            "id": NAMESPACE.id.hex(),
            "file": file.hex(),
        },
        "session": {
            "initiator": GUEST.hex(),
            "responder": INVITER.hex(),
            "nonce_initiator": OCCASION.nonce_initiator.hex(),
            "nonce_responder": OCCASION.nonce_responder.hex(),
            "m_initiator": OCCASION.encode().hex(),
            "m_responder": OCCASION.reversed().encode().hex(),
            "entry_initiator": proof_entry(NAMESPACE, OCCASION).hex(),
            "entry_responder": proof_entry(NAMESPACE, OCCASION.reversed()).hex(),
            "id": derive_key("kvnet 2026-11 control session", OCCASION.encode())[:16].hex(),
        },
        "invitation": {"signer": "founder", "envelope": signed.envelope.hex(), "text": invitation_text(signed)},
        "enrolment": {
            "guest": "ann",
            "label": LABEL,
            "proof": enrol.proof.hex(),
            "signature": enrol.signature.hex(),
            "enrol": encode_message(enrol).hex(),
            "enrolled": encode_message(enrolled).hex(),
        },
        "sealed": {"for": "ann", "ephemeral": "ee" * 32, "secret": NEW_SECRETS[1].hex(), "box": (box or b"").hex()},
        "rosters": [_roster(name, mine, told) for name, (mine, told) in _rosters().items()],
    }


def _roster(name: str, mine: bool, told: list[SignedStatement]) -> dict[str, Any]:
    roster = build_roster(NAMESPACE.id, key("founder").public, told, devices_remove=mine)
    names = {key(each).public: each for each in NAMES}
    return {
        "name": name,
        "mine": mine,
        "told": [each.envelope.hex() for each in told],
        "members": sorted(names[each] for each in roster.members),
        "removed": {names[each]: sequence for each, sequence in sorted(roster.removed.items())},
        "rekeying": roster.rekey.envelope.hex() if roster.rekey is not None else "",
        "lookup_secret": {
            each: secret.hex()
            for each in NAMES
            if (sealed := roster.sealed_for(key(each).public)) and (secret := key(each).open_sealed(sealed))
        },
    }
