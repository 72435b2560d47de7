"""The handshake of a control session: versions, proofs and what an attacker may do to them."""

from typing import Any

import pytest

from kvnet.errors import ConfigError, ProtocolViolationError, UnsupportedVersionError, UsageError
from kvnet.protocol.escaping import escape_text
from kvnet.protocol.handshake import SessionConfig
from kvnet.protocol.membership import Occasion, Role, make_proof
from kvnet.protocol.messages.handshake import Challenge, Hello, Proof
from kvnet.protocol.session import ControlSession
from kvnet.trust.namespace import Namespace
from tests.unit.protocol.handshakes import ALICE, BOB, MALLORY, Pair, config, frame, random_bytes, session
from tests.unit.trust.samples import MINE, OTHER

H = b"h" * 32
THIRD = Namespace("third", b"r" * 32, b"n" * 32)


def test_members_open_a_session_with_the_same_slots_and_id() -> None:
    pair = Pair.of([MINE, OTHER], [THIRD, OTHER]).pump()
    assert pair.alice.opened is not None
    assert pair.bob.opened is not None
    assert pair.alice_saw == [pair.alice.opened]
    assert pair.bob_saw == [pair.bob.opened]
    [(slot, index)] = pair.alice.opened.slots.items()
    assert (index, pair.bob.opened.slots) == (1, {slot: 1})
    assert pair.alice.opened.namespaces == pair.bob.opened.namespaces == {slot: OTHER}
    assert pair.alice.opened.session_id == pair.bob.opened.session_id
    assert len(pair.alice.opened.session_id) == 16
    assert pair.alice.opened.version == 1
    assert pair.alice.opened.capabilities == {"serve"}
    assert pair.alice.opened.agent == "kvnet/test"


def test_peers_without_a_common_namespace_open_a_session_without_slots() -> None:
    pair = Pair.of([MINE], [OTHER]).pump()
    assert pair.alice.opened is not None
    assert pair.alice.opened.slots == {}


def test_peers_without_any_namespace_open_a_session_without_slots() -> None:
    pair = Pair.of([], []).pump()
    assert pair.bob.opened is not None
    assert pair.bob.opened.slots == {}


def test_sessions_of_the_same_peers_have_different_ids() -> None:
    ids = set()
    for label in ("first", "second"):
        alice = session(Role.INITIATOR, ALICE, BOB, [MINE], label=label)
        bob = session(Role.RESPONDER, BOB, ALICE, [MINE], label=label)
        pair = Pair(alice, bob).pump()
        assert pair.alice.opened is not None
        ids.add(pair.alice.opened.session_id)
    assert len(ids) == 2


def test_agent_of_a_peer_is_escaped() -> None:
    hostile = "evil\x1b[2J\u202e\\n\n"
    alice = session(Role.INITIATOR, ALICE, BOB, [MINE], agent=hostile)
    pair = Pair(alice, session(Role.RESPONDER, BOB, ALICE, [MINE])).pump()
    assert pair.bob.opened is not None
    assert pair.bob.opened.agent == "evil\\x1b[2J\\u202e\\\\n\\n"
    assert escape_text("Zürich 東京") == "Zürich 東京"


def test_agent_is_cut_to_what_a_message_takes() -> None:
    alice = session(Role.INITIATOR, ALICE, BOB, [], agent="a" * 1000)
    pair = Pair(alice, session(Role.RESPONDER, BOB, ALICE, [])).pump()
    assert pair.bob.opened is not None
    assert pair.bob.opened.agent == "a" * 128


def test_relayed_handshake_proves_nothing() -> None:
    """Mallory hands every byte on between Alice, who talks to her, and Bob, who talks to her."""
    alice = session(Role.INITIATOR, ALICE, MALLORY, [MINE])
    bob = session(Role.RESPONDER, BOB, MALLORY, [MINE])
    pair = Pair(alice, bob).pump()
    assert pair.alice.opened is not None
    assert pair.bob.opened is not None
    assert pair.alice.opened.slots == {}
    assert pair.bob.opened.slots == {}


def test_nonce_sent_back_is_a_violation() -> None:
    bob = session(Role.RESPONDER, BOB, MALLORY, [MINE])
    with pytest.raises(ProtocolViolationError, match="ours sent back"):
        bob.receive(bob.take_output(), 0.0)
    assert bob.closed


def test_reflected_proof_proves_nothing() -> None:
    bob = session(Role.RESPONDER, BOB, MALLORY, [MINE])
    bob.take_output()
    hello = Hello(versions=(1,), capabilities=(), agent="")
    bob.receive(frame(hello) + frame(Challenge(nonce=H)), 0.0)
    proof_of_bob = bob.take_output()
    [opened] = bob.receive(proof_of_bob, 0.0)
    assert opened == bob.opened
    assert bob.opened is not None
    assert bob.opened.slots == {}


def test_proof_for_another_nonce_proves_nothing() -> None:
    setup = config(Role.RESPONDER, BOB, ALICE, [MINE])
    bob = ControlSession(setup, 0.0)
    bob.take_output()
    stale = Occasion(Role.INITIATOR, ALICE, BOB, H, b"an older nonce of Bob's" + bytes(9))
    proof = Proof(entries=tuple(make_proof([MINE], stale, random_bytes("stale", 256))))
    hello = Hello(versions=(1,), capabilities=(), agent="")
    bob.receive(frame(hello) + frame(Challenge(nonce=H)) + frame(proof), 0.0)
    assert bob.opened is not None
    assert bob.opened.slots == {}
    # The same with Bob's nonce of this session is a proof.
    fresh = Occasion(Role.INITIATOR, ALICE, BOB, H, setup.nonce)
    again = ControlSession(setup, 0.0)
    proof = Proof(entries=tuple(make_proof([MINE], fresh, random_bytes("stale", 256))))
    again.receive(frame(hello) + frame(Challenge(nonce=H)) + frame(proof), 0.0)
    assert again.opened is not None
    assert list(again.opened.slots.values()) == [0]


def test_peer_of_other_versions_is_told_apart_from_a_broken_one() -> None:
    bob = session(Role.RESPONDER, BOB, ALICE, [MINE])
    with pytest.raises(UnsupportedVersionError, match="speaks protocol version 1, found one that speaks 2, 3"):
        bob.receive(frame(Hello(versions=(2, 3), capabilities=(), agent="")), 0.0)
    assert bob.closed


def test_peer_that_also_speaks_later_versions_is_spoken_to_in_ours() -> None:
    bob = session(Role.RESPONDER, BOB, ALICE, [MINE])
    bob.receive(frame(Hello(versions=(1, 2), capabilities=("later", "serve"), agent="")), 0.0)
    bob.receive(frame(Challenge(nonce=H)) + frame(Proof(entries=tuple(bytes([n]) * 32 for n in range(8)))), 0.0)
    assert bob.opened is not None
    assert bob.opened.version == 1
    assert bob.opened.capabilities == {"later", "serve"}


@pytest.mark.parametrize("versions", [(2, 1), (1, 1)])
def test_versions_out_of_order_are_a_violation(versions: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolViolationError, match="ascending"):
        session(Role.RESPONDER, BOB, ALICE, []).receive(frame(Hello(versions=versions, capabilities=(), agent="")), 0.0)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"other": BOB}, UsageError),
        ({"nonce": H + b"!"}, UsageError),
        ({"padding": b""}, UsageError),
        ({"namespaces": [MINE] * 9}, ConfigError),
    ],
)
def test_config_that_cannot_be_is_refused_before_a_byte_is_sent(fields: dict[str, Any], error: type[Exception]) -> None:
    good: dict[str, Any] = {
        "role": Role.RESPONDER, "own": BOB, "other": ALICE, "namespaces": [MINE], "nonce": H,
        "padding": random_bytes("p", 256),
    }  # fmt: skip
    with pytest.raises(error):
        ControlSession(SessionConfig(**(good | fields)), 0.0)


def test_both_sides_see_the_same_occasion_from_their_end() -> None:
    pair = Pair.of([], [])
    before = pair.alice.occasion
    pair.opened()
    after = pair.alice.occasion
    assert before is None
    assert after is not None
    assert after.reversed() == pair.bob.occasion
    assert (after.own, after.other) == (ALICE, BOB)
