"""Fetch or compute: the plan with the smallest expected time, and never one that a worse link makes slower."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnet.protocol.cost import (
    MIN_GAIN_S,
    EvenOffer,
    FetchStep,
    Offer,
    Plan,
    PrefillStep,
    RestoreStep,
    best_cut,
    best_plan,
    break_even_bytes_s,
    local_plan,
    whole_plan,
)
from kvnet.protocol.speeds import Link, Machine, PrefillSpeed, SpeedPoint
from kvnet.protocol.underway import Underway, worth_going_on
from tests.unit.protocol.swarm import peer

# SmolLM2-135M in float32: 46,080 bytes of K/V a token.
RAW = 46_080
BLOCK = 256 * RAW
SPEED = PrefillSpeed([SpeedPoint(0, 200.0), SpeedPoint(1024, 100.0), SpeedPoint(4096, 40.0)])
MACHINE = Machine(SPEED, restore_bytes_s=1e9, restore_fixed_s=0.01)


def offer(bytes_s: float, n_tokens: int = 1024, *, held_blocks: int = 0, rtt_s: float = 0.001) -> Offer:
    n_blocks = math.ceil(n_tokens / 256)
    blocks = tuple(0 if number < held_blocks else BLOCK for number in range(n_blocks))
    return Offer(Link(peer("a"), rtt_s, bytes_s), n_tokens, blocks, 4 * n_tokens, RAW)


def plan_for(bytes_s: float, n_prompt: int = 1100, held: int = 0, n_tokens: int = 1024) -> Plan:
    local = local_plan(MACHINE, n_prompt, held, RAW)
    return best_plan(MACHINE, n_prompt, held, [offer(bytes_s, n_tokens, held_blocks=held // 256)], local)


# --- plans ----------------------------------------------------------------------------------------------------


def test_fast_link_fetches_everything_there_is() -> None:
    plan = plan_for(100e6)
    fetch = plan.fetch
    assert fetch is not None
    assert (fetch.peer, fetch.n_tokens, fetch.n_bytes) == (peer("a"), 1024, 4 * BLOCK + 4096)
    assert [type(step) for step in plan.steps] == [FetchStep, RestoreStep, PrefillStep]
    assert plan.prefilled_tokens == 76
    assert plan.seconds == pytest.approx(sum(step.seconds for step in plan.steps))


def test_link_below_the_break_even_prefills() -> None:
    slow = 0.5 * break_even_bytes_s(MACHINE, RAW, 0)
    assert slow < break_even_bytes_s(MACHINE, RAW, 0)
    plan = plan_for(slow / 4)
    assert plan.fetch is None
    assert plan == local_plan(MACHINE, 1100, 0, RAW)


def test_nothing_is_fetched_for_a_gain_that_cannot_be_measured() -> None:
    local = local_plan(MACHINE, 1100, 0, RAW)
    one = Offer(Link(peer("a"), local.seconds - SPEED.seconds(256, 1100) - MIN_GAIN_S, 1e12), 256, (BLOCK,), 0, RAW)
    assert best_plan(MACHINE, 1100, 0, [one], local) is local


def test_shorter_prefix_is_fetched_where_later_blocks_come_too_slowly() -> None:
    """Two large blocks after two small ones: those two are computed sooner than they would arrive."""
    blocks = (BLOCK // 64, BLOCK // 64, 40 * BLOCK, 40 * BLOCK)
    offered = Offer(Link(peer("a"), 0.001, 50e6), 1024, blocks, 0, RAW)
    plan = best_plan(MACHINE, 1100, 0, [offered], local_plan(MACHINE, 1100, 0, RAW))
    assert plan.fetch is not None
    assert plan.fetch.n_tokens == 512


def test_best_of_several_offers_is_taken() -> None:
    local = local_plan(MACHINE, 1100, 0, RAW)
    near = Offer(Link(peer("near"), 0.001, 200e6), 1024, (BLOCK,) * 4, 0, RAW)
    far = Offer(Link(peer("far"), 0.080, 20e6), 1024, (BLOCK,) * 4, 0, RAW)
    plan = best_plan(MACHINE, 1100, 0, [far, near], local)
    assert plan.fetch is not None
    assert plan.fetch.peer == peer("near")


def test_only_what_is_missing_is_fetched() -> None:
    plan = plan_for(100e6, held=512)
    assert plan.fetch is not None
    assert plan.fetch.n_bytes == 2 * BLOCK + 4096


def test_offer_that_is_no_longer_than_what_is_held_is_no_plan() -> None:
    plan = plan_for(1e12, held=600, n_tokens=600)
    assert plan.fetch is None
    assert [type(step) for step in plan.steps] == [RestoreStep, PrefillStep]
    assert plan_for(1e12, n_prompt=1025, held=1024).fetch is None


def test_one_token_is_always_left_to_compute() -> None:
    plan = plan_for(1e12, n_prompt=1024)
    assert plan.fetch is not None
    assert plan.fetch.n_tokens == 1023


def test_decoding_counts_as_part_of_the_link() -> None:
    assert Link(peer("a"), 0.5, 100.0, 1000.0).seconds(100, 1000) == pytest.approx(2.5)
    assert Link(peer("a"), 0.5, 100.0).seconds(0, 0) == 0.0


def test_restoring_a_little_may_cost_more_than_computing_it() -> None:
    lame = Machine(SPEED, restore_bytes_s=1e9, restore_fixed_s=5.0)
    assert local_plan(lame, 300, 100, RAW) == Plan((PrefillStep(0, 300, SPEED.seconds(0, 300)),))
    assert lame.restore_s(0) == 0.0


@given(st.floats(1e3, 1e10), st.integers(2, 1500), st.integers(0, 1024), st.floats(0, 2))
def test_plan_is_never_expected_to_be_slower_than_without_peers(rate: float, n: int, held: int, rtt: float) -> None:
    held = min(held, n - 1)
    local = local_plan(MACHINE, n, held, RAW)
    plan = best_plan(MACHINE, n, held, [offer(rate, held_blocks=held // 256, rtt_s=rtt)], local)
    assert plan.seconds <= local.seconds
    assert plan.prefilled_tokens >= 1


# --- under way ------------------------------------------------------------------------------------------------


def underway(rate: float, arrived_blocks: int = 1, wanted: int = 1024) -> Underway:
    one = offer(100e6)
    return Underway(one, wanted, 256 * arrived_blocks, one.head_bytes + BLOCK * arrived_blocks, rate)


def test_fetch_goes_on_while_it_wins() -> None:
    assert worth_going_on(MACHINE, 1100, underway(100e6))
    assert worth_going_on(MACHINE, 1100, underway(100e6, wanted=700))


@pytest.mark.parametrize("rate", [0.0, 100e6 / 1000])
def test_fetch_is_given_up_when_the_link_falls_below_computing(rate: float) -> None:
    assert not worth_going_on(MACHINE, 1100, underway(rate))


def test_finished_fetch_stays_as_it_is() -> None:
    assert not worth_going_on(MACHINE, 1100, underway(0.0, arrived_blocks=4))


def test_what_has_arrived_in_part_counts() -> None:
    """At this rate no whole block is worth waiting for, but the rest of the second is, since most of it is here."""
    one = offer(100e6)
    rate = BLOCK / SPEED.seconds(256, 512) / 3
    assert not worth_going_on(MACHINE, 1100, Underway(one, 1024, 256, one.head_bytes + BLOCK, rate))
    assert worth_going_on(MACHINE, 1100, Underway(one, 1024, 256, one.head_bytes + 2 * BLOCK - 1000, rate))
    assert worth_going_on(MACHINE, 1100, Underway(one, 1024, 256, one.head_bytes + 2 * BLOCK, rate))


def test_fetch_that_ends_inside_a_block_is_finished_there() -> None:
    one = offer(100e6)
    assert not worth_going_on(MACHINE, 1100, Underway(one, 700, 700, one.head_bytes + 3 * BLOCK, 0.0))


def test_restoring_and_decoding_raise_the_rate_that_fetching_takes() -> None:
    machine = Machine(PrefillSpeed([SpeedPoint(0, 1000.0)]), restore_bytes_s=RAW * 4000.0)
    plain = break_even_bytes_s(machine, RAW, 0)
    restored = break_even_bytes_s(machine, RAW, 0, raw_bytes_per_token=RAW)
    decoded = break_even_bytes_s(machine, RAW, 0, raw_bytes_per_token=RAW, decode_bytes_s=RAW * 2000.0)
    assert plain == pytest.approx(RAW * 1000.0)
    assert restored == pytest.approx(plain / 0.75)
    assert decoded == pytest.approx(plain / 0.25)
    never = break_even_bytes_s(machine, RAW, 0, raw_bytes_per_token=RAW, decode_bytes_s=RAW * 900.0)
    assert never == math.inf


def test_the_whole_of_an_offer_is_a_plan_unless_it_is_held() -> None:
    whole = whole_plan(MACHINE, 1100, 0, offer(1e6))
    assert whole is not None
    assert whole.fetch is not None
    assert whole.fetch.n_tokens == 1024
    assert whole_plan(MACHINE, 1100, 1024, offer(1e6)) is None


# --- offers of equal blocks -----------------------------------------------------------------------------------


def even_and_plain(
    rate: float, n_tokens: int, held: int, first_block: int, decode_bytes_s: float = math.inf
) -> tuple[EvenOffer, Offer]:
    link = Link(peer("a"), 0.002, rate, decode_bytes_s)
    n_blocks = math.ceil(n_tokens / 256)
    first_block = min(first_block, held // 256, n_blocks)
    blocks = tuple(0 if number < first_block else BLOCK for number in range(n_blocks))
    head = 4 * n_tokens
    return EvenOffer(link, n_tokens, first_block, BLOCK, head, RAW), Offer(link, n_tokens, blocks, head, RAW)


MACHINES = [
    MACHINE,
    # Faster at first, then slower: as where short steps are dear.
    Machine(PrefillSpeed([SpeedPoint(100, 50.0), SpeedPoint(3000, 300.0), SpeedPoint(9000, 90.0)]), 2e9, 0.02),
    Machine(PrefillSpeed([SpeedPoint(0, 120.0)]), 1e9),
]


@given(
    st.sampled_from(MACHINES),
    st.floats(1e5, 1e9),
    st.integers(2, 12_000),
    st.integers(1, 12_000),
    st.integers(0, 6000),
    st.integers(0, 20),
    st.sampled_from([math.inf, 3e8]),
)
def test_cut_of_an_even_offer_is_that_of_the_best_plan(
    machine: Machine, rate: float, n_prompt: int, n_tokens: int, held: int, first_block: int, decode_bytes_s: float
) -> None:
    held = min(held, n_prompt - 1)
    even, plain = even_and_plain(rate, n_tokens, held, first_block, decode_bytes_s)
    local = local_plan(machine, n_prompt, held, RAW)
    plan = best_plan(machine, n_prompt, held, [plain], local)
    cut, seconds = best_cut(machine, n_prompt, held, even, local.seconds)
    assert seconds == pytest.approx(plan.seconds, abs=1e-9)
    if plan.fetch is None:
        assert cut == 0
    else:
        assert whole_seconds(machine, n_prompt, even, cut) == pytest.approx(plan.seconds, abs=1e-9)


def whole_seconds(machine: Machine, n_prompt: int, offer: EvenOffer, n_tokens: int) -> float:
    raw = n_tokens * RAW
    fetch_s = offer.link.seconds(offer.stored_bytes(n_tokens), raw)
    return fetch_s + machine.restore_s(raw) + machine.prefill.seconds(n_tokens, n_prompt)


def test_even_offer_counts_whole_missing_blocks_and_what_comes_before_them() -> None:
    even, _ = even_and_plain(1e6, 1000, 512, 2)
    assert [even.stored_bytes(n) for n in (0, 512, 513, 1000)] == [4000, 4000, 4000 + BLOCK, 4000 + 2 * BLOCK]


def test_a_cut_may_be_taken_without_a_margin() -> None:
    even, plain = even_and_plain(1e9, 1024, 0, 0)
    plan = best_plan(MACHINE, 1100, 0, [plain], local_plan(MACHINE, 1100, 0, RAW))
    just_slower_s = plan.seconds + MIN_GAIN_S / 2
    assert best_cut(MACHINE, 1100, 0, even, just_slower_s) == (0, just_slower_s)
    assert best_cut(MACHINE, 1100, 0, even, just_slower_s, margin_s=0.0)[0] == 1024


# --- whether to go on, against all there is to choose from -----------------------------------------------------


@given(
    st.sampled_from(MACHINES),
    st.floats(0, 1e9),
    st.integers(300, 8000),
    st.integers(0, 30),
    st.integers(0, 40),
)
def test_going_on_is_worth_it_where_some_later_end_is_sooner_done(
    machine: Machine, rate: float, n_prompt: int, arrived_blocks: int, more_chunks: int
) -> None:
    wanted = n_prompt - 1
    n_blocks = math.ceil(wanted / 256)
    plain = Offer(Link(peer("a"), 0.001, 1e6), wanted, (BLOCK,) * n_blocks, 4000, RAW)
    arrived = min(arrived_blocks * 256, wanted)
    arrived_bytes = 4000 + arrived // 256 * BLOCK + more_chunks * BLOCK // 8
    underway = Underway(plain, wanted, arrived, arrived_bytes, rate)

    def seconds(n_tokens: int) -> float:
        left_bytes = max(0, 4000 + math.ceil(n_tokens / 256) * BLOCK - arrived_bytes) if n_tokens > arrived else 0
        arriving_s = (left_bytes / rate if rate else math.inf) if left_bytes else 0.0
        return arriving_s + machine.restore_s(n_tokens * RAW) + machine.prefill.seconds(n_tokens, n_prompt)

    later = [min(wanted, n_tokens) for n_tokens in range(arrived + 256 - arrived % 256, n_blocks * 256 + 1, 256)]
    sooner = any(seconds(n_tokens) < seconds(arrived) for n_tokens in later)
    assert worth_going_on(machine, n_prompt, underway) == sooner
