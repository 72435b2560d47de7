"""What of a conversation is kept, from figures alone."""

from dataclasses import replace

import pytest

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
