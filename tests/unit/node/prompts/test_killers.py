"""Each killer of shared prefixes: found where it is, and not where it is not."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from kvnet.engine.prompts import Boundary, BoundaryKind, PreparedPrompt
from kvnet_node.prompts import killers
from kvnet_node.prompts.compare import Prompt
from kvnet_node.prompts.killers import KILLERS, Finding
from kvnet_node.prompts.normalise import Removed, normalise
from kvnet_node.prompts.outline import outline
from kvnet_node.prompts.sections import as_characters
from kvnet_node.prompts.spans import SpanKind

LINE = "x-anthropic-billing-header: cc_version=2.1.39.c39; cc_entrypoint=cli; cch={};\n"
SYSTEM = "You are careful.\n\nRead before you write.\n\nUse the tools.\n\nAnswer in English.\n\n"
Body = dict[str, Any]


def tool(name: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"path": {"type": "string"}, "line": {"type": "integer"}}}
    return {"type": "function", "function": {"name": name, "description": f"To {name}.", "parameters": schema}}


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "read", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def session(system: str = SYSTEM, *more: Body) -> Body:
    return {
        "tools": [tool("read"), tool("write"), tool("list")],
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": "What does the first file say about lanes?"},
            call('{"path": "a.py", "line": 3}'),
            {"role": "tool", "tool_call_id": "1", "content": "lane = 1\nlane = 2\n"},
            {"role": "assistant", "content": "It says that there are two of them."},
            {"role": "user", "content": "And the second file?"},
            *more,
        ],
    }


NEXT = ({"role": "assistant", "content": "Nothing at all."}, {"role": "user", "content": "Thank you. And the third?"})


def changed(change: Callable[[Body], object]) -> Body:
    """The session's next request, with something changed."""
    body = copy.deepcopy(session(SYSTEM, *NEXT))
    change(body)
    return body


def set_content(index: int, content: Any) -> Callable[[Body], object]:
    return lambda body: body["messages"][index].update(content=content)


def reverse_keys(body: Body) -> None:
    parameters = body["tools"][1]["function"]["parameters"]
    parameters["properties"] = dict(reversed(parameters["properties"].items()))


def drop(count: int) -> Callable[[Body], object]:
    return lambda body: body["messages"].__delitem__(slice(1, 1 + count))


def pair(earlier: str, later: str) -> tuple[Body, Body]:
    return session(earlier + SYSTEM), session(later + SYSTEM, *NEXT)


PARTS = SYSTEM.split("\n\n")[:4]
PLAIN = session()

BETWEEN: list[tuple[str, Body, Body]] = [
    ("billing-line", *pair(LINE.format("56445"), LINE.format("0aaa9"))),
    ("date-at-top", *pair("Today is Monday, 29 June 2026.\n", "Today is Tuesday, 30 June 2026.\n")),
    ("date-at-top", *pair("Current time: 17:54:02\n", "Current time: 17:55:13\n")),
    ("date-at-top", *pair("now: 1764438842\n", "now: 1764438999\n")),
    ("names-at-top", *pair("Working directory: /Users/ann/a\n", "Working directory: /Users/bob/b\n")),
    ("names-at-top", *pair("Hostname: anns-mac.local\n", "Hostname: bobs-mac.local\n")),
    ("request-id", *pair("Session id: 8f3a2b91cc\n", "Session id: 77d0aa13ef\n")),
    (
        "request-id",
        *pair("550e8400-e29b-41d4-a716-446655440000\n", "1b4e28ba-2fa1-41d2-883f-0016d3cca427\n"),
    ),
    ("machine-state", *pair("Current branch: main\n", "Current branch: fix\n")),
    ("running-counter", *pair("Tokens left: 12,000\n", "Tokens left: 11,512\n")),
    ("tools-reordered", PLAIN, changed(lambda body: body["tools"].reverse())),
    ("tools-changed", PLAIN, changed(lambda body: body["tools"].append(tool("search")))),
    ("tools-changed", PLAIN, changed(lambda body: body["tools"].pop(0))),
    ("tools-changed", PLAIN, changed(lambda body: body.pop("tools"))),
    ("keys-reordered", PLAIN, changed(reverse_keys)),
    (
        "keys-reordered",
        PLAIN,
        changed(lambda body: body["messages"].__setitem__(2, call('{"line": 3, "path": "a.py"}'))),
    ),
    ("keys-reordered", PLAIN, changed(lambda body: body["messages"].__setitem__(2, call('{"path":"a.py","line":3}')))),
    ("history-rewritten", PLAIN, changed(set_content(1, "What does the first file say about lanes? <reminder>"))),
    ("history-rewritten", PLAIN, changed(set_content(3, "[shortened]"))),
    ("history-rewritten", PLAIN, changed(set_content(5, "And the second one?"))),
    ("history-truncated", PLAIN, changed(drop(1))),
    ("history-truncated", PLAIN, changed(drop(3))),
    ("parts-reordered", PLAIN, changed(set_content(0, "\n\n".join([PARTS[2], *PARTS[:2], PARTS[3]])))),
    (
        "parts-reordered",
        session(SYSTEM, *NEXT[:1], {"role": "user", "content": "doc a\n\ndoc b\n\ndoc c\n\nQuestion one?"}),
        session(SYSTEM, *NEXT[:1], {"role": "user", "content": "doc c\n\ndoc b\n\ndoc a\n\nQuestion two?"}),
    ),
    ("parts-sampled", PLAIN, changed(set_content(0, "\n\n".join([PARTS[0], "Write short lines.", *PARTS[2:]])))),
    ("white-space", PLAIN, changed(set_content(0, SYSTEM.replace("\n", "\r\n")))),
    ("white-space", PLAIN, changed(set_content(0, SYSTEM.replace("careful.", "careful. ")))),
    (
        "white-space",
        *pair("The caf\u00e9.\n", "The cafe\u0301.\n"),
    ),
]


def ids(found: list[Finding]) -> list[str]:
    return [each.killer for each in found]


@pytest.mark.parametrize(("killer", "earlier", "later"), BETWEEN)
def test_a_killer_is_found_between_two_requests(killer: str, earlier: Body, later: Body) -> None:
    found = killers.between_requests(outline(earlier), outline(later))
    assert ids(found) == [killer]
    assert found[0].certain
    assert found[0].place is not None


@pytest.mark.parametrize(
    "later",
    [
        session(SYSTEM, *NEXT),
        session(),
        changed(lambda body: body["messages"].__delitem__(slice(6, None))),
        # Another question at the end, and another conversation under the same system prompt.
        {**PLAIN, "messages": [*PLAIN["messages"][:-1], {"role": "user", "content": "Something else?"}]},
        {**PLAIN, "messages": [PLAIN["messages"][0], {"role": "user", "content": "Tell me a story of a fox."}]},
    ],
)
def test_nothing_is_found_where_nothing_was_changed(later: Body) -> None:
    assert killers.between_requests(outline(PLAIN), outline(later)) == []


def test_marks_that_move_from_message_to_message_are_no_change() -> None:
    def body(*, marked: bool) -> Body:
        mark = {"cache_control": {"type": "ephemeral"}} if marked else {}
        return {
            "system": [{"type": "text", "text": "Be brief.", **mark}],
            "tools": [{"name": "read", "input_schema": {}, **mark}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello", **mark}]}],
        }

    assert killers.between_requests(outline(body(marked=True)), outline(body(marked=False))) == []
    assert outline(body(marked=True)) == outline(body(marked=False))


def test_the_same_change_is_found_in_anthropic_style() -> None:
    def body(arguments: dict[str, Any], names: str) -> Body:
        return {
            "system": [{"type": "text", "text": "Be brief."}],
            "tools": [{"name": name, "input_schema": {}} for name in names],
            "messages": [
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "a", "input": arguments}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x"}]},
            ],
        }

    first = outline(body({"x": 1, "y": 2}, "abc"))
    assert ids(killers.between_requests(first, outline(body({"x": 1, "y": 2}, "bca")))) == ["tools-reordered"]
    assert "keys-reordered" in ids(killers.between_requests(first, outline(body({"y": 2, "x": 1}, "abc"))))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (SpanKind.DATE, "Today is Monday."),
        (SpanKind.NAME, "cwd: /opt/tools"),
        (SpanKind.ID, "Session id: 8f3a2b91cc"),
        (SpanKind.STATE, "Current branch: main"),
        (SpanKind.COUNTER, "Tokens left: 12,000"),
    ],
)
def test_in_one_request_what_probably_varies_is_found_before_the_conversation(kind: SpanKind, text: str) -> None:
    [found] = killers.in_request(outline(session(f"Be brief.\n{text}")))
    assert (found.killer, found.certain) == (kind.value, False)
    assert found.place is not None
    assert (found.place.path, found.place.line) == ("messages[0].content", 2)
    asked = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]}
    assert killers.in_request(outline(asked)) == []


def test_in_one_request_the_removed_line_is_told_first() -> None:
    normalised = normalise(session(LINE.format("56445") + "Today is Monday."))
    found = killers.in_request(outline(normalised.body), normalised.removed)
    assert ids(found) == ["billing-line", "date-at-top"]
    assert (found[0].removed, found[1].removed) == (True, False)
    assert killers.removed_findings([Removed("billing line", 81, "system")])[0].words == "81 characters, in system"


def test_of_one_killer_only_a_few_places_are_shown() -> None:
    many = "\n".join(f"Session id: 8f3a2b91c{number}" for number in range(9))
    assert len(killers.in_request(outline(session(many)))) == killers.MAX_FINDINGS


def conversation(*, stable: int) -> Prompt:
    boundaries = (Boundary(10, BoundaryKind.SYSTEM, 1), Boundary(30, BoundaryKind.MESSAGE, 2))
    return Prompt(outline(session()), PreparedPrompt(tuple(range(35)), boundaries, stable, 0))


def test_a_template_that_rewrites_earlier_reasoning_is_told_from_the_prompt() -> None:
    assert ids(killers.in_prompt(conversation(stable=12))) == ["template-rewrites-reasoning"]
    assert killers.in_prompt(conversation(stable=30)) == []
    assert killers.in_prompt(conversation(stable=35)) == []
    assert killers.in_prompt(Prompt(outline({}), PreparedPrompt((1, 2), (), 2, 0))) == []


def test_a_template_that_prints_the_date_is_told_from_two_renderings_of_one_request() -> None:
    body = outline(session())

    def prompt(text: str) -> Prompt:
        boundaries = (Boundary(len(text), BoundaryKind.SYSTEM, 1),)
        return Prompt(body, PreparedPrompt(tuple(map(ord, text + "x")), boundaries, len(text), 0))

    assert ids(killers.between_prompts(prompt("29 Nov"), prompt("30 Nov"))) == ["template-prints-the-time"]
    assert killers.between_prompts(prompt("29 Nov"), prompt("29 Nov")) == []
    changed_text = Prompt(outline(session("Be long.")), as_characters(outline(session("Be long."))))
    plain = Prompt(body, as_characters(body))
    assert killers.between_prompts(plain, changed_text) == []


def test_every_killer_says_what_it_is_and_what_to_do_and_can_be_found() -> None:
    assert len({each.id for each in KILLERS}) == len(KILLERS)
    for each in KILLERS:
        assert each.title
        assert each.why.endswith(".")
        assert each.remedy.endswith(".")
        assert any((each.between, each.in_prompt, each.between_prompts))
    assert {kind.value for kind in SpanKind} == {each.id for each in KILLERS if each.span is not None}
    tested = {name for name, _, _ in BETWEEN} | {"template-rewrites-reasoning", "template-prints-the-time"}
    assert tested == {each.id for each in KILLERS}


def test_no_finding_says_any_of_the_text_outside_its_excerpt() -> None:
    earlier, later = session("Session id: 8f3a2b91cc"), session("Session id: 77d0aa13ef")
    found = killers.between_requests(outline(earlier), outline(later))
    assert all("77d0" not in each.words for each in found)
    assert json.dumps([each.words for each in found])
