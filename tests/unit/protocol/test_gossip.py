"""What is asked for, answered and told: everything once, in pages, and no more than a peer may cost."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnet.protocol import gossip
from kvnet.protocol.gossip import Allowance, Asking, Exchanged, answer, is_ordered, next_reconcile_s, pages, windows
from kvnet.protocol.messages.statements import MAX_KNOWN, MAX_TOLD, MAX_TOLD_BYTES, GetStatements, Statements

names = st.sets(st.integers(1, 60_000), max_size=300).map(lambda found: {name(n) for n in found})


def name(number: int) -> bytes:
    return (number * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "big")


def ask(*known: bytes) -> GetStatements:
    return GetStatements(request_id=3, slot=0, known=known)


# --- asking and answering ---------------------------------------------------------------------------------------------


def test_little_that_is_known_is_named_in_one_list() -> None:
    assert list(windows([name(2), name(1), name(2)])) == [tuple(sorted([name(1), name(2)]))]
    assert list(windows([])) == [()]
    assert [len(each) for each in windows(map(name, range(1, MAX_KNOWN)))] == [MAX_KNOWN - 1]


@pytest.mark.parametrize("count", [MAX_KNOWN, MAX_KNOWN + 1, 2 * MAX_KNOWN, 10_000])
def test_much_that_is_known_is_named_in_full_lists_that_leave_nothing_out(count: int) -> None:
    known = sorted(name(n) for n in range(1, count + 1))
    lists = list(windows(known))
    assert {len(each) for each in lists} == {MAX_KNOWN}
    assert {entry for each in lists for entry in each} == {gossip.FIRST, *known, gossip.LAST}
    assert all(is_ordered(ask(*each)) for each in lists)
    assert all(later[0] <= earlier[-1] for earlier, later in pairwise(lists)), "no gap between two lists"


@pytest.mark.parametrize("absent", [0, 1, 2000, 4094, 4095, 4096, 7000, 9999])
def test_what_is_missing_among_much_is_told_in_answer_to_some_list(absent: int) -> None:
    known = sorted(name(n) for n in range(1, 10_001))
    held = {each: each for each in known}
    missing = known.pop(absent)
    told = {each for window in windows(known) for each in answer(ask(*window), held).statements}
    assert told == {missing}


def test_a_full_list_speaks_only_of_what_lies_within_it() -> None:
    window = [name_.to_bytes(8, "big") for name_ in range(100, 100 + MAX_KNOWN)]
    below, within, above = (n.to_bytes(8, "big") for n in (99, 150, 100 + MAX_KNOWN))
    assert answer(ask(*window), {below: b"b", within: b"w", above: b"a"}).statements == ()
    window[50] = window[51] = within
    held = {below: b"b", (151).to_bytes(8, "big"): b"w", above: b"a"}
    assert answer(ask(*window), held).statements == (b"w",)


@given(names, names)
def test_after_an_exchange_the_one_who_asked_has_everything(here: set[bytes], there: set[bytes]) -> None:
    held = {each: each * 40 for each in there}
    asking = Asking(set(here))
    again, rounds = True, 0
    while again:
        again, rounds = False, rounds + 1
        for window in windows(asking.known):
            reply = answer(ask(*window), held)
            again |= asking.learned([each[:8] for each in reply.statements], more=reply.more)
    assert asking.known == here | there
    assert rounds <= 1 + len(there) // MAX_TOLD


def test_a_page_says_whether_there_is_more_and_begins_with_the_most_important() -> None:
    held = {name(n): bytes([n]) for n in range(100)}
    first = answer(ask(), held)
    assert first == Statements(request_id=3, statements=tuple(bytes([n]) for n in range(MAX_TOLD)), more=True)
    rest = answer(ask(*sorted(list(held)[:MAX_TOLD])), held)
    assert rest.statements == tuple(bytes([n]) for n in range(MAX_TOLD, 100))
    assert not rest.more


def test_whoever_repeats_itself_is_asked_no_more() -> None:
    asking = Asking({name(1)})
    assert asking.learned([name(2)], more=True)
    assert not asking.learned([name(1), name(2)], more=True)
    assert not asking.learned([], more=True)
    assert not asking.learned([name(3)], more=False)


def test_an_answer_without_end_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip, "MAX_PAGES_ASKED", 5)
    asking, n_pages = Asking(set()), 1
    while asking.learned([name(n_pages)], more=True):
        n_pages += 1
    assert n_pages == 5


def test_whoever_sends_nothing_that_counts_is_asked_no_more() -> None:
    asking, n_pages = Asking(set()), 1
    while asking.learned([name(n_pages)], more=True, counted=n_pages < 4):
        n_pages += 1
    assert n_pages == 3 + gossip.MAX_IDLE_PAGES


def test_known_statements_are_named_in_ascending_order_each_once() -> None:
    assert is_ordered(ask())
    assert is_ordered(ask(b"1" * 8, b"2" * 8))
    assert not is_ordered(ask(b"2" * 8, b"1" * 8))
    assert not is_ordered(ask(b"1" * 8, b"1" * 8))


# --- telling ----------------------------------------------------------------------------------------------------------


def test_pages_keep_within_number_and_bytes() -> None:
    assert list(pages([])) == []
    assert [len(page) for page in pages([b"x"] * (MAX_TOLD + 1))] == [MAX_TOLD, 1]
    large = [bytes(24_000)] * 20
    assert sum(len(page) for page in pages(large)) == 20
    assert all(sum(map(len, page)) <= MAX_TOLD_BYTES for page in pages(large))
    assert gossip.size_bytes(Statements(request_id=0, statements=(b"ab", b"c"), more=False)) == 3


def test_a_statement_is_called_by_the_beginning_of_its_hash() -> None:
    assert gossip.short(bytes(range(32))) == bytes(range(8))


def test_what_a_peer_knows_is_remembered_up_to_a_number() -> None:
    exchanged = Exchanged(limit=2)
    assert exchanged.add(b"1")
    assert not exchanged.add(b"1")
    exchanged.add(b"2")
    exchanged.add(b"3")
    assert len(exchanged) == 2
    assert list(exchanged) == [b"2", b"3"]
    assert b"1" not in exchanged


# --- limits -----------------------------------------------------------------------------------------------------------


def test_an_allowance_is_used_up_and_grows_again_to_its_burst() -> None:
    allowance = Allowance(per_s=2.0, burst=3.0, now=10.0)
    assert allowance.take(5, 10.0) == 3
    assert allowance.take(1, 10.4) == 0
    assert allowance.take(5, 11.0) == 2
    assert allowance.take(9, 1000.0) == 3


def test_a_clock_that_goes_back_gives_nothing() -> None:
    allowance = Allowance(per_s=1.0, burst=1.0, now=10.0)
    assert allowance.take(1, 10.0) == 1
    assert allowance.take(1, 0.0) == 0
    assert allowance.take(1, 10.5) == 0
    assert allowance.take(1, 11.0) == 1


def test_nodes_started_together_do_not_ask_together() -> None:
    assert next_reconcile_s(0.0) == pytest.approx(135.0)
    assert next_reconcile_s(0.5) == pytest.approx(180.0)
    assert next_reconcile_s(1.0) == pytest.approx(225.0)
