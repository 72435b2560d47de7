"""Whatever a log holds, looking at it ends in findings and never in a failure."""

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from kvnet_node.prompts import killers
from kvnet_node.prompts.compare import Prompt, compare
from kvnet_node.prompts.normalise import normalise
from kvnet_node.prompts.outline import is_anthropic, outline
from kvnet_node.prompts.reading import is_request
from kvnet_node.prompts.sections import as_characters
from kvnet_node.prompts.variation import another_request

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12)
NAMES = st.sampled_from(
    ["role", "content", "text", "type", "tool_calls", "function", "name", "arguments", "input", "cache_control", "x"]
)
WORDS = st.sampled_from(
    ["system", "user", "assistant", "tool", "text", "tool_use", "x-anthropic-billing-header: cch=1;", "Today is Monday"]
)
VALUES = st.recursive(
    SCALARS | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
BODIES = st.fixed_dictionaries(
    {"messages": st.lists(VALUES | st.dictionaries(NAMES, VALUES, max_size=5), max_size=5)},
    optional={"system": VALUES, "tools": VALUES, "functions": VALUES, "model": VALUES},
) | st.fixed_dictionaries({"prompt": VALUES}, optional={"system": VALUES, "tools": VALUES})


def prompt(body: dict[str, Any]) -> Prompt:
    return Prompt(outline(body), as_characters(outline(body)))


@example({"messages": [None, {}, 0]}, {"messages": [{}, 0]})
@given(BODIES, BODIES)
def test_any_two_bodies_can_be_compared(earlier: dict[str, Any], later: dict[str, Any]) -> None:
    before = json.dumps(earlier)
    first, second = prompt(normalise(earlier).body), prompt(normalise(later).body)
    found = compare(first, second)
    assert 0 <= found.share <= 1
    assert sum(section.n_tokens for section in first.sections) == len(first.prepared.tokens)
    certain = [*killers.between_requests(first.sent, second.sent), *killers.between_prompts(first, second)]
    assert all(each.certain for each in certain)
    killers.in_request(first.sent)
    assert json.dumps(earlier) == before
    assert isinstance(is_anthropic(earlier), bool)
    assert isinstance(is_request(earlier), bool)


@given(BODIES)
def test_any_body_is_the_same_as_itself(body: dict[str, Any]) -> None:
    assert killers.between_requests(outline(body), outline(json.loads(json.dumps(body)))) == []
    assert not compare(prompt(body), prompt(body)).parts


@given(BODIES)
def test_another_request_has_the_same_form(body: dict[str, Any]) -> None:
    other = another_request(body)
    assert other.keys() == body.keys()
    assert [part.label for part in outline(other).parts] == [part.label for part in outline(body).parts]
