"""One peer, one control session: drives the protocol's session machine over a stream."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from kvnet.errors import (
    KvnetError,
    PeerRefusedError,
    PeerUnreachableError,
    ProtocolViolationError,
    UsageError,
)
from kvnet.network.interface import ByteStream
from kvnet.network.news import News
from kvnet.protocol.handshake import SessionOpened
from kvnet.protocol.ids import PeerId
from kvnet.protocol.membership import Occasion
from kvnet.protocol.messages.control import Reply, Request
from kvnet.protocol.messages.refusals import Refused
from kvnet.protocol.session import (
    ControlSession,
    Event,
    ReplyReceived,
    RequestReceived,
    RequestTimedOut,
    SessionExpired,
)
from kvnet.trust.namespace import PUBLIC, Namespace

if TYPE_CHECKING:
    from trio_typing import TaskStatus

READ_SIZE_BYTES = 64 * 1024

Answer = Callable[["PeerSession", Request], Reply | None]
"""Decides the reply to a peer's request; fast, and never raises. None: it comes later, by `PeerSession.reply`."""

Answered = Callable[[PeerId, float], None]
"""Told that a peer answered a request after so many seconds."""


@dataclass(slots=True)
class _Pending:
    done: trio.Event
    reply: Reply | None = None


class PeerSession:
    """The control session with one peer.

    Args:
        stream: the control stream, fresh.
        machine: the session machine for it; its clock is ``trio.current_time``.
        namespaces: those the machine was given, in the same order.
        answer: decides replies.
        answered: told how many seconds the peer took to answer a request.
    """

    def __init__(
        self,
        stream: ByteStream,
        machine: ControlSession,
        namespaces: tuple[Namespace, ...],
        answer: Answer,
        answered: Answered = lambda _peer, _seconds: None,
    ) -> None:
        self._stream = stream
        self._machine = machine
        self._namespaces = namespaces
        self._answer = answer
        self._answered = answered
        self._pending: dict[int, _Pending] = {}
        self._sending = trio.Lock()
        self._changed = News()
        self._wanted = trio.Event()
        self.closed = trio.Event()
        self.failure = ""

    @property
    def peer(self) -> PeerId:
        """The peer, as the transport has authenticated it."""
        return self._stream.peer

    @property
    def opened(self) -> SessionOpened:
        """The result of the handshake.

        Raises:
            PeerUnreachableError: it is not done.
        """
        if self._machine.opened is None:
            raise PeerUnreachableError("expected an open control session, found one that is not open yet")
        return self._machine.opened

    @property
    def slots(self) -> dict[Namespace, int]:
        """Namespaces that both sides have proved, each with its slot in this session; no former ones."""
        proved = {self._namespaces[index]: slot for slot, index in self.opened.slots.items()}
        return {namespace: slot for namespace, slot in proved.items() if not namespace.former}

    @property
    def occasion(self) -> Occasion:
        """What binds proofs to this session, seen from this side.

        Raises:
            PeerUnreachableError: the handshake is not done.
        """
        if self._machine.occasion is None:
            raise PeerUnreachableError("expected an open control session, found one that is not open yet")
        return self._machine.occasion

    def reply(self, reply: Reply) -> None:
        """Answer a request whose `Answer` was None; nothing when the session has ended meanwhile."""
        if not self.closed.is_set():
            self._machine.reply(reply)
            self._wanted.set()

    @property
    def member_slots(self) -> list[int]:
        """Slots of the proved namespaces that have members, which is all but the public one; no former ones."""
        return [slot for namespace, slot in self.slots.items() if namespace.id != PUBLIC.id]

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Hold the session until the peer goes or breaks the protocol; ``started`` when the handshake is done.

        Returns without error when the session ends after the handshake; why it ended is in ``failure``.

        Raises:
            NetworkError: the stream broke, or time ran out, before the handshake was done.
            MalformedError: the peer broke the protocol before the handshake was done.
        """
        ready = False

        def on_open() -> None:
            nonlocal ready
            ready = True
            task_status.started()

        try:
            await self._hold(on_open)
        except KvnetError as error:
            self.failure = str(error)
            if not ready:
                raise
        finally:
            self._end()
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
                await self._stream.reset()
        if not ready:
            raise PeerUnreachableError(
                f"expected a handshake, found a peer that ended it ({self.failure or 'the stream ended'})",
                hint="it may run another version of kvnet",
            )

    async def _hold(self, on_open: Callable[[], None]) -> None:
        failure: KvnetError | None = None
        async with trio.open_nursery() as nursery:

            async def guarded(work: Callable[[], object]) -> None:
                nonlocal failure
                try:
                    await work()  # type: ignore[misc]
                except KvnetError as error:
                    failure = failure or error
                nursery.cancel_scope.cancel()

            nursery.start_soon(guarded, lambda: self._read(on_open))
            nursery.start_soon(guarded, self._watch_time)
            nursery.start_soon(guarded, self._send_wanted)
            nursery.start_soon(guarded, self.closed.wait)
        if failure is not None:
            raise failure

    async def _read(self, on_open: Callable[[], None]) -> None:
        await self._flush()
        while not self._machine.closed:
            data = await self._stream.receive_some(READ_SIZE_BYTES)
            if not data:
                self._machine.receive_end()
                return
            events = self._machine.receive(data, trio.current_time())
            for event in events:
                if isinstance(event, SessionOpened):
                    on_open()
                self._handle(event)
            await self._flush()

    async def _watch_time(self) -> None:
        while not self._machine.closed:
            deadline = self._machine.next_deadline()
            if deadline is None:
                return
            with trio.move_on_at(deadline) as scope:
                await self._changed.wait()
            if not scope.cancelled_caught:
                continue
            for event in self._machine.on_time(trio.current_time()):
                self._handle(event)
            await self._flush()

    def _handle(self, event: Event) -> None:
        match event:
            case RequestReceived(request):
                reply = self._answer(self, request)
                if reply is not None:
                    self._machine.reply(reply)
            case ReplyReceived(request, reply):
                self._settle(request.request_id, reply)
            case RequestTimedOut(request):
                self._settle(request.request_id, None)
            case SessionExpired(reason):
                raise PeerUnreachableError(f"expected the peer to answer, found silence ({reason})")
            case SessionOpened():
                pass

    async def _send_wanted(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            await self._flush()

    def _settle(self, request_id: int, reply: Reply | None) -> None:
        pending = self._pending.pop(request_id, None)
        if pending is not None:
            pending.reply = reply
            pending.done.set()

    async def _flush(self) -> None:
        """Send what the machine has written, in order, and let the clock watcher see new deadlines."""
        self._changed.tell()
        async with self._sending:
            data = self._machine.take_output()
            if data:
                # A cancelled write would cost the stream, and with it the session.
                with trio.CancelScope(shield=True):
                    await self._stream.send_all(data)

    async def ask(self, request: Request) -> Reply:
        """Send a request and wait for its reply, as long as the machine allows.

        Raises:
            PeerRefusedError: the peer refuses; ``reason`` is its code.
            PeerUnreachableError: no answer in time, or the session ended.
        """
        if self.closed.is_set():
            raise PeerUnreachableError("expected an open control session, found one that has ended")
        asked_s = trio.current_time()
        try:
            request_id = self._machine.request(request, asked_s)
        except UsageError as error:
            # Nobody has used anything wrongly: the peer leaves too many requests open, or the session ends right now.
            raise PeerUnreachableError(str(error)) from error
        pending = self._pending[request_id] = _Pending(trio.Event())
        # Sent by the session's own task: a peer that takes no bytes holds up that, and not whoever asks.
        self._wanted.set()
        try:
            await pending.done.wait()
        finally:
            self._pending.pop(request_id, None)
        if pending.reply is None:
            raise PeerUnreachableError("expected an answer to a request, found none in time")
        self._answered(self.peer, trio.current_time() - asked_s)
        if isinstance(pending.reply, Refused):
            raise PeerRefusedError(
                f"the peer refuses: {pending.reply.reason}",
                reason=pending.reply.reason,
                hint="it does not have it, or shares no namespace with this node",
            )
        return pending.reply

    def _end(self) -> None:
        self.closed.set()
        for request_id in list(self._pending):
            self._settle(request_id, None)

    def close(self) -> None:
        """Give the session up; ``run`` ends soon after."""
        self._end()


def expect(reply: Reply, kind: type[Reply]) -> None:
    """The machine lets only fitting replies through; this says so to the reader.

    Raises:
        ProtocolViolationError: a reply of another kind.
    """
    if not isinstance(reply, kind):
        raise ProtocolViolationError(f"expected a {kind.__name__}, found a {type(reply).__name__}")
