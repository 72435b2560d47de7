"""The control session: handshake, order, correlation, patience."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvnet.errors import MalformedError, ProtocolViolationError, UsageError
from kvnet.protocol.membership import Role
from kvnet.protocol.messages.artifacts import (
    ChunkListReply,
    GetChunkList,
    GetManifest,
    Lookup,
    LookupReply,
    ManifestReply,
    Match,
)
from kvnet.protocol.messages.bulk import BulkDialled, BulkOffer, DialBulk, OpenBulk
from kvnet.protocol.messages.handshake import Challenge, Hello, Proof
from kvnet.protocol.messages.liveness import Ping, Pong
from kvnet.protocol.messages.refusals import Refused
from kvnet.protocol.session import ReplyReceived, RequestReceived, RequestTimedOut, SessionExpired, SessionLimits
from tests.unit.protocol.handshakes import ALICE, BOB, Pair, frame, session, slot_of
from tests.unit.trust.samples import MINE, OTHER

H = b"h" * 32


HELLO = Hello(versions=(1,), capabilities=(), agent="")
CHALLENGE = Challenge(nonce=H)
PROOF = Proof(entries=tuple(bytes([n]) * 32 for n in range(8)))
LOOKUP = Lookup(request_id=0, slot=0, keys=(H,))


@pytest.mark.parametrize(
    "sent",
    [
        [CHALLENGE],
        [PROOF],
        [LOOKUP],
        [Ping(request_id=0)],
        [HELLO, HELLO],
        [HELLO, PROOF],
        [HELLO, LOOKUP],
        [HELLO, CHALLENGE, CHALLENGE],
        [HELLO, CHALLENGE, LOOKUP],
        [HELLO, CHALLENGE, PROOF, PROOF],
        [HELLO, CHALLENGE, PROOF, HELLO],
        [HELLO, CHALLENGE, PROOF, Pong(request_id=0)],
        [HELLO, CHALLENGE, PROOF, Refused(request_id=0, reason="busy")],
        [HELLO, CHALLENGE, PROOF, LookupReply(request_id=9, matches=())],
        [HELLO, CHALLENGE, PROOF, LOOKUP, LOOKUP],
    ],
    ids=lambda sent: "-".join(type(message).__name__ for message in sent),
)
def test_message_out_of_order_is_a_violation_and_ends_the_session(sent: list[Any]) -> None:
    bob = session(Role.RESPONDER, BOB, ALICE, [MINE])
    for message in sent[:-1]:
        bob.receive(frame(message), 0.0)
    with pytest.raises(ProtocolViolationError):
        bob.receive(frame(sent[-1]), 0.0)
    assert bob.closed
    assert bob.next_deadline() is None
    assert bob.on_time(1000.0) == []
    with pytest.raises(ProtocolViolationError, match="is over"):
        bob.receive(b"", 0.0)


def test_handshake_that_takes_too_long_expires() -> None:
    bob = session(Role.RESPONDER, BOB, ALICE, [MINE])
    bob.receive(frame(HELLO), 9.0)
    assert bob.next_deadline() == 10.0
    assert bob.on_time(9.9) == []
    assert bob.on_time(10.0) == [SessionExpired("handshake")]
    assert bob.closed


# --- requests and replies -------------------------------------------------------------------------------------

BULK_OFFER = BulkOffer(request_id=0, name=b"n" * 16, certificate=b"c", port=1, cipher="tls13")
REQUESTS: list[tuple[Any, Any]] = [
    (Lookup(request_id=0, slot=0, keys=(H,)), LookupReply(request_id=0, matches=())),
    (GetManifest(request_id=0, slot=0, artifact=H), ManifestReply(request_id=0, envelope=b"e")),
    (GetChunkList(request_id=0, slot=0, artifact=H, page=1), ChunkListReply(request_id=0, page=b"p")),
    (GetManifest(request_id=0, slot=0, artifact=H), Refused(request_id=0, reason="unknown")),
    (OpenBulk(request_id=0, certificate=b"c", cipher="tls13"), BULK_OFFER),
    (OpenBulk(request_id=0, certificate=b"c", cipher="tls13"), Refused(request_id=0, reason="busy")),
    (DialBulk(request_id=0, name=b"n" * 16, port=1), BulkDialled(request_id=0)),
]


def with_slot(message: Any, slot: int) -> Any:
    return type(message)(**({name: getattr(message, name) for name in message.__struct_fields__} | {"slot": slot}))


@pytest.mark.parametrize(("request_", "reply"), REQUESTS)
def test_reply_comes_back_with_the_request_it_answers(request_: Any, reply: Any) -> None:
    pair = Pair.of([MINE], [MINE]).opened()
    asked = with_slot(request_, slot_of(pair)) if hasattr(request_, "slot") else request_
    assert pair.alice.request(asked, 0.0) == 0
    pair.pump()
    assert pair.bob_saw == [RequestReceived(asked)]
    pair.bob.reply(reply)
    pair.pump()
    assert pair.alice_saw == [ReplyReceived(asked, reply)]
    assert pair.alice.next_deadline() == 60.0


def test_both_sides_may_ask_and_answers_may_come_in_any_order() -> None:
    pair = Pair.of([MINE], [MINE]).opened()
    slot = slot_of(pair)
    asked = [GetManifest(request_id=number, slot=slot, artifact=bytes([number]) * 32) for number in range(3)]
    for message in asked:
        pair.alice.request(message, 0.0)
    pair.bob.request(asked[0], 0.0)
    pair.pump()
    for number in (2, 0, 1):
        pair.bob.reply(ManifestReply(request_id=number, envelope=bytes([number])))
    pair.alice.reply(Refused(request_id=0, reason="busy"))
    pair.pump()
    replies = [event for event in pair.alice_saw if isinstance(event, ReplyReceived)]
    assert [(event.request.request_id, event.reply.request_id) for event in replies] == [(2, 2), (0, 0), (1, 1)]
    assert ReplyReceived(asked[0], Refused(request_id=0, reason="busy")) in pair.bob_saw


def test_request_in_a_namespace_that_is_not_proved_is_not_even_sent() -> None:
    pair = Pair.of([MINE, OTHER], [OTHER]).opened()
    for slot in set(range(8)) - {slot_of(pair)}:
        with pytest.raises(UsageError, match="a slot that both sides have proved"):
            pair.alice.request(Lookup(request_id=0, slot=slot, keys=(H,)), 0.0)
    assert pair.alice.take_output() == b""


def test_request_before_the_handshake_is_not_sent() -> None:
    with pytest.raises(UsageError, match="an open control session"):
        session(Role.INITIATOR, ALICE, BOB, [MINE]).request(LOOKUP, 0.0)


def test_reply_to_nothing_or_of_another_kind_is_not_sent() -> None:
    pair = Pair.of([MINE], [MINE]).opened()
    pair.alice.request(with_slot(LOOKUP, slot_of(pair)), 0.0)
    pair.pump()
    for reply in (ManifestReply(request_id=0, envelope=b"e"), LookupReply(request_id=1, matches=())):
        with pytest.raises(UsageError, match="none"):
            pair.bob.reply(reply)
    pair.bob.reply(LookupReply(request_id=0, matches=()))
    with pytest.raises(UsageError):
        pair.bob.reply(LookupReply(request_id=0, matches=()))


@pytest.mark.parametrize(
    "reply",
    [
        ManifestReply(request_id=0, envelope=b"e"),
        Pong(request_id=0),
        BULK_OFFER,
        LookupReply(request_id=1, matches=()),
        LookupReply(
            request_id=0,
            matches=(Match(key_index=1, artifact=H, n_tokens=1, codec="raw", size_bytes=1),),
        ),
        LookupReply(
            request_id=0,
            matches=(Match(key_index=0, artifact=H, n_tokens=1, codec="raw", size_bytes=1),) * 2,
        ),
    ],
)
def test_reply_that_does_not_fit_the_request_is_a_violation(reply: Any) -> None:
    pair = Pair.of([MINE], [MINE]).opened()
    pair.alice.request(with_slot(LOOKUP, slot_of(pair)), 0.0)
    with pytest.raises(ProtocolViolationError):
        pair.alice.receive(frame(reply), 0.0)


def test_matches_that_are_not_deepest_first_are_a_violation() -> None:
    pair = Pair.of([MINE], [MINE]).opened()
    pair.alice.request(Lookup(request_id=0, slot=slot_of(pair), keys=(H, b"k" * 32)), 0.0)
    matches = tuple(
        Match(key_index=index, artifact=bytes([index]) * 32, n_tokens=1, codec="raw", size_bytes=1) for index in (1, 0)
    )
    with pytest.raises(ProtocolViolationError, match="deepest first"):
        pair.alice.receive(frame(LookupReply(request_id=0, matches=matches)), 0.0)


def test_second_answer_to_a_request_is_a_violation() -> None:
    pair = Pair.of([MINE], [MINE]).opened()
    pair.alice.request(with_slot(LOOKUP, slot_of(pair)), 0.0)
    reply = frame(LookupReply(request_id=0, matches=()))
    pair.alice.receive(reply, 0.0)
    with pytest.raises(ProtocolViolationError, match="an answer to an open request"):
        pair.alice.receive(reply, 0.0)


def test_more_requests_than_allowed_are_refused_as_busy_and_cost_nothing_more() -> None:
    pair = Pair.of([MINE], [MINE]).opened()
    slot = slot_of(pair)
    lookups = b"".join(frame(Lookup(request_id=number, slot=slot, keys=(H,))) for number in range(64 + 5))
    events = pair.bob.receive(lookups, 0.0)
    assert len(events) == 64
    assert pair.bob.take_output() == b"".join(frame(Refused(request_id=64 + n, reason="busy")) for n in range(5))


def test_peer_that_floods_requests_is_dropped_and_one_that_paces_them_is_not() -> None:
    limits = SessionLimits(request_bytes_per_s=100.0, request_burst_bytes=250.0)
    ping = frame(Ping(request_id=0))
    patient = Pair.of([MINE], [MINE], limits).opened().bob
    for second in range(100):
        patient.receive(ping * 4, float(second))
    eager = Pair.of([MINE], [MINE], limits).opened().bob
    with pytest.raises(ProtocolViolationError, match="at most 100 bytes of requests a second"):
        eager.receive(ping * 20, 0.0)
    assert eager.closed


def test_replies_that_were_asked_for_are_not_counted_as_a_flood() -> None:
    pair = Pair.of([MINE], [MINE], SessionLimits(request_burst_bytes=1000.0)).opened()
    for number in range(50):
        pair.alice.request(GetChunkList(request_id=0, slot=slot_of(pair), artifact=H, page=0), 0.0)
        pair.alice.receive(frame(ChunkListReply(request_id=number, page=bytes(70_000))), 0.0)
    assert not pair.alice.closed


def test_we_do_not_ask_more_at_once_than_a_peer_allows() -> None:
    pair = Pair.of([MINE], [MINE], SessionLimits(requests_in_flight=2)).opened()
    for _ in range(2):
        pair.alice.request(with_slot(LOOKUP, slot_of(pair)), 0.0)
    with pytest.raises(UsageError, match="at most 2 open requests"):
        pair.alice.request(with_slot(LOOKUP, slot_of(pair)), 0.0)


# --- patience -------------------------------------------------------------------------------------------------


def test_request_without_an_answer_times_out_and_a_late_answer_is_ignored() -> None:
    pair = Pair.of([MINE], [MINE]).opened()
    asked = with_slot(LOOKUP, slot_of(pair))
    pair.alice.request(asked, 1.0)
    assert pair.alice.next_deadline() == 16.0
    assert pair.alice.on_time(15.0) == []
    assert pair.alice.on_time(16.0) == [RequestTimedOut(asked)]
    assert pair.alice.receive(frame(LookupReply(request_id=0, matches=())), 17.0) == []
    with pytest.raises(ProtocolViolationError):
        pair.alice.receive(frame(LookupReply(request_id=0, matches=())), 18.0)


def test_peer_that_never_answers_is_given_up() -> None:
    pair = Pair.of([MINE], [MINE], SessionLimits(requests_in_flight=2)).opened()
    asked = with_slot(LOOKUP, slot_of(pair))
    pair.alice.request(asked, 0.0)
    assert pair.alice.on_time(15.0) == [RequestTimedOut(asked)]
    pair.alice.request(asked, 15.0)
    *_, last = pair.alice.on_time(30.0)
    assert last == SessionExpired("unanswered")


def test_peer_that_misses_one_request_now_and_then_keeps_its_session_for_weeks() -> None:
    pair = Pair.of([MINE], [MINE]).opened()
    asked = with_slot(LOOKUP, slot_of(pair))
    now = 0.0
    for _ in range(1100):
        pair.alice.request(asked, now)
        number = pair.alice.request(asked, now)
        assert pair.alice.receive(frame(LookupReply(request_id=number, matches=())), now) != []
        now += 15.0
        assert len(pair.alice.on_time(now)) == 1
    assert not pair.alice.closed
    # Late answers are ignored, as far back as anybody could be late.
    assert pair.alice.receive(frame(LookupReply(request_id=number - 1, matches=())), now) == []
    with pytest.raises(ProtocolViolationError):
        pair.alice.receive(frame(LookupReply(request_id=0, matches=())), now)


def test_silent_peer_is_pinged_and_one_that_lives_stays() -> None:
    pair = Pair.of([MINE], [MINE]).opened()
    assert pair.alice.next_deadline() == 60.0
    assert pair.alice.on_time(60.0) == []
    assert pair.alice.next_deadline() == 75.0
    assert pair.alice.on_time(61.0) == []
    pair.now = 61.0
    pair.pump()
    assert pair.alice_saw == []
    assert pair.bob_saw == []
    assert pair.alice.next_deadline() == 121.0


def test_peer_that_does_not_answer_a_ping_is_given_up() -> None:
    pair = Pair.of([MINE], [MINE]).opened()
    pair.alice.on_time(60.0)
    assert pair.alice.on_time(75.0) == [SessionExpired("silent")]
    assert pair.alice.closed


def test_ping_is_answered_by_the_session_itself() -> None:
    pair = Pair.of([MINE], [MINE]).opened()
    assert pair.bob.receive(frame(Ping(request_id=7)), 0.0) == []
    assert pair.bob.take_output() == frame(Pong(request_id=7))
    assert pair.alice.request(Ping(request_id=0), 0.0) == 0
    assert pair.alice.receive(frame(Pong(request_id=0)), 0.0) == []


def test_end_of_the_stream_inside_a_message_is_noticed() -> None:
    pair = Pair.of([MINE], [MINE]).opened()
    pair.alice.receive(frame(Ping(request_id=0))[:-1], 0.0)
    with pytest.raises(ProtocolViolationError, match="the stream ended"):
        pair.alice.receive_end()
    assert pair.alice.closed


def test_end_of_the_stream_between_messages_is_a_clean_end() -> None:
    pair = Pair.of([MINE], [MINE]).opened()
    pair.bob.receive_end()
    assert pair.bob.closed


# --- hostile bytes --------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_session_opens_however_the_stream_is_cut(cuts: list[int]) -> None:
    alice = session(Role.INITIATOR, ALICE, BOB, [MINE])
    bob = session(Role.RESPONDER, BOB, ALICE, [MINE])
    for _ in range(3):
        for sender, receiver in ((alice, bob), (bob, alice)):
            data = sender.take_output()
            position = turn = 0
            while position < len(data):
                size = cuts[turn % len(cuts)]
                receiver.receive(data[position : position + size], 0.0)
                position, turn = position + size, turn + 1
    assert alice.opened is not None
    assert bob.opened is not None


@given(st.binary(max_size=300))
@settings(max_examples=200)
def test_any_bytes_leave_the_session_waiting_or_end_it(data: bytes) -> None:
    bob = session(Role.RESPONDER, BOB, ALICE, [MINE])
    try:
        assert bob.receive(data, 0.0) == []
    except MalformedError:
        assert bob.closed


def test_ten_thousand_damaged_streams_end_in_nothing_but_malformed_errors() -> None:
    rng = random.Random(6)
    stream = frame(HELLO) + frame(CHALLENGE) + frame(PROOF) + frame(LOOKUP) + frame(Ping(request_id=3))
    for _ in range(10_000):
        data = bytearray(stream)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        bob = session(Role.RESPONDER, BOB, ALICE, [MINE])
        try:
            bob.receive(bytes(data), 0.0)
        except MalformedError:
            assert bob.closed
