"""Remembered peers: bounded, moved when they move, tried with growing pauses."""

from kvnet.exchange.peer_book import BookLimits, PeerBook, RememberedPeer
from kvnet.format.hashes import NamespaceId
from kvnet.protocol.ids import PeerId

LIMITS = BookLimits(peers=5, wanted=4, in_flight=2, retry_s=10.0, max_retry_s=3600.0, forget_s=1000.0)
NOBODY: frozenset[PeerId] = frozenset()
MINE, SWARM = NamespaceId(b"m" * 32), NamespaceId(b"s" * 32)


def peer(number: int) -> PeerId:
    return PeerId(number.to_bytes(38, "big"))


def due(book: PeerBook, now_s: float, *, connected: frozenset[PeerId] = NOBODY, members: int = 0) -> list[PeerId]:
    return [each.peer for each in book.due(connected, members, now_s)]


def test_a_member_is_remembered_with_its_addresses_and_namespaces() -> None:
    book = PeerBook(LIMITS)
    book.met(peer(1), ["/a"], [SWARM, MINE], 100.0)
    changed, removed = book.take_changes()
    assert changed == [RememberedPeer(peer(1), ("/a",), (MINE, SWARM), 100.0)]
    assert removed == []
    book.met(peer(1), ["/a"], [SWARM, MINE], 102.0)
    assert book.take_changes() == ([], []), "nothing worth writing down has changed"
    book.met(peer(1), ["/a"], [SWARM, MINE], 500.0)
    assert book.take_changes()[0][0].seen_s == 500.0


def test_addresses_of_a_peer_that_moved_are_replaced_when_it_connects() -> None:
    book = PeerBook(LIMITS)
    book.met(peer(1), ["/old"], [MINE], 100.0)
    book.met(peer(1), ["/new"], [MINE], 110.0)
    assert book.due(NOBODY, 0, 110.0)[0].addresses == ("/new",)
    book.met(peer(1), [], [MINE], 120.0)
    assert book.due(NOBODY, 0, 120.0)[0].addresses == ("/new",), "identify has not told them yet"


def test_a_remembered_peer_seen_elsewhere_is_tried_there_first_and_at_once() -> None:
    book = PeerBook(LIMITS)
    book.met(peer(1), ["/old"], [MINE], 100.0)
    book.failed(peer(1), 100.0)
    assert due(book, 101.0) == []
    book.moved(peer(1), ["/new"], 101.0)
    assert book.due(NOBODY, 0, 101.0)[0].addresses == ("/new", "/old")
    book.failed(peer(1), 102.0)
    book.moved(peer(1), ["/new"], 103.0)
    assert due(book, 103.0) == [], "said again it is no news"
    book.moved(peer(2), ["/x"], 103.0)
    assert len(book) == 1, "a stranger is not remembered"


def test_who_does_not_answer_waits_longer_each_time_and_never_longer_than_an_hour() -> None:
    book = PeerBook(BookLimits(forget_s=1e12))
    book.met(peer(1), ["/a"], [MINE], 0.0)
    now_s, pauses = 0.0, []
    for _ in range(20):
        book.failed(peer(1), now_s)
        until_s = book.take_changes()[0][0].due_s
        assert due(book, until_s - 0.1) == []
        assert due(book, until_s) == [peer(1)]
        pauses.append(until_s - now_s)
        now_s = until_s
    assert pauses[:3] == [10.0, 20.0, 40.0]
    assert max(pauses) == pauses[-1] == 3600.0
    book.retry_all(now_s)
    assert due(book, now_s) == [peer(1)]


def test_a_clock_that_was_set_back_keeps_nobody_waiting() -> None:
    book = PeerBook(LIMITS)
    book.restore([RememberedPeer(peer(1), ("/a",), (MINE,), 1e9, 3, due_s=1e9)])
    assert due(book, 1000.0) == [peer(1)]


def test_who_was_not_seen_for_long_and_does_not_answer_is_forgotten() -> None:
    book = PeerBook(LIMITS)
    book.met(peer(1), ["/a"], [MINE], 0.0)
    book.failed(peer(1), 2000.0)
    assert len(book) == 0
    assert book.take_changes() == ([], [peer(1)])
    book.failed(peer(1), 2000.0)


def test_who_is_no_member_any_more_is_forgotten() -> None:
    book = PeerBook(LIMITS)
    book.met(peer(1), ["/a"], [MINE], 0.0)
    book.take_changes()
    book.not_a_member(peer(1))
    book.not_a_member(peer(2))
    assert book.take_changes() == ([], [peer(1)])


def test_beyond_the_limit_whoever_was_seen_longest_ago_goes() -> None:
    book = PeerBook(LIMITS)
    for number in range(1, 9):
        book.met(peer(number), ["/a"], [MINE], float(number))
    changed, removed = book.take_changes()
    assert sorted(each.peer for each in changed) == [peer(n) for n in range(4, 9)]
    assert sorted(removed) == [peer(n) for n in range(1, 4)]


def test_those_seen_last_are_tried_first_and_few_at_a_time() -> None:
    book = PeerBook(LIMITS)
    for number in range(1, 5):
        book.met(peer(number), ["/a"], [MINE], float(number))
    assert due(book, 10.0) == [peer(4), peer(3)]
    assert due(book, 10.0, connected=frozenset({peer(4)}), members=1) == [peer(3), peer(2)]
    assert due(book, 10.0, members=3) == [peer(4)]
    assert due(book, 10.0, members=4) == []


def test_what_was_kept_is_taken_up_and_what_was_met_since_wins() -> None:
    book = PeerBook(LIMITS)
    book.met(peer(1), ["/new"], [MINE], 100.0)
    book.restore([RememberedPeer(peer(n), ("/old",), (MINE,), float(n)) for n in range(1, 8)])
    assert len(book) == 5
    assert book.due(NOBODY, 0, 100.0)[0].addresses == ("/new",)


def test_what_anybody_says_on_the_local_network_takes_no_proved_address_away() -> None:
    book = PeerBook(LIMITS)
    book.met(peer(1), ["/home", "/vpn"], [MINE], 100.0)
    for turn in range(5):
        book.moved(peer(1), [f"/spoofed/{turn}/{number}" for number in range(8)], 101.0)
        tried = book.due(NOBODY, 0, 101.0)[0].addresses
        assert tried[-2:] == ("/home", "/vpn")
        assert len(tried) <= 6
    (kept,), _ = book.take_changes()
    assert kept.addresses == ("/home", "/vpn")
    book.met(peer(1), ["/home"], [MINE], 102.0)
    assert book.due(NOBODY, 0, 102.0)[0].addresses == ("/home",)
