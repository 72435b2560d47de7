from typing import Any

import pytest

from kvnet_node.audit.bodies import parts
from kvnet_node.audit.causes import Cause, parting, remedy, title
from kvnet_node.audit.prompt import Step, extend, root

SYSTEM = "You are a careful assistant. " * 200
TOOLS = [
    {"name": name, "description": name * 20, "input_schema": {"type": "object", "properties": {"path": {}}}}
    for name in ("read", "write", "search")
]
USER = {"role": "user", "content": "What is in the first file?"}
ANSWER = {"role": "assistant", "content": "A list of names."}
NEXT = {"role": "user", "content": "And in the second?"}


def prompt(**body: Any) -> Step:
    step = root("m")
    for part in parts(body):
        step = extend(step, part)
    return step


def cause(before: dict[str, Any], now: dict[str, Any]) -> Cause | None:
    parted = parting(prompt(**before), prompt(**now))
    return parted.cause if parted else None


def turn(system: Any = SYSTEM, tools: Any = TOOLS, messages: Any = (USER,)) -> dict[str, Any]:
    return {"system": system, "tools": tools, "messages": list(messages)}


def test_a_conversation_that_goes_on_has_no_cause() -> None:
    assert cause(turn(), turn(messages=(USER, ANSWER, NEXT))) is None


def test_moving_cache_markers_change_nothing() -> None:
    marked = {"role": "user", "content": [{"type": "text", "text": USER["content"], "cache_control": {"type": "e"}}]}
    assert cause(turn(messages=(marked,)), turn(messages=(USER, ANSWER, NEXT))) is None


def billing(code: str) -> list[dict[str, str]]:
    line = f"x-anthropic-billing-header: cc_version=2.1.39.{code[:3]}; cc_entrypoint=cli; cch={code};"
    return [{"type": "text", "text": line}, {"type": "text", "text": SYSTEM}]


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (turn(billing("11111")), turn(billing("2222")), Cause.BILLING_LINE),
        (turn(f"Today is 2026-01-02. {SYSTEM}"), turn(f"Today is 2026-01-03. {SYSTEM}"), Cause.DATE),
        (turn(f"Today is Friday, May 1, 2026. {SYSTEM}"), turn(f"Today is Friday, May 8, 2026. {SYSTEM}"), Cause.DATE),
        (turn(f"It is 10:31:07 now. {SYSTEM}"), turn(f"It is 9:02:11 now. {SYSTEM}"), Cause.DATE),
        (turn(f"Request id: req_0123456789ab. {SYSTEM}"), turn(f"Request id: req_ba9876543210cd. {SYSTEM}"), Cause.ID),
        (
            turn(f"session 3f0c8a52-1111-4222-8333-444455556666 {SYSTEM}"),
            turn(f"session 00000000-1111-4222-8333-444455556666 {SYSTEM}"),
            Cause.ID,
        ),
        (turn(), turn(tools=TOOLS[::-1]), Cause.TOOLS_ORDER),
        (turn(), turn(tools=[dict(reversed(tool.items())) for tool in TOOLS]), Cause.KEYS),
        (turn(), turn(tools=TOOLS[:2]), Cause.TOOLS),
        (turn(), turn(f"Be brief. {SYSTEM}"), Cause.SYSTEM),
        (turn(messages=(USER, ANSWER, NEXT)), turn(messages=({**USER, "content": "O"}, ANSWER, NEXT)), Cause.REWRITTEN),
        (turn(messages=(USER, ANSWER, NEXT)), turn(messages=({**USER, "content": "Summary"},)), Cause.COMPACTED),
        (turn(messages=(USER, ANSWER, NEXT)), turn(messages=(NEXT, ANSWER, USER)), Cause.TRUNCATED),
        (
            turn(messages=(USER, {**ANSWER, "reasoning_content": "Let me see."}, NEXT)),
            turn(messages=(USER, ANSWER, NEXT, ANSWER, NEXT)),
            Cause.REASONING,
        ),
        (
            turn(messages=({**USER, "content": "<env>Today's date: 2026-01-02</env> Fix it"},)),
            turn(messages=({**USER, "content": "<env>Today's date: 2026-01-03</env> Fix it"},)),
            Cause.DATE,
        ),
    ],
)  # fmt: skip
def test_the_first_change_is_named(before: dict[str, Any], now: dict[str, Any], expected: Cause) -> None:
    assert cause(before, now) is expected


def test_the_first_change_wins_over_later_ones() -> None:
    before = turn(f"Today is 2026-01-02. {SYSTEM}")
    now = turn(f"Today is 2026-01-03. {SYSTEM}", messages=({**USER, "content": "Other"},))
    parted = parting(prompt(**before), prompt(**now))
    assert parted is not None
    assert (parted.cause, parted.parts, parted.mended_parts) == (Cause.DATE, 1, 2)


def test_openai_bodies_are_read_like_anthropic_ones() -> None:
    def body(code: str) -> dict[str, Any]:
        return {"messages": [{"role": "system", "content": billing(code)[0]["text"] + SYSTEM}, USER], "tools": TOOLS}

    assert cause(body("1"), body("2")) is Cause.BILLING_LINE


def test_every_cause_says_what_helps() -> None:
    assert all(title(cause) and remedy(cause) for cause in Cause)


def test_a_picture_counts_as_little_and_two_pictures_differ() -> None:
    def picture(data: str) -> Step:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        return prompt(messages=[{"role": "user", "content": [image]}])

    one, other = picture("A" * 100_000), picture("B" * 100_000)
    assert one.sent[-1].characters < 200
    assert one.part != other.part
