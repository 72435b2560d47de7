import os
import socket
import stat
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from kvnet.errors import NodeGoneError, NodeSilentError, NotFoundError, ProtocolViolationError
from kvnet_node import control_client
from kvnet_node.control import (
    CALL_LIMIT_S,
    MAX_SOCKET_PATH_BYTES,
    EventOutbox,
    FrameStream,
    _answer,
    choose_socket_path,
    control_socket,
    send_frame,
    serve_control,
)
from kvnet_node.control_client import Patience, connect_control
from kvnet_node.control_frames import CONTROL_VERSION, MAX_FRAME_BYTES, Call, OnEvent, Reply
from kvnet_node.events import Note, Progress, TextDelta
from kvnet_node.failures import failure_of


class Question(msgspec.Struct):
    text: str


async def echo(name: str, data: bytes, on_event: OnEvent) -> Any:
    on_event(Progress("echo", 1, 2))
    on_event(TextDelta(name))
    return {"echo": msgspec.json.decode(data)}


@asynccontextmanager
async def served(directory: Path, handler: Callable[..., Any]) -> AsyncIterator[Path]:
    async with trio.open_nursery() as nursery, control_socket(directory / "control.sock") as (listener, path):
        nursery.start_soon(serve_control, listener, handler)
        yield path
        nursery.cancel_scope.cancel()


def connected(path: Path) -> socket.socket:
    connection = connect_control(path)
    assert connection is not None
    return connection


async def call_node(connection: socket.socket, operation: str, request: object, on_event: OnEvent) -> bytes:
    """The asker's end blocks, so it has a thread of its own here, as it has a process elsewhere."""
    return await trio.to_thread.run_sync(control_client.call_node, connection, operation, request, on_event)


# --- frames ---


async def test_frames_arrive_whole_however_they_are_cut() -> None:
    near, far = trio.testing.memory_stream_pair()
    frames = FrameStream(far)

    async def send_in_pieces() -> None:
        await send_frame(near, {"a": 1})
        encoded = msgspec.json.encode({"b": 2})
        for byte in struct.pack(">I", len(encoded)) + encoded:
            await near.send_all(bytes([byte]))
        await near.aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_in_pieces)
        assert await frames.receive() == b'{"a":1}'
        assert await frames.receive() == b'{"b":2}'
        assert await frames.receive() is None


async def test_an_end_inside_a_frame_is_an_error_not_a_short_frame() -> None:
    for data in (b"\0\0", struct.pack(">I", 10) + b"123"):
        near, far = trio.testing.memory_stream_pair()
        await near.send_all(data)
        await near.aclose()
        with pytest.raises(ProtocolViolationError, match=r"whole frame|end inside"):
            await FrameStream(far).receive()


async def test_a_huge_length_is_refused_before_anything_is_read() -> None:
    near, far = trio.testing.memory_stream_pair()
    await near.send_all(struct.pack(">I", MAX_FRAME_BYTES + 1))
    with pytest.raises(ProtocolViolationError, match="at most"):
        await FrameStream(far).receive()


# --- events on their way ---


def test_waiting_text_is_joined_and_waiting_progress_replaced() -> None:
    outbox = EventOutbox()
    for event in (
        Progress("prefill", 1), Progress("prefill", 2), TextDelta("a"), TextDelta("b"), Note("n"), TextDelta("c"),
    ):  # fmt: skip
        outbox.put(event)
    assert outbox.take() == [Progress("prefill", 2), TextDelta("ab"), Note("n"), TextDelta("c")]
    assert outbox.take() == []


# --- the socket ---


async def test_the_socket_is_for_its_owner_alone_and_gone_afterwards(tmp_path: Path) -> None:
    async with control_socket(tmp_path / "control.sock") as (_, path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


async def test_a_socket_left_by_a_killed_node_is_replaced(tmp_path: Path) -> None:
    async with served(tmp_path, echo) as path:
        os.link(path, tmp_path / "left")
    (tmp_path / "left").rename(tmp_path / "control.sock")
    async with served(tmp_path, echo) as path:
        assert await call_node(connected(path), "x", Question("y"), lambda _: None) == b'{"echo":{"text":"y"}}'


def test_a_path_over_100_bytes_becomes_a_short_one_in_a_private_directory(tmp_path: Path) -> None:
    long = tmp_path / ("d" * 120) / "control.sock"
    path, directory = choose_socket_path(long)
    try:
        assert directory is not None
        assert len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    finally:
        if directory is not None:
            directory.rmdir()


def test_a_short_path_is_used_as_it_is() -> None:
    assert choose_socket_path(Path("/tmp/x.sock")) == (Path("/tmp/x.sock"), None)


async def test_nobody_listening_is_a_normal_answer(tmp_path: Path) -> None:
    assert connect_control(tmp_path / "none.sock") is None
    async with control_socket(tmp_path / "control.sock") as (_, path):
        path.rename(tmp_path / "stale.sock")
    assert connect_control(tmp_path / "stale.sock") is None


# --- calls ---


async def test_a_call_brings_events_and_then_the_result(tmp_path: Path) -> None:
    events: list[Any] = []
    async with served(tmp_path, echo) as path:
        result = await call_node(connected(path), "list", Question("q"), events.append)
    assert msgspec.json.decode(result) == {"echo": {"text": "q"}}
    assert events == [Progress("echo", 1, 2), TextDelta("list")]


async def test_an_error_arrives_as_the_class_it_was(tmp_path: Path) -> None:
    async def refuse(name: str, data: bytes, on_event: OnEvent) -> Any:
        raise NotFoundError("nobody has it", hint="try later")

    async with served(tmp_path, refuse) as path:
        with pytest.raises(NotFoundError, match="nobody has it") as raised:
            await call_node(connected(path), "fetch", Question("q"), lambda _: None)
    assert raised.value.hint == "try later"


async def test_an_unexpected_error_ends_its_own_call_only(tmp_path: Path) -> None:
    async def break_once(name: str, data: bytes, on_event: OnEvent) -> Any:
        if name == "break":
            raise ZeroDivisionError("oh")
        return {"fine": True}

    async with served(tmp_path, break_once) as path:
        with pytest.raises(Exception, match="ZeroDivisionError"):
            await call_node(connected(path), "break", Question("q"), lambda _: None)
        assert await call_node(connected(path), "ok", Question("q"), lambda _: None) == b'{"fine":true}'


async def test_an_asker_that_goes_away_cancels_its_operation(tmp_path: Path) -> None:
    begun, cancelled = trio.Event(), trio.Event()

    async def wait(name: str, data: bytes, on_event: OnEvent) -> Any:
        begun.set()
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            cancelled.set()
            raise

    async with served(tmp_path, wait) as path:
        async with await trio.open_unix_socket(str(path)) as stream:
            await send_frame(stream, Call(CONTROL_VERSION, "x", "x", msgspec.Raw(b"{}")))
            await begun.wait()
        with trio.fail_after(60):
            await cancelled.wait()


async def test_several_operations_run_at_once(tmp_path: Path) -> None:
    meet = [trio.Event(), trio.Event()]

    async def need_each_other(name: str, data: bytes, on_event: OnEvent) -> Any:
        index = int(name)
        meet[index].set()
        await meet[1 - index].wait()
        return {}

    async with served(tmp_path, need_each_other) as path:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for name in ("0", "1"):
                    nursery.start_soon(call_node, connected(path), name, Question("q"), lambda _: None)


async def test_who_connects_and_says_nothing_keeps_nobody_out(autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        silent, half = [trio.testing.memory_stream_pair() for _ in range(2)]
        await half[0].send_all(b"\0\0\0\x20{")
        for _, far in (silent, half):
            nursery.start_soon(_answer, far, echo)
        for near, _ in (silent, half):
            assert await near.receive_some() == b""
    assert autojump_clock.current_time() >= CALL_LIMIT_S


async def test_a_node_that_ends_early_is_reported(tmp_path: Path) -> None:
    called = trio.Event()

    async def wait(name: str, data: bytes, on_event: OnEvent) -> Any:
        called.set()
        await trio.sleep_forever()

    async with trio.open_nursery() as outer:
        stopped = trio.CancelScope()
        started = trio.Event()

        async def serve() -> None:
            with stopped:
                async with control_socket(tmp_path / "control.sock") as (listener, _):
                    started.set()
                    await serve_control(listener, wait)

        outer.start_soon(serve)
        await started.wait()
        connection = connected(tmp_path / "control.sock")

        async def stop_when_called() -> None:
            await called.wait()
            stopped.cancel()

        outer.start_soon(stop_when_called)
        with pytest.raises(NodeGoneError) as gone:
            await call_node(connection, "add", Question("q"), lambda _: None)
    assert failure_of(gone.value).code == "node_gone"
    assert failure_of(gone.value).exit_code == 70
    assert gone.value.hint == "`kvnet node start`; then the same command goes on from what was kept"


async def test_a_node_that_hangs_is_waited_for_in_words_and_not_for_ever(tmp_path: Path) -> None:
    said: list[str] = []
    patience = Patience(limit_s=0.05, say=said.append, say_after_s=0.01)
    # The system takes the connection and the call; nobody reads either, as in a process that is stopped.
    async with control_socket(tmp_path / "control.sock") as (_, path):
        ask = partial(control_client.call_node, connected(path), "list", {}, lambda _: None, patience, pid=4711)
        with pytest.raises(NodeSilentError, match=r"an answer of the running node \(process 4711\)") as silent:
            await trio.to_thread.run_sync(ask)
    assert said == ["waiting for the answer of the running node (process 4711)"]
    assert "kill -9 4711" in silent.value.hint
    assert "kvnet node start" in silent.value.hint


async def test_another_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    async with served(tmp_path, echo) as path, await trio.open_unix_socket(str(path)) as stream:
        await send_frame(stream, Call(99, "9.9", "list", msgspec.Raw(b"{}")))
        data = await FrameStream(stream).receive()
        assert data is not None
        reply = msgspec.json.decode(data, type=Reply)
        assert reply.error is not None
        assert "99" in reply.error.message
        assert "kvnet node stop" in reply.error.hint


async def test_junk_does_not_disturb_others(tmp_path: Path) -> None:
    async with served(tmp_path, echo) as path:
        for junk in (b"GET / HTTP/1.1\r\n\r\n", struct.pack(">I", 3) + b"abc", b"\xff" * 100, b""):
            async with await trio.open_unix_socket(str(path)) as stream:
                await stream.send_all(junk)
        assert await call_node(connected(path), "x", Question("y"), lambda _: None)


@pytest.mark.parametrize("inside", [b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 50_000 + b"1" + b"}" * 50_000])
async def test_a_request_nested_without_end_is_refused_and_the_node_goes_on(tmp_path: Path, inside: bytes) -> None:
    async with served(tmp_path, echo) as path:
        data = b'{"control_version":1,"kvnet_version":"x","operation":"list","request":' + inside + b"}"
        async with await trio.open_unix_socket(str(path)) as stream:
            await stream.send_all(struct.pack(">I", len(data)) + data)
            answer = await FrameStream(stream).receive()
        assert answer is not None
        assert b"protocol_violation" in answer
        assert await call_node(connected(path), "again", {}, lambda _event: None) == b'{"echo":{}}'


async def test_an_answer_that_cannot_be_written_costs_its_own_connection_only(tmp_path: Path) -> None:
    async def answer(name: str, _data: bytes, on_event: OnEvent) -> Any:
        if name == "bad":
            on_event(Note("a file name that is no UTF-8: \udcff", "warning"))
            await trio.sleep_forever()
        return {}

    async with served(tmp_path, answer) as path:
        with pytest.raises(NodeGoneError):
            await call_node(connected(path), "bad", {}, lambda _event: None)
        assert await call_node(connected(path), "good", {}, lambda _event: None) == b"{}"


@pytest.mark.parametrize(
    "said", [b"", b"\0\0", struct.pack(">I", 9) + b"{}", struct.pack(">I", 3) + b"abc", b"\xff" * 9]
)
async def test_a_node_that_breaks_off_in_the_middle_is_reported(tmp_path: Path, said: bytes) -> None:
    async def answer_badly(stream: trio.SocketStream) -> None:
        async with stream:
            await FrameStream(stream).receive()
            await stream.send_all(said)

    async with control_socket(tmp_path / "control.sock") as (listener, path), trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, answer_badly, [listener])
        with pytest.raises(NodeGoneError) as raised:
            await call_node(connected(path), "x", {}, lambda _event: None)
        assert raised.value.hint
        nursery.cancel_scope.cancel()


async def test_a_failure_to_show_an_event_is_not_taken_for_the_nodes(tmp_path: Path) -> None:
    def show(_event: object) -> None:
        raise BrokenPipeError

    async with served(tmp_path, echo) as path:
        with pytest.raises(BrokenPipeError):
            await call_node(connected(path), "x", {}, show)
