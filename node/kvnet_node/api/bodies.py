"""Request bodies: bounded in length, time and depth before their meaning is read."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import msgspec
import trio

from kvnet_node.api.failures import invalid, refused

MAX_DEPTH = 64
"""Nesting of lists and objects. Schemas of tools stay below 20; each level costs every later reader stack."""

FIRST_BYTE_S = 20.0
"""A client that sends nothing for this long has gone away."""
TOTAL_S = 120.0
"""A whole body takes no longer: 64 MiB at half a megabyte a second."""

JsonObject = dict[str, Any]
"""A JSON object as it was parsed, or ready to be written."""

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class ClientGoneError(Exception):
    """The client closed the connection before its request was answered."""


async def read_body(receive: Receive, headers: Mapping[str, str], *, max_bytes: int) -> bytes:
    """The whole body of a request.

    Args:
        receive: of the ASGI request.
        headers: of the request, with lower-case names.
        max_bytes: the most that is taken in, however it is sent.

    Raises:
        ApiError: 413 when it is longer, by its own word or in fact; 408 when it comes too slowly.
        ClientGoneError: it never came whole.
    """
    declared = headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared) > max_bytes:
        raise _too_long(max_bytes, f"{int(declared):,}")
    parts: list[bytes] = []
    total = 0
    with trio.move_on_after(TOTAL_S) as whole:
        more = True
        while more:
            with trio.move_on_after(FIRST_BYTE_S) as scope:
                message = await receive()
            if scope.cancelled_caught:
                raise _too_slow()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            part = message.get("body", b"")
            total += len(part)
            if total > max_bytes:
                raise _too_long(max_bytes, "more")
            parts.append(part)
            more = message.get("more_body", False)
    if whole.cancelled_caught:
        raise _too_slow()
    return b"".join(parts)


def _too_long(max_bytes: int, found: str) -> Exception:
    return refused(
        413,
        f"expected a request of at most {max_bytes:,} bytes, found {found} (api.max_body_bytes)",
        code="request_too_large",
    )


def _too_slow() -> Exception:
    return refused(408, "expected the request to arrive within its time, found a pause", code="request_timeout")


def parse_object(data: bytes) -> JsonObject:
    """The JSON object a body holds.

    Raises:
        ApiError: 400: no JSON, no object, or nested deeper than ``MAX_DEPTH``.
    """
    try:
        value = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise invalid(f"expected JSON, found something else: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise _too_deep() from error
    except UnicodeDecodeError as error:
        raise invalid("expected JSON in UTF-8, found other bytes", code="invalid_json") from error
    if not isinstance(value, dict):
        raise invalid(f"expected a JSON object, found {type(value).__name__}", code="invalid_json")
    _check_depth(value)
    return value


def _check_depth(value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for container in level:
            children = container.values() if isinstance(container, dict) else container
            inner += [child for child in children if isinstance(child, dict | list)]
        if not inner:
            return
        level = inner
    raise _too_deep()


def _too_deep() -> Exception:
    return invalid(f"expected JSON nested at most {MAX_DEPTH} levels, found more", code="invalid_json")


def encode_object(body: Mapping[str, Any]) -> bytes:
    """A body as the JSON that the engine is given."""
    return msgspec.json.encode(body)
