"""A named context in front of a request."""

from typing import Any

import pytest

from kvnet.exchange.contexts import NamedContext, document_context
from kvnet_node.api.failures import ApiError
from kvnet_node.api.merging import with_context

RULES = document_context("rules", {})
QUESTION = {"role": "user", "content": "q"}


def test_the_contexts_messages_come_first_and_the_body_stays_as_it_was() -> None:
    body: dict[str, Any] = {"messages": [QUESTION], "seed": 1}
    merged = with_context(body, RULES)
    assert merged.body == {"messages": [{"role": "system", "content": "rules"}, QUESTION], "seed": 1}
    assert body == {"messages": [QUESTION], "seed": 1}
    assert [merged.mark(n) for n in (1,)] == [2]


@pytest.mark.parametrize("content", ["be brief", [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]])
def test_system_text_of_the_request_follows_the_contexts_own(content: Any) -> None:
    merged = with_context({"messages": [{"role": "developer", "content": content}, QUESTION]}, RULES)
    assert merged.body["messages"] == [{"role": "system", "content": "rules\n\nbe brief"}, QUESTION]
    assert [merged.mark(n) for n in (1, 2)] == [1, 2]


def test_a_context_without_system_message_gets_that_of_the_request_first() -> None:
    context = NamedContext(({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}), {})
    merged = with_context({"messages": [{"role": "system", "content": "s"}, QUESTION]}, context)
    assert [message["role"] for message in merged.body["messages"]] == ["system", "user", "assistant", "user"]
    assert [merged.mark(n) for n in (1, 2)] == [3, 4]


@pytest.mark.parametrize(
    "messages",
    [None, "text", [{"role": "system", "content": [{"type": "image_url"}]}], [{"role": "system", "content": 3}]],
)
def test_what_cannot_be_merged_is_a_400(messages: Any) -> None:
    with pytest.raises(ApiError) as raised:
        with_context({"messages": messages}, RULES)
    assert (raised.value.failure.status, raised.value.failure.param) == (400, "messages")
