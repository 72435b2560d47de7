"""Proof of membership: which namespaces two peers share, told to nobody who is in none of them.

Each side sends 8 entries, one for each of its namespaces and random ones for the rest::

    entry = BLAKE3.keyed(lookup_secret, "kvnet namespace proof v1" || role || u16be(len(own)) || own
                                        || u16be(len(other)) || other || nonce_initiator || nonce_responder)

``own`` and ``other`` are the peer ids that the transport has authenticated, seen from the sender, so a proof that a
third peer passes on does not fit; ``role`` is the ASCII ``initiator`` or ``responder`` of the sender, so a proof sent
back to its maker does not fit; each side has chosen one nonce, so an old proof does not fit. Whoever lacks a
namespace's lookup secret cannot tell its entry from a random one.

Entries are sent in ascending order: as they look random, that order says nothing about which are real.
"""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from kvnet.errors import ConfigError, ProtocolViolationError, UsageError
from kvnet.format.hashes import keyed_hash
from kvnet.protocol.ids import PeerId
from kvnet.trust.namespace import Namespace

PROOF_ENTRIES = 8
"""Entries in a proof, and so the most namespaces a node can be in."""
PROOF_ENTRY_SIZE_BYTES = 32
"""A keyed BLAKE3 hash, or random bytes in its place."""
NONCE_SIZE_BYTES = 32
"""What each end adds, so that no proof is good a second time."""
PADDING_SIZE_BYTES = PROOF_ENTRIES * PROOF_ENTRY_SIZE_BYTES
"""Random bytes a proof needs at most."""

_CONTEXT = b"kvnet namespace proof v1"


class Role(Enum):
    """Who opened the control stream; the value is what is hashed."""

    INITIATOR = b"initiator"
    RESPONDER = b"responder"

    @property
    def other(self) -> "Role":
        """The role of the peer."""
        return Role.RESPONDER if self is Role.INITIATOR else Role.INITIATOR


@dataclass(frozen=True, slots=True)
class Occasion:
    """What binds a proof to one session: who, to whom, in which role, with which nonces.

    Attributes:
        role: of the side that sends the proof.
        own: peer id of the side that sends it.
        other: peer id of the side that receives it.
        nonce_initiator: 32 bytes chosen by the initiator.
        nonce_responder: 32 bytes chosen by the responder.
    """

    role: Role
    own: PeerId
    other: PeerId
    nonce_initiator: bytes
    nonce_responder: bytes

    def reversed(self) -> "Occasion":
        """The same session, with the proof going the other way."""
        return Occasion(self.role.other, self.other, self.own, self.nonce_initiator, self.nonce_responder)

    def encode(self) -> bytes:
        """The bytes that are hashed under each lookup secret."""
        ids = b"".join(len(peer).to_bytes(2, "big") + peer for peer in (self.own, self.other))
        return _CONTEXT + self.role.value + ids + self.nonce_initiator + self.nonce_responder


def proof_entry(namespace: Namespace, occasion: Occasion) -> bytes:
    """The 32-byte entry that proves membership in one namespace on one occasion."""
    return keyed_hash(namespace.lookup_secret, occasion.encode())


def make_proof(namespaces: Sequence[Namespace], occasion: Occasion, padding: bytes) -> list[bytes]:
    """The 8 entries to send.

    Args:
        namespaces: those of this node, at most 8.
        occasion: with ``own`` being this node.
        padding: 256 fresh random bytes.

    Raises:
        ConfigError: more than 8 namespaces.
        UsageError: the padding is not 256 random bytes.
    """
    if len(namespaces) > PROOF_ENTRIES:
        raise ConfigError(f"expected at most {PROOF_ENTRIES} namespaces on one node, found {len(namespaces)}")
    entries = {proof_entry(namespace, occasion) for namespace in namespaces}
    for start in range(0, PADDING_SIZE_BYTES, PROOF_ENTRY_SIZE_BYTES):
        if len(entries) < PROOF_ENTRIES:
            entries.add(padding[start : start + PROOF_ENTRY_SIZE_BYTES])
    if len(padding) != PADDING_SIZE_BYTES or len(entries) != PROOF_ENTRIES:
        raise UsageError(f"expected {PADDING_SIZE_BYTES} random bytes to pad a proof with, found {len(padding)}")
    return sorted(entries)


def match_proof(entries: Sequence[bytes], namespaces: Sequence[Namespace], occasion: Occasion) -> dict[int, int]:
    """Which entries prove membership in which of our namespaces.

    Every entry is compared with every namespace, in constant time, so that the time taken tells nothing.

    Args:
        entries: as received.
        namespaces: those of this node.
        occasion: as the sender of the entries saw it (``own`` being the sender).

    Returns:
        Position in ``entries`` -> index in ``namespaces``.

    Raises:
        ProtocolViolationError: not 8 entries of 32 bytes in ascending order, each once.
    """
    if len(entries) != PROOF_ENTRIES or any(len(entry) != PROOF_ENTRY_SIZE_BYTES for entry in entries):
        raise ProtocolViolationError(f"expected a proof of {PROOF_ENTRIES} entries of {PROOF_ENTRY_SIZE_BYTES} bytes")
    if any(first >= second for first, second in pairwise(entries)):
        raise ProtocolViolationError("expected the entries of a proof in ascending order, each once")
    matches: dict[int, int] = {}
    for index, namespace in enumerate(namespaces):
        expected = proof_entry(namespace, occasion)
        for position, entry in enumerate(entries):
            if hmac.compare_digest(entry, expected):
                matches.setdefault(position, index)
    return matches


def shared_slots(
    sent: Sequence[bytes], received: Sequence[bytes], namespaces: Sequence[Namespace], occasion: Occasion
) -> dict[int, int]:
    """The namespaces both sides have proved, by slot.

    A slot is the position of the entry in the initiator's proof, so both sides give a namespace the same number.

    Args:
        sent: our proof.
        received: the peer's.
        namespaces: those of this node.
        occasion: with ``own`` being this node.

    Returns:
        Slot -> index in ``namespaces``.

    Raises:
        ProtocolViolationError: see `match_proof`.
    """
    proved = match_proof(received, namespaces, occasion.reversed())
    if occasion.role is Role.RESPONDER:
        return proved
    return {sent.index(proof_entry(namespaces[index], occasion)): index for index in sorted(proved.values())}
