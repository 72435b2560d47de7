from typing import Any

from kvnet_node.audit.auditor import IDLE_S, Auditor, Sent, Tally
from kvnet_node.audit.bodies import parts
from kvnet_node.audit.causes import Cause
from kvnet_node.audit.prompt import Part, Step, extend, root
from kvnet_node.audit.seen import SeenPlaces

SYSTEM = "You are a careful assistant. " * 400


def request(*texts: str, system: str = SYSTEM, session: str = "s", model: str = "m", **fields: Any) -> Sent:
    body = {"system": system, "messages": [{"role": "user", "content": text} for text in texts]}
    prompt = root()
    for part in parts(body):
        prompt = extend(prompt, part)
    return Sent("requests", session, model, prompt, **fields)


def audited(*requests: Sent, scope: Any = "all") -> Tally:
    auditor = Auditor(scope)
    for each in requests:
        auditor.take(each)
    total = Tally()
    for tally in auditor.sessions.values():
        total.add(tally)
    return total


def test_the_first_request_repeats_nothing() -> None:
    total = audited(request("a", tokens=1000, cached=0))
    assert (total.sent, total.repeated, total.avoidable, total.causes) == (1000, 0, 0, {})


def test_a_conversation_repeats_all_it_sent_before() -> None:
    total = audited(
        request("a", tokens=1000, cached=0),
        request("a", "b", tokens=1400, cached=1000),
        request("a", "b", "c", tokens=1900, cached=1400),
    )
    assert (total.sent, total.repeated, total.cached, total.avoidable) == (4300, 2400, 2400, 0)
    assert total.causes == {}


def test_avoidable_is_what_was_repeated_and_not_cached() -> None:
    total = audited(request("a", tokens=1000, cached=0), request("a", "b", tokens=1400, cached=300))
    assert (total.repeated, total.avoidable) == (1000, 700)
    assert {cause: missed.tokens for cause, missed in total.causes.items()} == {Cause.NOT_CACHED: 700}


def test_an_idle_conversation_is_told_from_a_busy_one() -> None:
    later = IDLE_S + 1
    total = audited(
        request("a", tokens=1000, cached=0, at_s=1.0), request("a", "b", tokens=1400, cached=0, at_s=1.0 + later)
    )
    assert list(total.causes) == [Cause.IDLE]


def test_the_same_system_prompt_in_another_session_is_repeated_within_all_only() -> None:
    requests = [request("a word" * 700, tokens=4000, cached=0), request("b", session="t", tokens=2950, cached=0)]
    assert audited(*requests).repeated > 2000
    assert audited(*[request("a", session=s, model=s, tokens=9) for s in "xy"]).repeated == 0


def test_another_model_shares_nothing() -> None:
    assert audited(request("a", tokens=1000), request("a", model="n", tokens=1000)).repeated == 0


def test_a_change_of_the_model_in_a_conversation_is_named() -> None:
    total = audited(
        request("a", tokens=1000, cached=0),
        request("a", "b", model="n", tokens=1400, cached=0),
        request("a", "b", "c", tokens=1900, cached=1000),
    )
    assert {cause: missed.tokens for cause, missed in total.causes.items()} == {Cause.MODEL: 1400}


def test_without_usage_tokens_are_estimated_from_characters() -> None:
    one = request("a" * 400)
    total = audited(one)
    assert total.sent == -(-one.prompt.sent[-1].characters // 4)
    assert (total.estimated, total.without_cache_usage) == (1, 1)


def test_what_stands_behind_a_varying_date_is_counted_apart() -> None:
    first = request("a", system=f"Today is 2026-01-02. {SYSTEM}", tokens=3000, cached=0)
    second = request("a", "b", system=f"Today is 2026-01-03. {SYSTEM}", tokens=3100, cached=0)
    total = audited(first, second)
    assert total.repeated == 0
    assert 2900 < total.behind_changes <= 3000
    assert total.causes[Cause.DATE].misses == 1


def test_a_change_in_the_middle_leaves_what_stands_before_it() -> None:
    long = "word " * 8000
    total = audited(
        request(long, "a word" * 700, tokens=14_000, cached=0), request(long, "b word" * 700, tokens=14_000, cached=0)
    )
    assert 12_000 < total.repeated < 13_200


def test_a_cache_that_served_more_than_the_log_shows_is_believed() -> None:
    hidden = Sent("codex", "s", "m", root("file"), tokens=9000, cached=8000, hidden=True)
    assert audited(hidden).repeated == 8000


def test_the_head_all_conversations_of_an_agent_share_is_known_from_what_was_cached() -> None:
    def first(name: str, cached: int) -> Sent:
        prompt = extend(root(name), Part("message", "hello", "hello", "user"))
        return Sent("a", name, "m", prompt, tokens=20_000, cached=cached, hidden=True, head=("a", "1"))

    total = audited(first("one", 0), first("two", 15_000), first("three", 0))
    assert (total.repeated, total.avoidable) == (30_000, 15_000)
    assert list(total.causes) == [Cause.NEW_CONVERSATION]


def test_a_request_that_stands_in_two_logs_counts_once() -> None:
    one = request("a", tokens=1000, key="m1/r1")
    assert audited(one, request("a", session="resumed", tokens=1000, key="m1/r1")).requests == 1


def test_conversations_that_alternate_are_each_compared_with_their_own_past() -> None:
    other = "You name things. " * 400
    total = audited(
        request("a", tokens=3000, cached=0),
        request("x", system=other, tokens=2000, cached=0),
        request("a", "b", tokens=3200, cached=3000),
        request("x", "y", system=other, tokens=2200, cached=2000),
    )
    assert (total.avoidable, total.causes) == (0, {})


def test_another_conversation_with_the_same_system_prompt_is_no_rewritten_history() -> None:
    total = audited(request("a word " * 900, tokens=4500, cached=0), request("b word " * 900, tokens=4500, cached=2900))
    assert total.causes == {}


def test_a_history_that_was_changed_in_the_middle_is_named() -> None:
    one, other = "a word " * 900, "b word " * 900
    total = audited(
        request("q", one, "r", tokens=4500, cached=0), request("q", other, "r", "s", tokens=4500, cached=2900)
    )
    assert list(total.causes) == [Cause.REWRITTEN]


def test_memory_stays_bounded_and_what_was_forgotten_is_counted() -> None:
    seen = SeenPlaces(max_places=100)
    tip: Step = root("m")
    for index in range(300):
        tip = extend(tip, Part("message", str(index), str(index), "user"))
        seen.match(tip, index + 1)
    assert seen.forgotten > 0
    assert len(seen._sent._tokens) <= 100
    assert seen.match(tip, 300).sent == 300
