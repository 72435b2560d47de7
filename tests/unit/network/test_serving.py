import logging

import pytest
import trio

from kvnet.errors import NetworkError, ProtocolViolationError
from kvnet.network.interface import ByteStream, StreamHandler, StreamKind
from kvnet.network.memory import World
from kvnet.network.serving import serve_stream
from kvnet.protocol.ids import PeerId


async def _stream(nursery: trio.Nursery) -> ByteStream:
    world = World()
    a, b = world.network("a"), world.network("b")

    async def hold(peer: PeerId, stream: ByteStream) -> None:
        await trio.sleep_forever()

    b.set_handler(StreamKind.CONTROL, hold)
    for node in (a, b):
        await nursery.start(node.run)
    await a.connect(b.address, timeout_s=1)
    return await a.open_stream(b.peer_id, StreamKind.CONTROL)


def _raising(error: BaseException) -> StreamHandler:
    async def handler(peer: PeerId, stream: ByteStream) -> None:
        raise error

    return handler


@pytest.mark.parametrize("error", [ValueError("a bug"), ExceptionGroup("bugs", [ValueError("one"), KeyError("two")])])
async def test_a_bug_is_logged_with_its_traceback_and_goes_nowhere(
    nursery: trio.Nursery, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    stream = await _stream(nursery)
    await serve_stream(_raising(error), stream)
    (record,) = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert record.exc_info is not None
    with pytest.raises(NetworkError):
        await stream.send_all(b"x")


@pytest.mark.parametrize("error", [NetworkError("the peer went away"), ProtocolViolationError("nonsense")])
async def test_a_peer_that_misbehaves_is_no_bug(
    nursery: trio.Nursery, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    stream = await _stream(nursery)
    with caplog.at_level(logging.INFO):
        await serve_stream(_raising(error), stream)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert str(error) in record.getMessage()


async def test_a_cancellation_goes_on_to_the_caller_and_a_failure_beside_it_does_not(
    nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    stream = await _stream(nursery)

    async def handler(peer: PeerId, stream: ByteStream) -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled as cancelled:
            raise BaseExceptionGroup("both", [cancelled, ValueError("a bug on the way out")]) from None

    with trio.move_on_after(0) as scope:
        await serve_stream(handler, stream)
    assert scope.cancelled_caught
    assert any(r.levelno == logging.ERROR for r in caplog.records)
