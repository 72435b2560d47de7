"""One engine process: started, listened to, explained when it ends.

Calls and events travel as frames over a socket pair whose other end the child inherits; there is no path on disk that
somebody else could open. The child ends when its end of the pair closes, so it never outlives the node.
"""

import math
import os
import signal
import site
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import DEVNULL, PIPE

import trio

import kvnet
from kvnet.engine.interface import ModelInfo
from kvnet.engine.wire import FINAL_EVENTS, CancelCall, FailedEvent, FrameBuffer, ReadyEvent, Record, encode_frame
from kvnet.engine.wire_values import model_info, raised_error
from kvnet.errors import EngineCrashedError, EngineError, KvnetError

READ_BYTES = 1 << 18
"""Socket reads."""

STDERR_TAIL_BYTES = 4096
"""How much of a child's last words is kept to explain its end."""

GRACE_S = 5.0
"""How long a child may take to end once its socket is closed; then it is killed."""


class EngineChild:
    """One engine process and the requests running in it."""

    def __init__(self, process: trio.Process, stream: trio.SocketStream) -> None:
        self.process = process
        self.ready = trio.Event()
        self.ended = trio.Event()
        self.info: ModelInfo | None = None
        self.failure: KvnetError | None = None
        self._stream = stream
        self._pending: dict[int, trio.MemorySendChannel[Record]] = {}
        # Bounded by the requests that run: each puts one call and at most one cancellation.
        self._outbox, self._to_send = trio.open_memory_channel[bytes](math.inf)
        self._last_words = bytearray()

    @contextmanager
    def request(self, call: Record) -> Iterator[trio.MemoryReceiveChannel[Record]]:
        """Sends a call; gives the channel its events arrive in. Leaving early cancels the request."""
        # Bounded by the request itself: its steps, its tokens and one answer.
        inbox, events = trio.open_memory_channel[Record](math.inf)
        frame = encode_frame(call)
        self._pending[call.id] = inbox
        if self.ended.is_set():
            inbox.close()
        else:
            self._outbox.send_nowait(frame)
        try:
            yield events
        finally:
            # A request that got its answer is not pending any more.
            if self._pending.pop(call.id, None) is not None and not self.ended.is_set():
                self._outbox.send_nowait(encode_frame(CancelCall(call.id)))
            inbox.close()
            events.close()

    async def read(self) -> None:
        """Delivers events until the process ends, then fails what still runs."""
        frames = FrameBuffer()
        try:
            while data := await self._stream.receive_some(READ_BYTES):
                for record in frames.feed(data):
                    self._deliver(record)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        except KvnetError as error:
            self.failure = EngineError(f"the engine process speaks another language: {error.message}")
        finally:
            await self._end()

    def _deliver(self, record: Record) -> None:
        if isinstance(record, ReadyEvent):
            self.info = model_info(record)
            self.ready.set()
        elif record.id == 0 and isinstance(record, FailedEvent):
            self.failure = raised_error(record)
            self.ready.set()
        elif inbox := self._pending.get(record.id):
            inbox.send_nowait(record)
            if isinstance(record, FINAL_EVENTS):
                self._pending.pop(record.id).close()

    async def _end(self) -> None:
        with trio.CancelScope(deadline=trio.current_time() + GRACE_S, shield=True):
            await self._stream.aclose()
            await self.process.wait()
        if self.process.returncode is None:
            self.process.kill()
            with trio.CancelScope(shield=True):
                await self.process.wait()
        self.ended.set()
        self.ready.set()
        self._outbox.close()
        # Closed without an answer: the request sees the end of its events.
        for inbox in self._pending.values():
            inbox.close()
        self._pending.clear()

    async def write(self) -> None:
        """Sends frames until the process ends."""
        async for frame in self._to_send:
            try:
                await self._stream.send_all(frame)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return

    async def listen(self) -> None:
        """Keeps the end of what the process says on stderr."""
        assert self.process.stderr is not None  # noqa: S101 - the process was started with a pipe
        async for data in self.process.stderr:
            self._last_words += data
            del self._last_words[:-STDERR_TAIL_BYTES]

    def crash(self) -> KvnetError:
        """Why requests of this process failed."""
        if self.failure is not None:
            return self.failure
        status = self.process.returncode
        how = f"status {status}" if status is None or status >= 0 else f"signal {signal.Signals(-status).name}"
        lines = self._last_words.decode("utf-8", "replace").strip().splitlines()
        said = f"; it said last: {lines[-1][:200]}" if lines else ""
        return EngineCrashedError(f"the engine process ended ({how}){said}", hint="ask again: it is started anew")

    async def close(self) -> None:
        """Ends the process by closing its socket; kills it if it does not go."""
        await self._stream.aclose()
        await self.ended.wait()


def _python_path(package_root: str) -> dict[str, str]:
    """Lets the child import the same kvnet from a checkout; an installed one it finds by itself."""
    if package_root in site.getsitepackages():
        return {}
    paths = [package_root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {"PYTHONPATH": os.pathsep.join(paths)}


async def start_child(model_path: Path, work_dir: Path, options: Sequence[str]) -> EngineChild:
    """Starts an engine process; its `read`, `write` and `listen` are for the caller to run.

    Raises:
        EngineError: the system starts no process.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    command = [sys.executable, "-P", "-m", "kvnet.engine.mlx.process", "--fd", str(theirs.fileno())]
    try:
        process = await trio.lowlevel.open_process(
            [*command, "--model", str(model_path), *options],
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=PIPE,
            pass_fds=[theirs.fileno()],
            env=_environment(work_dir),
        )
    except OSError as error:
        ours.close()
        raise EngineError(f"could not start the engine process: {error.strerror}") from error
    finally:
        theirs.close()
    return EngineChild(process, trio.SocketStream(trio.socket.from_stdlib_socket(ours)))


def _environment(work_dir: Path) -> dict[str, str]:
    return {
        **os.environ,
        **_python_path(str(Path(kvnet.__file__).parent.parent)),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work_dir / "hub"),
    }
