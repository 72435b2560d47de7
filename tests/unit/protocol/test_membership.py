"""Proof of membership: members find each other, nobody else learns or fakes anything."""

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvnet.errors import ConfigError, ProtocolViolationError, UsageError
from kvnet.protocol.ids import PeerId
from kvnet.protocol.membership import Occasion, Role, make_proof, match_proof, proof_entry, shared_slots
from kvnet.trust.namespace import Namespace
from tests.unit.protocol.handshakes import ALICE, BOB, MALLORY, random_bytes

NAMESPACES = [Namespace(f"n{number}", bytes([number]) * 32, bytes([100 + number]) * 32) for number in range(1, 10)]
NONCE_A, NONCE_B, NONCE_M = (random_bytes(name, 32) for name in "abm")
PADDING = random_bytes("padding", 256)
FROM_ALICE = Occasion(Role.INITIATOR, ALICE, BOB, NONCE_A, NONCE_B)


def test_entry_is_the_written_formula() -> None:
    material = b"kvnet namespace proof v1" + b"initiator" + b"\x00\x26" + ALICE + b"\x00\x26" + BOB + NONCE_A + NONCE_B
    assert proof_entry(NAMESPACES[0], FROM_ALICE) == blake3(material, key=NAMESPACES[0].lookup_secret).digest()
    of_bob = b"kvnet namespace proof v1" + b"responder" + b"\x00\x26" + BOB + b"\x00\x26" + ALICE + NONCE_A + NONCE_B
    assert proof_entry(NAMESPACES[0], FROM_ALICE.reversed()) == blake3(of_bob, key=NAMESPACES[0].lookup_secret).digest()


@given(st.sets(st.integers(0, 8), max_size=8), st.sets(st.integers(0, 8), max_size=8))
def test_both_sides_find_the_namespaces_they_share_under_the_same_slots(ours: set[int], theirs: set[int]) -> None:
    alice = [NAMESPACES[number] for number in sorted(ours)]
    bob = [NAMESPACES[number] for number in sorted(theirs, reverse=True)]
    from_bob = FROM_ALICE.reversed()
    sent, received = make_proof(alice, FROM_ALICE, PADDING), make_proof(bob, from_bob, PADDING)
    at_alice = shared_slots(sent, received, alice, FROM_ALICE)
    at_bob = shared_slots(received, sent, bob, from_bob)
    assert {slot: alice[index] for slot, index in at_alice.items()} == {slot: bob[i] for slot, i in at_bob.items()}
    assert {alice[index].name for index in at_alice.values()} == {NAMESPACES[number].name for number in ours & theirs}


@pytest.mark.parametrize("count", range(9))
def test_proof_has_eight_entries_however_many_namespaces_there_are(count: int) -> None:
    proof = make_proof(NAMESPACES[:count], FROM_ALICE, PADDING)
    assert len(proof) == 8
    assert proof == sorted(set(proof))
    assert all(len(entry) == 32 for entry in proof)


def test_namespace_listed_twice_is_proved_once() -> None:
    twice = [NAMESPACES[0], NAMESPACES[0]]
    proof = make_proof(twice, FROM_ALICE, PADDING)
    assert len(proof) == 8
    assert list(match_proof(proof, twice, FROM_ALICE).values()) == [0]


def test_more_namespaces_than_entries_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 8 namespaces on one node, found 9"):
        make_proof(NAMESPACES, FROM_ALICE, PADDING)


@pytest.mark.parametrize("padding", [b"", PADDING[:-1], PADDING + b"x", bytes(256)])
def test_padding_that_is_not_random_bytes_is_refused(padding: bytes) -> None:
    with pytest.raises(UsageError, match="256 random bytes"):
        make_proof(NAMESPACES[:2], FROM_ALICE, padding)


def test_member_of_other_namespaces_learns_nothing_from_a_proof() -> None:
    assert match_proof(make_proof(NAMESPACES[:3], FROM_ALICE, PADDING), NAMESPACES[3:9], FROM_ALICE) == {}


def test_proofs_of_two_sessions_have_nothing_in_common() -> None:
    again = Occasion(Role.INITIATOR, ALICE, BOB, NONCE_M, NONCE_B)
    first = make_proof(NAMESPACES[:8], FROM_ALICE, PADDING)
    assert not set(first).intersection(make_proof(NAMESPACES[:8], again, PADDING))


# --- proofs that were made for something else -----------------------------------------------------------------


def assert_proves_nothing(proof: list[bytes], occasion: Occasion) -> None:
    assert match_proof(proof, NAMESPACES[:1], occasion) == {}


def test_relayed_proof_fails() -> None:
    """Mallory sits between Alice and Bob, hands on every byte and the nonces too; only the peer ids are her own."""
    for_mallory = make_proof(NAMESPACES[:1], Occasion(Role.INITIATOR, ALICE, MALLORY, NONCE_A, NONCE_B), PADDING)
    assert_proves_nothing(for_mallory, Occasion(Role.INITIATOR, MALLORY, BOB, NONCE_A, NONCE_B))
    assert_proves_nothing(for_mallory, Occasion(Role.INITIATOR, ALICE, BOB, NONCE_A, NONCE_B))


def test_reflected_proof_fails() -> None:
    """Mallory sends Bob's own proof back to him, with the same nonce as well."""
    of_bob = Occasion(Role.RESPONDER, BOB, MALLORY, NONCE_M, NONCE_B)
    assert_proves_nothing(make_proof(NAMESPACES[:1], of_bob, PADDING), of_bob.reversed())
    # In a second session in which Mallory is the responder.
    swapped = Occasion(Role.RESPONDER, MALLORY, BOB, NONCE_B, NONCE_M)
    assert_proves_nothing(make_proof(NAMESPACES[:1], of_bob, PADDING), swapped)


@pytest.mark.parametrize("nonces", [(NONCE_M, NONCE_B), (NONCE_A, NONCE_M), (NONCE_B, NONCE_A)])
def test_proof_of_another_session_fails(nonces: tuple[bytes, bytes]) -> None:
    replayed = make_proof(NAMESPACES[:1], FROM_ALICE, PADDING)
    assert_proves_nothing(replayed, Occasion(Role.INITIATOR, ALICE, BOB, *nonces))


def test_proof_in_the_other_role_fails() -> None:
    proof = make_proof(NAMESPACES[:1], FROM_ALICE, PADDING)
    assert_proves_nothing(proof, Occasion(Role.RESPONDER, ALICE, BOB, NONCE_A, NONCE_B))


def test_peer_ids_that_run_together_make_different_proofs() -> None:
    first = Occasion(Role.INITIATOR, PeerId(b"ab"), PeerId(b"c"), NONCE_A, NONCE_B)
    second = Occasion(Role.INITIATOR, PeerId(b"a"), PeerId(b"bc"), NONCE_A, NONCE_B)
    assert proof_entry(NAMESPACES[0], first) != proof_entry(NAMESPACES[0], second)


# --- proofs out of shape --------------------------------------------------------------------------------------

GOOD = make_proof(NAMESPACES[:1], FROM_ALICE, PADDING)


@pytest.mark.parametrize(
    "entries",
    [[], GOOD[:7], [*GOOD, b"\xff" * 32], [*GOOD[:7], b"\xff" * 31], [GOOD[1], GOOD[0], *GOOD[2:]], [GOOD[0]] * 8],
)
def test_proof_out_of_shape_is_a_violation(entries: list[bytes]) -> None:
    with pytest.raises(ProtocolViolationError):
        match_proof(entries, NAMESPACES[:1], FROM_ALICE)
