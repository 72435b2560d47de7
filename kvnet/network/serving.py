"""Running a stream handler so that nothing it does reaches anybody but its own peer."""

import logging

import trio

from kvnet.errors import KvnetError
from kvnet.network.interface import ByteStream, StreamHandler

_logger = logging.getLogger(__name__)


async def serve_stream(handler: StreamHandler, stream: ByteStream) -> None:
    """Run `handler` on a stream a peer opened, then close the stream; reset it when the handler fails.

    A peer that breaks off or breaks the protocol is an ordinary event; anything else is a bug of ours and is logged
    with its traceback. Only a cancellation goes on to the caller.
    """
    try:
        await handler(stream.peer, stream)
    except BaseExceptionGroup as group:
        # A handler with a nursery: its failure and a cancellation from outside can come in one group.
        others, failures = group.split(trio.Cancelled)
        if failures is not None:
            _log(stream, failures)
        await stream.reset()
        if others is not None:
            raise others from None
    except Exception as error:  # noqa: BLE001 — the line that keeps a bug in a handler from ending the node
        _log(stream, error)
        await stream.reset()
    else:
        await stream.aclose()


def _log(stream: ByteStream, error: BaseException) -> None:
    if isinstance(error, KvnetError):
        _logger.info("a stream of %s ended: %s", stream.kind.value, error)
    else:
        _logger.error("handler of %s failed; its stream is reset", stream.kind.value, exc_info=error)
