"""Own pages: artifacts stay where they are, changes wait for each other, and what is gone stays gone."""

import pytest

from kvnet.format.hashes import LookupKey, blake3_hash
from kvnet.format.prefix import block_keys
from kvnet.protocol.provider_pages import OwnPages, PageLimits, Telling, held_entry
from kvnet.trust.statement_bodies import MAX_PAGES, PAGE_ARTIFACTS, HeldEntry, ProviderRecord
from kvnet.trust.statements import MAX_PROVIDER_LIFE_S, timely
from tests.unit.protocol.swarm import peer
from tests.unit.trust.samples import FINGERPRINT, MINE, make_artifact

NOW_S = 1_800_000_000.0
WHO = Telling(MINE.id, peer("me"), ["/ip4/192.0.2.1/tcp/1/p2p/x"])
LIMITS = PageLimits(renew_s=900.0, changes_s=0.05, pages_at_once=4)


def name(number: int) -> LookupKey:
    return LookupKey(blake3_hash(number.to_bytes(4, "big")))


def entry(number: int, *, size_bytes: int = 1) -> HeldEntry:
    return HeldEntry(artifact=bytes(name(number)), n_tokens=256, codec="raw", size_bytes=size_bytes, keys=(b"k" * 32,))


def tell(pages: OwnPages, now: float, *, jitter: float = 0.0) -> list[ProviderRecord]:
    """All records that are due."""
    records: list[ProviderRecord] = []
    while due := pages.due(now):
        records += [pages.record(number, WHO, now, NOW_S + now, jitter) for number in due]
        now += LIMITS.changes_s
    return records


def held(*numbers: int) -> OwnPages:
    pages = OwnPages(LIMITS)
    for number in numbers:
        pages.hold(name(number), entry(number))
    return pages


def test_a_node_that_holds_nothing_tells_where_it_is() -> None:
    [record] = tell(held(), 0.0)
    assert (record.page, record.entries, record.addresses, record.peer) == (0, (), tuple(WHO.addresses), peer("me"))
    assert timely(record, NOW_S) is None
    assert record.sequence == int(NOW_S * 1000)


def test_an_artifact_stays_on_its_page_and_one_change_changes_one_page() -> None:
    pages = held(*range(40))
    records = tell(pages, 0.0)
    assert [record.page for record in records] == [2, 1, 0]
    assert [len(record.entries) for record in records] == [8, PAGE_ARTIFACTS, PAGE_ARTIFACTS]
    pages.drop(name(20))
    pages.drop(name(99))
    [record] = tell(pages, 1.0)
    assert (record.page, len(record.entries)) == (1, PAGE_ARTIFACTS - 1)
    pages.hold(name(100), entry(100))
    [record] = tell(pages, 2.0)
    assert record.page == 1
    assert entry(100) in record.entries
    assert len(pages) == 40


def test_what_is_told_already_is_not_told_again() -> None:
    pages = held(1)
    tell(pages, 0.0)
    pages.hold(name(1), entry(1))
    assert tell(pages, 1.0) == []
    pages.hold(name(1), entry(1, size_bytes=2))
    [record] = tell(pages, 2.0)
    assert record.entries == (entry(1, size_bytes=2),)


def test_changes_wait_for_each_other_and_few_pages_are_signed_at_once() -> None:
    pages = held(*range(200))
    assert len(pages.due(0.0)) == LIMITS.pages_at_once
    tell(pages, 0.0)
    pages.hold(name(300), entry(300))
    later = 100.0
    pages.record(0, WHO, later, NOW_S + later, 0.0)
    pages.hold(name(301), entry(301))
    assert pages.next_due() == later + LIMITS.changes_s
    assert pages.due(later) == []
    assert len(tell(pages, later + LIMITS.changes_s)) == 1


def test_pages_are_renewed_before_they_expire_and_not_all_at_once() -> None:
    pages = held(*range(32))
    for number, jitter in ((0, 0.0), (1, 1.0)):
        pages.record(number, WHO, 0.0, NOW_S, jitter)
    assert pages.next_due() == 675.0
    assert pages.due(674.0) == []
    assert pages.due(675.0) == [1]
    assert set(pages.due(900.0)) == {0, 1}
    assert LIMITS.life_s > 2 * LIMITS.period_s
    assert PageLimits(renew_s=1e6).life_s <= MAX_PROVIDER_LIFE_S


def test_a_page_that_is_empty_is_told_once_more_and_outlives_what_it_said() -> None:
    pages = held(*range(17))
    [last, _] = tell(pages, 0.0)
    pages.drop(name(16))
    [record] = tell(pages, 10.0)
    assert (record.page, record.entries) == (1, ())
    assert record.expires >= last.expires
    assert record.expires - record.issued == MAX_PROVIDER_LIFE_S
    assert [record.page for record in tell(pages, 20_000.0)] == [0]


def test_replacing_everything_keeps_the_places_of_what_stays() -> None:
    pages = held(1, 2, 3)
    tell(pages, 0.0)
    pages.replace([(name(2), entry(2)), (name(4), entry(4))])
    [record] = tell(pages, 1.0)
    assert set(record.entries) == {entry(2), entry(4)}


def test_a_page_from_an_earlier_life_is_outranked() -> None:
    pages = held(1)
    tell(pages, 0.0)
    ahead = int((NOW_S + 300) * 1000)
    pages.shown(7, ahead)
    pages.shown(0, ahead)
    records = {record.page: record for record in tell(pages, 1.0)}
    assert records[7].sequence == records[0].sequence == ahead + 1
    assert records[7].entries == ()
    assert records[0].entries == (entry(1),)
    pages.shown(0, ahead)
    assert tell(pages, 2.0) == []
    # Its place is used when the others are full.
    for number in range(2, 40):
        pages.hold(name(number), entry(number))
    assert {record.page for record in tell(pages, 3.0)} >= {0, 7}


def test_new_addresses_are_told() -> None:
    pages = held()
    tell(pages, 0.0)
    pages.moved()
    assert [record.page for record in tell(pages, 1.0)] == [0]


def test_when_all_pages_are_full_what_was_held_longest_is_left_out() -> None:
    capacity = MAX_PAGES * PAGE_ARTIFACTS
    pages = held(*range(capacity + 1))
    assert (len(pages), pages.left_out) == (capacity, 1)
    records = tell(pages, 0.0)
    told = {entry.artifact for record in records for entry in record.entries}
    assert name(0) not in told
    assert name(capacity) in told
    assert max(record.page for record in records) == MAX_PAGES - 1


@pytest.mark.parametrize("n_tokens", [100, 256, 700, 2048, 5000])
def test_an_entry_names_the_checkpoints_under_the_lookup_secret(n_tokens: int) -> None:
    tokens = list(range(n_tokens))
    keys = block_keys(MINE.prefix_root(FINGERPRINT.hash), tokens)
    artifact = make_artifact(tokens)
    keyed = MINE.keyed_artifact(artifact.hash)
    said = held_entry(MINE, keyed, artifact.manifest, keys)
    assert said.keys[-1] == MINE.lookup_key(keys[-1])
    assert said.keys[0] == MINE.lookup_key(keys[0])
    assert not set(said.keys) & set(keys)
    assert said.n_tokens == n_tokens
    # Of a part whose end is not known only what is known is named.
    assert len(held_entry(MINE, keyed, artifact.manifest, keys[:1]).keys) == 1


def test_a_node_whose_clock_was_hours_ahead_is_heard_again_once_it_is_right() -> None:
    pages = held(1)
    for ahead_s in (10 * 3600.0, 0.0, 1.0):
        pages.moved()
        now_s = NOW_S + ahead_s
        record = pages.record(0, WHO, 0.0, now_s, 0.0)
        assert timely(record, now_s) is None
        assert record.sequence == int(now_s * 1000)


def test_a_clock_that_was_set_back_a_little_lets_no_sequence_go_down() -> None:
    pages = held(1)
    first, second = (pages.record(0, WHO, 0.0, NOW_S - back_s, 0.0) for back_s in (0.0, 300.0))
    assert second.sequence == first.sequence + 1
    assert timely(second, NOW_S - 300.0) is None
