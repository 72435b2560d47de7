"""Request bodies: bounded in length, time and depth."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from kvnet_node.api.bodies import MAX_DEPTH, ClientGoneError, parse_object, read_body
from kvnet_node.api.failures import ApiError

Message = MutableMapping[str, Any]


def sending(*parts: bytes, pause_s: float = 0.0, gone: bool = False) -> Callable[[], Awaitable[Message]]:
    """A ``receive`` that gives these parts, and then goes or ends."""
    messages: list[Message] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if gone:
        messages.append({"type": "http.disconnect"})
    elif messages:
        messages[-1]["more_body"] = False

    async def receive() -> Message:
        await trio.sleep(pause_s)
        if not messages:
            await trio.sleep_forever()
        return messages.pop(0)

    return receive


async def test_a_body_in_parts_is_read_whole() -> None:
    assert await read_body(sending(b"ab", b"", b"c"), {}, max_bytes=3) == b"abc"


async def test_a_body_over_the_limit_is_refused_by_its_own_word_and_in_fact() -> None:
    with pytest.raises(ApiError) as declared:
        await read_body(sending(gone=True), {"content-length": "4"}, max_bytes=3)
    with pytest.raises(ApiError) as sent:
        await read_body(sending(b"ab", b"cd", b"never read"), {}, max_bytes=3)
    assert {declared.value.failure.status, sent.value.failure.status} == {413}


async def test_a_client_that_leaves_in_the_middle_is_told_nothing() -> None:
    with pytest.raises(ClientGoneError):
        await read_body(sending(b"ab", gone=True), {}, max_bytes=3)


@pytest.mark.parametrize(("parts", "pause_s"), [((b"a", b"b"), 21.0), ((b"a",) * 20, 19.0)])
async def test_a_body_that_comes_too_slowly_is_given_up(
    autojump_clock: MockClock, parts: tuple[bytes, ...], pause_s: float
) -> None:
    with pytest.raises(ApiError) as raised:
        await read_body(sending(*parts, pause_s=pause_s), {}, max_bytes=100)
    assert raised.value.failure.status == 408
    assert trio.current_time() <= 121


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b'"text"', b"null", b"\xff\xfe", b'{"a": NaN}', b'{"a": "\xff"}', b"{} {}",
     b"[" * 200_000, b'{"a":' * 300 + b"1" + b"}" * 300],
)  # fmt: skip
def test_what_is_no_bounded_json_object_is_a_400(data: bytes) -> None:
    with pytest.raises(ApiError) as raised:
        parse_object(data)
    assert (raised.value.failure.status, raised.value.failure.code) == (400, "invalid_json")


def test_nesting_is_allowed_up_to_its_limit() -> None:
    def nested(levels: int) -> bytes:
        return b'{"a":' * (levels - 1) + b"{}" + b"}" * (levels - 1)

    assert parse_object(nested(MAX_DEPTH))
    with pytest.raises(ApiError, match=str(MAX_DEPTH)):
        parse_object(nested(MAX_DEPTH + 1))
