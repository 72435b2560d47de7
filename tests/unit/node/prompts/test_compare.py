"""Where two prompts part: in tokens, in sections and in the requests' own texts. Characters stand for tokens here."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnet.engine.prompts import Boundary, BoundaryKind, PreparedPrompt
from kvnet_node.prompts.compare import Prompt, common_characters, compare
from kvnet_node.prompts.outline import outline
from kvnet_node.prompts.sections import as_characters, section_at, sections


def prompt(body: dict[str, Any]) -> Prompt:
    return Prompt(outline(body), as_characters(outline(body)))


def rendered(body: dict[str, Any], *pieces: tuple[str, BoundaryKind | None, int], stable: int | None = None) -> Prompt:
    """A prompt as a chat template could have made it: texts, what ends with each, and the messages before that."""
    text, boundaries = "", []
    for piece, kind, n_messages in pieces:
        text += piece
        if kind is not None:
            boundaries.append(Boundary(len(text), kind, n_messages))
    tokens = tuple(map(ord, text))
    return Prompt(outline(body), PreparedPrompt(tokens, tuple(boundaries), stable or len(tokens), 0))


def chat(*messages: str, system: str = "Be brief.\nAnswer in English.") -> dict[str, Any]:
    roles = ("user", "assistant")
    turns = [{"role": roles[index % 2], "content": text} for index, text in enumerate(messages)]
    return {"messages": [{"role": "system", "content": system}, *turns]}


def test_a_conversation_that_goes_on_shares_all_that_was() -> None:
    found = compare(prompt(chat("One")), prompt(chat("One", "Two", "Three")))
    assert (found.parts, found.share, found.section, found.later) == (False, 1.0, "", None)
    assert found.common_tokens == found.earlier_tokens < found.later_tokens


def test_the_same_prompt_twice_shares_everything() -> None:
    found = compare(prompt(chat("One")), prompt(chat("One")))
    assert (found.parts, found.share) == (False, 1.0)


def test_the_place_is_given_in_the_text_of_both_requests() -> None:
    earlier = prompt(chat("One", system="Be brief.\nToday is Monday.\nGo."))
    later = prompt(chat("One", system="Be brief.\nToday is Tuesday.\nGo."))
    found = compare(earlier, later)
    assert (found.section, found.in_template) == ("system", False)
    assert found.later is not None
    assert (found.later.path, found.later.offset) == ("messages[0].content", 19)
    assert (found.later.line, found.later.column) == (2, 10)
    assert found.later.excerpt == "Be brief.\nToday is Tuesday.\nGo."
    assert found.earlier is not None
    assert "Monday" in found.earlier.excerpt
    assert found.share == pytest.approx(found.common_tokens / found.earlier_tokens)


def test_a_later_message_is_named_by_its_place_and_role() -> None:
    found = compare(prompt(chat("One", "Two", "Three")), prompt(chat("One", "Too", "Three")))
    assert found.section == "messages[2] (assistant)"
    assert found.later is not None
    assert found.later.words() == "messages[2].content, line 1, column 2"


def test_excerpts_stay_short_whatever_the_text() -> None:
    found = compare(prompt(chat("a" * 5000 + "b" * 5000)), prompt(chat("a" * 5000 + "c" * 5000)))
    assert found.later is not None
    assert found.later.offset == 5000
    assert len(found.later.excerpt) == 64


def test_with_system_before_tools_in_the_template_the_place_is_that_of_the_first_varying_token() -> None:
    def body(text: str, tool: str) -> dict[str, Any]:
        return {"tools": [{"name": tool}], **chat("Hi", system=text)}

    def made(text: str, tool: str) -> Prompt:
        return rendered(
            body(text, tool),
            (f"<{text}>", BoundaryKind.SYSTEM, 0),
            (f"[{tool}]", BoundaryKind.TOOLS, 1),
            ("Hi", BoundaryKind.MESSAGE, 2),
            ("answer:", None, 0),
        )

    found = compare(made("one", "read"), made("two", "write"))
    assert found.section == "system"
    assert found.later is not None
    assert found.later.part == "system"


def test_where_the_texts_agree_the_template_makes_the_difference() -> None:
    body = chat("Hi")
    mine = rendered(body, ("29 Nov Be brief.", BoundaryKind.SYSTEM, 1), ("Hi", BoundaryKind.MESSAGE, 2))
    theirs = rendered(body, ("30 Nov Be brief.", BoundaryKind.SYSTEM, 1), ("Hi", BoundaryKind.MESSAGE, 2))
    found = compare(mine, theirs)
    assert (found.in_template, found.section, found.common_tokens, found.later) == (True, "system", 0, None)


def test_a_message_rendered_otherwise_once_others_follow_is_the_templates_doing() -> None:
    first = chat("Q1", "<think>x</think>A1", "Q2")
    second = chat("Q1", "<think>x</think>A1", "Q2", "A2", "Q3")
    head = (("S", BoundaryKind.SYSTEM, 1), ("Q1", BoundaryKind.MESSAGE, 2))
    mine = rendered(first, *head, ("<think>x</think>A1", BoundaryKind.MESSAGE, 3), ("Q2", BoundaryKind.MESSAGE, 4))
    theirs = rendered(second, *head, ("A1", BoundaryKind.MESSAGE, 3), ("Q2", BoundaryKind.MESSAGE, 4))
    found = compare(mine, theirs)
    assert (found.in_template, found.section) == (True, "messages[2] (assistant)")


def test_sections_follow_the_order_of_the_template_and_cover_the_prompt() -> None:
    made = rendered(
        {"tools": [{"name": "read"}], **chat("Hi")},
        ("systemtext", BoundaryKind.SYSTEM, 1),
        ("tools", BoundaryKind.TOOLS, 1),
        ("Hi", BoundaryKind.MESSAGE, 2),
        ("answer:", None, 0),
    )
    found = made.sections
    assert [(each.label, each.n_tokens) for each in found] == [
        ("system", 10),
        ("tools", 5),
        ("messages[1] (user)", 2),
        ("answer", 7),
    ]
    assert [each.stable_tokens(12) for each in found] == [10, 2, 0, 0]
    assert [section_at(found, token) for token in (0, 10, 23, 24)] == [found[0], found[1], found[3], None]


def test_sections_that_end_at_one_token_are_one_section() -> None:
    made = rendered(
        {"tools": [{"name": "read"}], **chat("Hi")},
        ("systemtools", BoundaryKind.SYSTEM, 1),
        ("", BoundaryKind.TOOLS, 1),
        ("Hi", BoundaryKind.MESSAGE, 2),
    )
    assert [each.label for each in made.sections] == ["system and tools", "messages[1] (user)"]


def test_the_words_before_the_first_question_are_the_first_messages() -> None:
    made = rendered(
        {"tools": [{"name": "read", "description": "Reads a file and gives its text."}], **chat("Hi")},
        ("systemtext", BoundaryKind.MESSAGE, 1),
        ("user:", BoundaryKind.SYSTEM, 1),
        ("", BoundaryKind.TOOLS, 0),
        ("Hi", BoundaryKind.MESSAGE, 2),
    )
    assert [(each.label, each.n_tokens) for each in made.sections] == [("system", 10), ("messages[1] (user)", 7)]


def test_tools_after_the_system_text_are_a_section_of_their_own() -> None:
    tools = '{"name": "read"}'
    made = rendered(
        {"tools": [{"name": "read"}], **chat("Hi")},
        ("systemtext", BoundaryKind.MESSAGE, 1),
        (tools, BoundaryKind.SYSTEM, 1),
        ("", BoundaryKind.TOOLS, 0),
        ("Hi", BoundaryKind.MESSAGE, 2),
    )
    assert [each.label for each in made.sections] == ["system", "tools", "messages[1] (user)"]


def test_a_prompt_without_boundaries_is_one_section() -> None:
    body = {"prompt": "Once"}
    whole = sections(PreparedPrompt((1, 2, 3), (), 3, 0), outline(body))
    assert [(each.label, each.n_tokens) for each in whole] == [("prompt", 3)]


def test_without_boundaries_the_section_is_that_of_the_requests_own_difference() -> None:
    found = compare(
        Prompt(outline(chat("One")), PreparedPrompt((1, 2, 3), (), 3, 0)),
        Prompt(outline(chat("Only")), PreparedPrompt((1, 4, 3), (), 3, 0)),
    )
    assert (found.section, found.in_template) == ("messages[1] (user)", False)


def test_in_characters_an_anthropic_body_has_the_same_sections() -> None:
    body = {"system": "Be brief.", "messages": [{"role": "user", "content": "Hi"}]}
    assert [each.label for each in prompt(body).sections] == ["system", "messages[0] (user)"]


@given(st.text(), st.text(), st.text())
def test_common_characters_are_all_there_are(head: str, one: str, other: str) -> None:
    common = common_characters(head + one, head + other)
    assert common >= len(head)
    assert (head + one)[:common] == (head + other)[:common]
    assert (head + one)[: common + 1] != (head + other)[: common + 1] or common == min(
        map(len, (head + one, head + other))
    )
