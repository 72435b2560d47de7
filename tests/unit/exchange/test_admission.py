"""What of a conversation is kept, from figures alone."""

from dataclasses import replace

import pytest

from kvnet.engine.prompts import Boundary, BoundaryKind
from kvnet.exchange.admission import AdmissionPolicy, Signals

POLICY = AdmissionPolicy()
SIGNALS = Signals(prompt_tokens=1000, stable_tokens=1000, held_tokens=1100, stored_tokens=0)


def test_all_whole_blocks_of_prompt_and_answer_are_kept() -> None:
    assert POLICY.decide(SIGNALS).keep_tokens == 1024


@pytest.mark.parametrize(
    ("held", "stored", "keep"),
    [(255, 0, 0), (256, 0, 256), (1100, 1024, 0), (1280, 1024, 1280), (1279, 1024, 0), (1300, 1100, 1280), (0, 0, 0)],
)
def test_one_whole_new_block_is_worth_keeping_and_less_is_not(held: int, stored: int, keep: int) -> None:
    signals = replace(SIGNALS, held_tokens=held, stored_tokens=stored)
    decision = POLICY.decide(signals)
    assert decision.keep_tokens == keep
    assert decision.reason


def test_what_the_template_rewrites_on_the_next_turn_is_not_kept() -> None:
    assert POLICY.decide(replace(SIGNALS, stable_tokens=600)).keep_tokens == 512
    assert POLICY.decide(replace(SIGNALS, stable_tokens=0)).keep_tokens == 0


def test_a_private_request_leaves_nothing_whatever_was_marked() -> None:
    signals = replace(SIGNALS, private=True, marks=(1,), mark_ttl_s=3600.0, cache_key="agent")
    assert POLICY.decide(signals).keep_tokens == 0
    assert POLICY.created_tokens(signals, 0) == 0


def test_keeping_can_be_turned_off() -> None:
    assert AdmissionPolicy(enabled=False).decide(SIGNALS).keep_tokens == 0


def test_a_higher_bar_asks_for_more_new_blocks() -> None:
    policy = AdmissionPolicy(min_new_blocks=3)
    assert policy.decide(replace(SIGNALS, stored_tokens=512)).keep_tokens == 0
    assert policy.decide(replace(SIGNALS, stored_tokens=256)).keep_tokens == 1024


@pytest.mark.parametrize(
    ("stored", "reused", "created"), [(0, 0, 768), (256, 0, 512), (0, 300, 468), (512, 300, 256), (0, 999, 0)]
)
def test_a_prompt_token_is_created_or_reused_and_never_both(stored: int, reused: int, created: int) -> None:
    signals = replace(SIGNALS, held_tokens=1000, stored_tokens=stored)
    assert POLICY.created_tokens(signals, reused) == created
    assert created + reused <= signals.prompt_tokens


SYSTEM = Boundary(600, BoundaryKind.SYSTEM, 1)
MESSAGE = Boundary(900, BoundaryKind.MESSAGE, 2)
BUDGETED = replace(SIGNALS, token_bytes=100, left_bytes=1_000_000, day_bytes=1_000_000, boundaries=(SYSTEM, MESSAGE))


def test_with_a_budget_that_is_not_low_everything_is_kept_as_without_one() -> None:
    assert POLICY.decide(BUDGETED) == POLICY.decide(SIGNALS)


@pytest.mark.parametrize("kind", [BoundaryKind.SYSTEM, BoundaryKind.TOOLS, BoundaryKind.MARK])
def test_when_the_days_writes_run_low_only_what_is_likely_to_come_again_is_kept(kind: BoundaryKind) -> None:
    low = replace(BUDGETED, left_bytes=200_000, boundaries=(replace(SYSTEM, kind=kind), MESSAGE))
    assert POLICY.decide(low).keep_tokens == 512
    again = POLICY.decide(replace(low, stored_tokens=512))
    assert (again.keep_tokens, "run low" in again.reason) == (0, True)
    assert POLICY.decide(replace(low, boundaries=(MESSAGE,))).keep_tokens == 0


def test_what_does_not_fit_into_the_rest_of_the_day_is_kept_up_to_a_shared_boundary_or_not_at_all() -> None:
    # 1,024 tokens would be 102,400 bytes, and the 512 before the boundary are 51,200.
    policy = AdmissionPolicy(low_share=0.0)
    assert policy.decide(replace(BUDGETED, left_bytes=102_400)).keep_tokens == 1024
    assert policy.decide(replace(BUDGETED, left_bytes=102_399)).keep_tokens == 512
    assert policy.decide(replace(BUDGETED, left_bytes=51_200)).keep_tokens == 512
    nothing = policy.decide(replace(BUDGETED, left_bytes=51_199))
    assert (nothing.keep_tokens, nothing.reason) == (0, "what is left of today's writes does not suffice")


def test_nothing_is_kept_when_the_days_writes_are_used_up() -> None:
    decision = POLICY.decide(replace(BUDGETED, left_bytes=0))
    assert (decision.keep_tokens, decision.reason) == (0, "today's writes are used up")


def test_a_budget_of_nothing_keeps_nothing() -> None:
    assert POLICY.decide(replace(BUDGETED, left_bytes=0, day_bytes=0)).keep_tokens == 0
