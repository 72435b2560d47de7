"""One request over HTTP: read, run, written as it comes; given up as soon as the client has gone.

What the two styles of client have in common is here. A :class:`Style` reads bodies and words failures, its
:class:`Renderer` turns the engine's OpenAI-style answer into what the client reads.
"""

import contextlib
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import aclosing
from typing import Any, Protocol

import structlog
import trio
from starlette.datastructures import Headers

from kvnet.errors import KvnetError
from kvnet.exchange.answers import Body, Finished, Started
from kvnet_node.api.bodies import ClientGoneError, Receive, parse_object, read_body
from kvnet_node.api.failures import ApiError, ApiFailure, failure_in, failure_of
from kvnet_node.api.front import Front, Incoming
from kvnet_node.api.headers import reuse_headers
from kvnet_node.api.requests_log import LoggedRequest
from kvnet_node.failures import leaf_of

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Events = AsyncGenerator[Started | Body | Finished, None]

LINGER_S = 5.0
"""How long a refused client may go on sending, so that it reads the refusal instead of a broken connection."""

JSON = "application/json"
EVENT_STREAM = "text/event-stream"

_log = structlog.get_logger(__name__)


class Renderer(Protocol):
    """Turns one answer into what the client reads."""

    def start(self, started: Started) -> bytes:
        """What a stream begins with."""
        ...

    def feed(self, data: bytes) -> bytes:
        """What a piece of the engine's stream amounts to; b"" when nothing is whole yet."""
        ...

    def end(self) -> bytes:
        """What a stream ends with, after its last piece."""
        ...

    def fail(self, failure: ApiFailure) -> bytes:
        """What a stream ends with that has begun and cannot go on."""
        ...

    def whole(self, body: bytes) -> bytes:
        """The body of an answer that is not streamed."""
        ...


class Style(Protocol):
    """What one kind of client sends and expects."""

    def read(self, path: str, body: dict[str, Any], headers: Mapping[str, str]) -> tuple[Incoming, Renderer]:
        """A request to run, and how its answer is written.

        Raises:
            ApiError: the body is at fault.
        """
        ...

    def failure(self, failure: ApiFailure, request_id: str) -> bytes:
        """The JSON body that tells of a failure; ``request_id`` may be ""."""
        ...


class Writer:
    """Writes one response; knows whether it has begun, and whether its last piece is on its way."""

    def __init__(self, send: Send, request_id: str = "") -> None:
        self._send = send
        self.begun = False
        self.ending = False
        self.request_id = request_id

    async def whole(self, status: int, body: bytes, headers: Mapping[str, str], content_type: str = JSON) -> None:
        """A whole response."""
        sized = {"content-type": content_type, "content-length": str(len(body)), **headers}
        await self.start(status, sized)
        await self.end(body)

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """The head of a response whose body follows."""
        self.begun = True
        request = {"x-kvnet-request": self.request_id} if self.request_id else {}
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in {**request, **headers}.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def part(self, data: bytes) -> None:
        """A piece of the body."""
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """The last piece of the body."""
        self.ending = True
        await self._send({"type": "http.response.body", "body": data, "more_body": False})


class Answering:
    """An ASGI application for one path of one style.

    Args:
        front: runs the request.
        style: of the client.
        max_body_bytes: the longest body.
        run: writes the answer; by default a completion.
    """

    def __init__(
        self,
        front: Front,
        style: Style,
        *,
        max_body_bytes: int,
        run: Callable[[Front, Incoming, LoggedRequest, Renderer, Writer], Awaitable[None]] | None = None,
    ) -> None:
        self._front = front
        self._style = style
        self._max_body_bytes = max_body_bytes
        self._run = run or write_completion

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; nothing but a cancellation comes out."""
        headers = Headers(scope=scope)
        try:
            data = await read_body(receive, headers, max_bytes=self._max_body_bytes)
        except ClientGoneError:
            return
        except KvnetError as error:
            failure = failure_of(error)
            await refuse(failure.status, self._style.failure(failure, ""), failure.headers, receive, send)
            return
        writer = Writer(send)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_when_gone, receive, writer, nursery.cancel_scope)
            await self._respond(scope["path"], data, headers, writer)
            nursery.cancel_scope.cancel()

    async def _respond(self, path: str, data: bytes, headers: Mapping[str, str], writer: Writer) -> None:
        renderer: Renderer | None = None
        try:
            body = parse_object(data)
            with self._front.request(path, body, headers) as request:
                writer.request_id = request.id
                incoming, renderer = self._style.read(path, body, headers)
                await self._run(self._front, incoming, request, renderer, writer)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong is this client's, not the node's
            failure = failure_of(error)
            if not isinstance(leaf := leaf_of(error), KvnetError):
                # Without its message, which may quote the request.
                where = "".join(traceback.format_tb(leaf.__traceback__))
                _log.error("request failed", path=path, error=type(leaf).__name__, where=where)
            if writer.begun:
                await writer.end(renderer.fail(failure) if renderer is not None else b"")
            else:
                await writer.whole(failure.status, self._style.failure(failure, writer.request_id), failure.headers)


async def write_completion(
    front: Front, incoming: Incoming, request: LoggedRequest, renderer: Renderer, writer: Writer
) -> None:
    """Run a completion and write its answer, streamed or whole as the engine says."""
    async with aclosing(front.answer(incoming, request)) as events:
        started = await anext(events)
        if not isinstance(started, Started):
            raise TypeError(f"a completion began with {type(started).__name__}")
        headers = reuse_headers(request.id, request.answered_by, started.reuse, request.removed)
        if started.status < 400 and started.content_type.startswith(EVENT_STREAM):
            await _write_stream(events, started, renderer, writer, headers)
        else:
            await _write_whole(events, started, renderer, writer, headers)


async def _write_stream(
    events: Events, started: Started, renderer: Renderer, writer: Writer, headers: Mapping[str, str]
) -> None:
    # The head goes out with the first piece: an engine that fails before it still gets a status of its own.
    async for event in events:
        if isinstance(event, Body):
            if not writer.begun:
                stream = {"content-type": EVENT_STREAM, "cache-control": "no-cache", "x-accel-buffering": "no"}
                await writer.start(started.status, {**stream, **headers})
                await writer.part(renderer.start(started))
            await writer.part(renderer.feed(event.data))
    await writer.end(renderer.end())


async def _write_whole(
    events: Events, started: Started, renderer: Renderer, writer: Writer, headers: Mapping[str, str]
) -> None:
    body = b"".join([event.data async for event in events if isinstance(event, Body)])
    if started.status >= 400:
        raise ApiError(failure_in(started.status, body))
    await writer.whole(started.status, renderer.whole(body), headers)


async def _cancel_when_gone(receive: Receive, writer: Writer, scope: trio.CancelScope) -> None:
    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        while (await receive())["type"] != "http.disconnect":
            pass
    if not writer.ending:
        # Of an answered request the server says the same, while it closes a connection that is to be closed.
        scope.cancel()


async def refuse(status: int, body: bytes, headers: Mapping[str, str], receive: Receive, send: Send) -> None:
    """Answer without having read the whole request.

    What the client still sends is thrown away for a while: a connection that is closed under it would take the answer
    with it.
    """
    writer = Writer(send)
    read = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_throw_away, receive, read)
        sized = {"content-type": JSON, "content-length": str(len(body)), "connection": "close"}
        await writer.start(status, {**sized, **headers})
        await writer.part(body)
        with trio.move_on_after(LINGER_S):
            await read.wait()
        await writer.end()
        nursery.cancel_scope.deadline = trio.current_time() + LINGER_S


async def _throw_away(receive: Receive, read: trio.Event) -> None:
    # Goes on after the answer, until the server says that the connection is closed: it may wait for room to say so.
    more = True
    while more:
        message = await receive()
        more = message["type"] != "http.disconnect" and message.get("more_body", False)
    read.set()
