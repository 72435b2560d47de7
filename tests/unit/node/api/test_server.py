"""Connections to the endpoint: how many there are, and what becomes of those that nobody uses."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from kvnet_node.api.server import HttpServer

pytestmark = pytest.mark.loopback

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Answers:
    """Answers requests when they have come whole; those to ``/wait`` once it is told to."""

    def __init__(self) -> None:
        self.go = trio.Event()
        self.waiting = trio.Event()
        self.reading = trio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["method"] == "POST":
            while (await receive()).get("more_body", False):
                self.reading.set()
        if scope["path"] == "/wait":
            self.waiting.set()
            await self.go.wait()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@asynccontextmanager
async def serving(app: Answers, *, max_connections: int, max_coming_bytes: int = 10_000) -> AsyncIterator[int]:
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    async with trio.open_nursery() as nursery:
        server = HttpServer(
            app, [listening], max_connections=max_connections, spared_s=0, max_coming_bytes=max_coming_bytes
        )
        await nursery.start(server.run)
        yield listening.getsockname()[1]
        nursery.cancel_scope.cancel()


async def answer_of(stream: trio.SocketStream, request: bytes = GET) -> bytes:
    with trio.fail_after(60):
        await stream.send_all(request)
        return bytes(await stream.receive_some())


async def test_a_connection_that_its_client_closed_gives_its_place_back() -> None:
    async with serving(Answers(), max_connections=1) as port:
        for _ in range(20):
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                assert (await answer_of(stream)).startswith(b"HTTP/1.1 204")
                await stream.send_eof()
                with trio.fail_after(60):
                    # The node closes its end at once, and not when the connection would have been idle for too long.
                    assert await stream.receive_some() == b""


async def test_the_longest_idle_connection_gives_way_to_a_new_one() -> None:
    async with serving(Answers(), max_connections=2) as port:
        first, second, third = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(3)]
        assert (await answer_of(third)).startswith(b"HTTP/1.1 204")
        with trio.fail_after(60):
            assert await first.receive_some() == b""
        assert (await answer_of(second)).startswith(b"HTTP/1.1 204")
        for stream in (first, second, third):
            await stream.aclose()


async def test_a_connection_with_a_request_does_not_give_way() -> None:
    app = Answers()
    async with serving(app, max_connections=1) as port:
        busy = await trio.open_tcp_stream("127.0.0.1", port)
        await busy.send_all(GET.replace(b"/ ", b"/wait "))
        with trio.fail_after(60):
            await app.waiting.wait()
            async with await trio.open_tcp_stream("127.0.0.1", port) as refused:
                assert await refused.receive_some() == b""
            app.go.set()
            assert (await busy.receive_some()).startswith(b"HTTP/1.1 204")
        await busy.aclose()


BODY = b"POST /read HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"


async def test_requests_that_do_not_come_whole_keep_nobody_out() -> None:
    app = Answers()
    async with serving(app, max_connections=2) as port:
        slow, busy = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(2)]
        await busy.send_all(BODY.replace(b"/read", b"/wait") + b"x" * 1000)
        await app.waiting.wait()
        await slow.send_all(BODY + b"x")
        await app.reading.wait()
        async with await trio.open_tcp_stream("127.0.0.1", port) as third:
            assert (await answer_of(third)).startswith(b"HTTP/1.1 204")
        with trio.fail_after(60):
            assert await slow.receive_some() == b""
        app.go.set()
        assert (await busy.receive_some()).startswith(b"HTTP/1.1 204")
        for stream in (slow, busy):
            await stream.aclose()


async def test_a_connection_between_two_requests_goes_before_one_that_sends_a_request() -> None:
    app = Answers()
    async with serving(app, max_connections=2) as port:
        slow, idle = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(2)]
        await slow.send_all(BODY + b"x")
        await app.reading.wait()
        assert (await answer_of(idle)).startswith(b"HTTP/1.1 204")
        await trio.testing.wait_all_tasks_blocked()
        async with await trio.open_tcp_stream("127.0.0.1", port) as third:
            assert (await answer_of(third)).startswith(b"HTTP/1.1 204")
        with trio.fail_after(60):
            assert await idle.receive_some() == b""
        assert (await answer_of(slow, b"x" * 999)).startswith(b"HTTP/1.1 204")
        for stream in (slow, idle):
            await stream.aclose()


async def test_of_bodies_that_are_still_coming_no_more_is_held_than_there_is_room_for() -> None:
    app = Answers()
    async with serving(app, max_connections=4, max_coming_bytes=1500) as port:
        first, second = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(2)]
        await first.send_all(BODY + b"x" * 900)
        await app.reading.wait()
        await second.send_all(BODY + b"x" * 900)
        with trio.fail_after(60):
            assert await first.receive_some() == b""
        assert (await answer_of(second, b"x" * 100)).startswith(b"HTTP/1.1 204")
        assert (await answer_of(second, BODY + b"x" * 1000)).startswith(b"HTTP/1.1 204")
        for stream in (first, second):
            await stream.aclose()
