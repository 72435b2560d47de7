"""The control session: handshake, then requests and replies in both directions. One machine per control stream.

Either side may send requests once the handshake is done (`kvnet.protocol.handshake`). The machine reads no clock and
draws no random numbers: `now` and the random bytes are arguments. It writes into a buffer that its driver takes and
sends.

A driver does this: create the session; send `take_output()`; for every piece received call `receive`, handle the
events, answer requests with `reply`, and send `take_output()` again; call `on_time` when `next_deadline()` has come.
Any error from `receive` means: drop the stream.
"""

from dataclasses import dataclass

import msgspec

from kvnet.errors import ProtocolViolationError, UsageError
from kvnet.protocol.framing import FrameReader, encode_frame
from kvnet.protocol.handshake import Handshake, SessionConfig, SessionOpened
from kvnet.protocol.membership import Occasion
from kvnet.protocol.messages.artifacts import (
    ChunkListReply,
    GetChunkList,
    GetHave,
    GetManifest,
    Have,
    Lookup,
    LookupReply,
    ManifestReply,
)
from kvnet.protocol.messages.base import encode_message
from kvnet.protocol.messages.bulk import BulkDialled, BulkOffer, DialBulk, OpenBulk
from kvnet.protocol.messages.control import ArtifactRequest, MemberRequest, Message, Reply, Request, decode_message
from kvnet.protocol.messages.enrolment import Enrol, Enrolled
from kvnet.protocol.messages.liveness import Ping, Pong, Presence
from kvnet.protocol.messages.models import GetModels, GetSample, Models, Sample
from kvnet.protocol.messages.refusals import RefusalReason, Refused
from kvnet.protocol.messages.statements import GetStatements, Statements, Tell, Told

_MAX_LATE = 1024
"""Requests given up whose late answer is still ignored; a session may last for weeks."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """How long and how much.

    Attributes:
        handshake_s: seconds from the start until the session is open.
        request_s: seconds a request of ours may take.
        silence_s: seconds without a byte after which the peer is pinged.
        requests_in_flight: open requests in each direction; a peer's further ones are refused as ``busy``, and this
            many in a row without an answer end the session.
        request_bytes_per_s: bytes of requests a peer may send, on average; one that sends more is dropped. Reading the
            largest lookup takes about 10 ms, so that the number of requests alone would be no limit.
        request_burst_bytes: bytes of requests at once, before the average counts.
    """

    handshake_s: float = 10.0
    request_s: float = 15.0
    silence_s: float = 60.0
    requests_in_flight: int = 64
    request_bytes_per_s: float = 256 * 1024
    request_burst_bytes: float = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class RequestReceived:
    """The peer asks; answer with `ControlSession.reply` under the same request id. Pings are answered already."""

    request: Request


@dataclass(frozen=True, slots=True)
class ReplyReceived:
    """The peer has answered `request`; the kind of reply fits, or it is `Refused`."""

    request: Request
    reply: Reply


@dataclass(frozen=True, slots=True)
class RequestTimedOut:
    """The peer has not answered in time; a late answer is ignored."""

    request: Request


@dataclass(frozen=True, slots=True)
class SessionExpired:
    """Drop the stream.

    Attributes:
        reason: ``handshake``, ``silent`` or ``unanswered``.
    """

    reason: str


Event = SessionOpened | RequestReceived | ReplyReceived | RequestTimedOut | SessionExpired

_REPLY_KINDS: dict[type[Request], type[Reply]] = {
    Lookup: LookupReply,
    GetManifest: ManifestReply,
    GetHave: Have,
    GetChunkList: ChunkListReply,
    OpenBulk: BulkOffer,
    DialBulk: BulkDialled,
    Tell: Told,
    GetStatements: Statements,
    GetModels: Models,
    GetSample: Sample,
    Presence: Told,
    Enrol: Enrolled,
    Ping: Pong,
}


@dataclass(slots=True)
class _Waiting:
    request: Request
    deadline: float


class ControlSession:
    """One control stream; see the module.

    Args:
        config: who talks to whom.
        now: seconds on any steady clock; the same clock in every later call.
        limits: how long and how much.

    Raises:
        UsageError: a config that cannot be (own peer id on both ends, a nonce of another length, a long agent).
        ConfigError: more than 8 namespaces.
    """

    def __init__(self, config: SessionConfig, now: float, limits: SessionLimits | None = None) -> None:
        self._handshake = Handshake(config)
        self._limits = limits or SessionLimits()
        self._reader = FrameReader()
        self._output = bytearray()
        self._closed = False
        self._next_id = 0
        self._waiting: dict[int, _Waiting] = {}
        self._late: dict[int, None] = {}  # in order of their requests; the oldest are forgotten
        self._unanswered = 0
        self._incoming: dict[int, Request] = {}
        self._allowance = self._limits.request_burst_bytes
        self._handshake_deadline = now + self._limits.handshake_s
        self._last_heard = now
        for message in self._handshake.begin():
            self._send(message)

    # --- what the driver reads ---

    @property
    def opened(self) -> SessionOpened | None:
        """The result of the handshake; None before."""
        return self._handshake.opened

    @property
    def occasion(self) -> Occasion | None:
        """What binds proofs to this session, seen from this side; None before the peer's challenge."""
        return self._handshake.occasion

    @property
    def closed(self) -> bool:
        """Whether the session is over."""
        return self._closed

    def take_output(self) -> bytes:
        """Bytes to send now, in order; empty when there are none."""
        output = bytes(self._output)
        self._output.clear()
        return output

    def next_deadline(self) -> float | None:
        """When `on_time` must be called at the latest; None when the session is closed."""
        if self._closed:
            return None
        if self.opened is None:
            return self._handshake_deadline
        deadlines = [waiting.deadline for waiting in self._waiting.values()]
        if not self._pinging:
            deadlines.append(self._last_heard + self._limits.silence_s)
        return min(deadlines)

    # --- what the driver does ---

    def request(self, request: Request, now: float) -> int:
        """Ask the peer; the answer is a `ReplyReceived` or `RequestTimedOut` event.

        Args:
            request: with any ``request_id``; it gets the next one.
            now: the time.

        Returns:
            The request id.

        Raises:
            UsageError: the session is not open, the slot is not proved on both sides, or too many requests are open.
        """
        if self._closed or self.opened is None:
            raise UsageError("expected an open control session for a request")
        if isinstance(request, ArtifactRequest | MemberRequest) and request.slot not in self.opened.slots:
            raise UsageError(f"expected a slot that both sides have proved, found {request.slot}")
        if len(self._waiting) >= self._limits.requests_in_flight:
            raise UsageError(f"expected at most {self._limits.requests_in_flight} open requests to one peer")
        return self._ask(request, now)

    def reply(self, reply: Reply) -> None:
        """Answer a request of the peer's.

        Raises:
            UsageError: no such request is open, or the reply is of another kind.
        """
        request = self._incoming.get(reply.request_id)
        if request is None or not _fits(request, reply):
            raise UsageError(f"expected an open request that takes a {type(reply).__name__}, found none")
        del self._incoming[reply.request_id]
        self._send(reply)

    def receive(self, data: bytes, now: float) -> list[Event]:
        """Take in bytes from the peer.

        Raises:
            ProtocolViolationError: a message that is malformed, unknown, out of order, or answers nothing.
            UnsupportedVersionError: no common protocol version.
        """
        if self._closed:
            raise ProtocolViolationError("expected nothing more on a control session that is over")
        refill = max(0.0, now - self._last_heard) * self._limits.request_bytes_per_s
        self._allowance = min(self._limits.request_burst_bytes, self._allowance + refill)
        self._last_heard = now
        events: list[Event] = []
        try:
            for body in self._reader.feed(data):
                message = decode_message(body)
                self._charge(message, len(body))
                events += self._handle(message)
        except BaseException:
            self._closed = True
            raise
        return events

    def receive_end(self) -> None:
        """The peer has ended the stream; the session is over.

        Raises:
            ProtocolViolationError: it ended inside a frame.
        """
        self._closed = True
        self._reader.end()

    def on_time(self, now: float) -> list[Event]:
        """Let time pass: expire what is late, ping a silent peer."""
        if self._closed:
            return []
        if self.opened is None:
            return self._expire("handshake") if now >= self._handshake_deadline else []
        events: list[Event] = []
        for request_id in [number for number, waiting in self._waiting.items() if now >= waiting.deadline]:
            request = self._waiting.pop(request_id).request
            if isinstance(request, Ping):
                return events + self._expire("silent")
            self._late[request_id] = None
            self._unanswered += 1
            if len(self._late) > _MAX_LATE:
                del self._late[next(iter(self._late))]
            events.append(RequestTimedOut(request))
        if self._unanswered >= self._limits.requests_in_flight:
            return events + self._expire("unanswered")
        if now >= self._last_heard + self._limits.silence_s and not self._pinging:
            self._ask(Ping(request_id=0), now)
        return events

    # --- inside ---

    @property
    def _pinging(self) -> bool:
        return any(isinstance(waiting.request, Ping) for waiting in self._waiting.values())

    def _send(self, message: Message) -> None:
        self._output += encode_frame(encode_message(message))

    def _ask(self, request: Request, now: float) -> int:
        request_id = self._next_id
        self._next_id += 1
        numbered: Request = msgspec.structs.replace(request, request_id=request_id)
        self._waiting[request_id] = _Waiting(numbered, now + self._limits.request_s)
        self._send(numbered)
        return request_id

    def _expire(self, reason: str) -> list[Event]:
        self._closed = True
        return [SessionExpired(reason)]

    def _charge(self, message: Message, n_bytes: int) -> None:
        """Replies cost nothing: they were asked for, one each."""
        if isinstance(message, Request):
            self._allowance -= n_bytes
            if self._allowance < 0:
                raise ProtocolViolationError(
                    f"expected at most {self._limits.request_bytes_per_s:,.0f} bytes of requests a second, found more"
                )

    def _handle(self, message: Message) -> list[Event]:
        if self.opened is None:
            return self._shake_hands(message)
        if isinstance(message, Request):
            return self._on_request(message)
        if isinstance(message, Reply):
            return self._on_reply(message)
        raise ProtocolViolationError(f"expected request or reply, found a {type(message).__name__} message")

    def _shake_hands(self, message: Message) -> list[Event]:
        answer = self._handshake.receive(message)
        if answer is not None:
            self._send(answer)
        return [self._handshake.opened] if self._handshake.opened is not None else []

    def _on_request(self, request: Request) -> list[Event]:
        if request.request_id in self._incoming:
            raise ProtocolViolationError(f"expected a new request id, found {request.request_id}, which is still open")
        if isinstance(request, Ping):
            self._send(Pong(request_id=request.request_id))
            return []
        if len(self._incoming) >= self._limits.requests_in_flight:
            self._send(Refused(request_id=request.request_id, reason=RefusalReason.BUSY))
            return []
        self._incoming[request.request_id] = request
        return [RequestReceived(request)]

    def _on_reply(self, reply: Reply) -> list[Event]:
        if reply.request_id in self._late:
            del self._late[reply.request_id]
            return []
        waiting = self._waiting.pop(reply.request_id, None)
        if waiting is None or not _fits(waiting.request, reply):
            raise ProtocolViolationError(
                f"expected an answer to an open request, found a {type(reply).__name__} to request {reply.request_id}"
            )
        self._unanswered = 0
        if isinstance(waiting.request, Ping):
            return []
        if isinstance(waiting.request, Lookup) and isinstance(reply, LookupReply):
            _check_matches(waiting.request, reply)
        return [ReplyReceived(waiting.request, reply)]


def _fits(request: Request, reply: Reply) -> bool:
    return isinstance(reply, _REPLY_KINDS[type(request)]) or (
        isinstance(reply, Refused) and not isinstance(request, Ping)
    )


def _check_matches(request: Lookup, reply: LookupReply) -> None:
    indices = [match.key_index for match in reply.matches]
    if any(index >= len(request.keys) for index in indices) or indices != sorted(indices):
        raise ProtocolViolationError("expected matches of keys that were asked for, the deepest first")
    if len({match.artifact for match in reply.matches}) != len(indices):
        raise ProtocolViolationError("expected each artifact once in a lookup reply")
