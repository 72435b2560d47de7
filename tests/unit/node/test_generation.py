import pytest

from kvnet.errors import OverBudgetError, WindowError
from kvnet.exchange.generation import Answer
from kvnet.exchange.reuse import Rejected
from kvnet.format.hashes import ArtifactHash, short_text
from kvnet.trust.keys import PublisherKey, publisher_text
from kvnet.trust.policy import Refusal, TrustPolicy
from kvnet_node.operations.adding import check_fits
from kvnet_node.operations.generation import check_window, reason_text, saved_seconds
from tests.unit.store.samples import sample

ARTIFACT = ArtifactHash(b"a" * 32)
STRANGER = PublisherKey(b"s" * 32)


def answer(*, reused_tokens: int, lookup_s: float = 1.5, restore_s: float = 0.5) -> Answer:
    return Answer(
        text="",
        tokens=(),
        finish_reason="stop",
        prompt_tokens=1_000,
        reused_tokens=reused_tokens,
        prefilled_tokens=1_000 - reused_tokens,
        sources=(),
        ttft_s=4.0,
        prefill_s=1.0,
        restore_s=restore_s,
        decode_s=0.0,
        verdict=None,
        policy="trusted",
        rejected=(),
        lookup_s=lookup_s,
    )


def test_what_was_saved_is_the_prefill_that_was_spared_less_the_time_of_reuse() -> None:
    assert saved_seconds(answer(reused_tokens=900), 100.0) == pytest.approx(7.0)
    assert saved_seconds(answer(reused_tokens=100), 100.0) == pytest.approx(-1.0)


def test_waiting_for_a_busy_engine_is_no_cost_of_reuse() -> None:
    waited = answer(reused_tokens=100, lookup_s=0.0, restore_s=0.015)
    assert waited.waited_s == pytest.approx(2.985)
    assert saved_seconds(waited, 100.0) == pytest.approx(0.985)
    assert answer(reused_tokens=100, lookup_s=9.0).waited_s == 0


def test_nothing_is_claimed_to_be_saved_without_reuse_or_a_known_speed() -> None:
    assert saved_seconds(answer(reused_tokens=0), 100.0) == 0
    assert saved_seconds(answer(reused_tokens=900), 0.0) == 0


def test_an_untrusted_publisher_is_named_with_the_command_that_trusts_it() -> None:
    policy = TrustPolicy("trusted", own=frozenset(), trusted=frozenset())
    verdict = policy.judge(sample(range(10), key=STRANGER).manifest)
    assert isinstance(verdict, Refusal)
    text = reason_text(Rejected(ARTIFACT, verdict.code, verdict.text))
    assert text.startswith(f"{short_text(ARTIFACT)} was not used: it is signed by")
    assert text.endswith(f"kvnet key trust {publisher_text(STRANGER.public)}")
    assert verdict.code not in text


def test_other_reasons_are_words_without_a_code() -> None:
    text = reason_text(Rejected(ARTIFACT, "not_exact", "another chip"))
    assert text == f"{short_text(ARTIFACT)} was not used: another chip"
    assert reason_text(Rejected(ArtifactHash(bytes(32)), "store", "busy")) == "the store could not be asked: busy"


def test_a_prompt_beyond_the_window_is_over_the_budget() -> None:
    check_window(90, 10, 100)
    check_window(10_000, 10, 0)
    with pytest.raises(OverBudgetError, match="window is 100 tokens") as raised:
        check_window(91, 10, 100)
    assert "--max-tokens" in raised.value.hint


@pytest.mark.parametrize(("n_files", "words"), [(1, "the file makes 1,001"), (5, "5 files make 1,001")])
def test_files_beyond_the_window_are_refused_and_fewer_asked_for(n_files: int, words: str) -> None:
    check_fits(1_000, n_files, 1_000)
    check_fits(10_000, n_files, 0)
    with pytest.raises(WindowError, match="window is 1,000 tokens") as raised:
        check_fits(1_001, n_files, 1_000)
    assert str(raised.value).endswith(words)
    assert "fewer" in raised.value.hint
