"""The control session: handshake, then requests and replies in both directions. One machine per control stream.

Each side sends ``hello`` and ``challenge`` at once, its ``proof`` when it has the peer's challenge, and may send
requests when it has checked the peer's proof. The machine reads no clock and draws no random numbers: `now` and the
random bytes are arguments. It writes into a buffer that its driver takes and sends.

A driver does this: create the session; send `take_output()`; for every piece received call `receive`, handle the
events, answer requests with `reply`, and send `take_output()` again; call `on_time` when `next_deadline()` has come.
Any error from `receive` means: drop the stream.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

import msgspec

from kvnet.errors import ConfigError, ProtocolViolationError, UnsupportedVersionError, UsageError
from kvnet.format.hashes import derive_key
from kvnet.protocol.framing import FrameReader, encode_frame
from kvnet.protocol.ids import PeerId
from kvnet.protocol.membership import (
    NONCE_SIZE_BYTES,
    PADDING_SIZE_BYTES,
    PROOF_ENTRIES,
    Occasion,
    Role,
    make_proof,
    shared_slots,
)
from kvnet.protocol.messages import (
    MAX_AGENT_LENGTH,
    PROTOCOL_VERSION,
    ArtifactRequest,
    BulkDialled,
    BulkOffer,
    Capability,
    Challenge,
    ChunkListReply,
    DialBulk,
    Enrol,
    Enrolled,
    GetChunkList,
    GetHave,
    GetManifest,
    GetModels,
    GetSample,
    GetStatements,
    Have,
    Hello,
    Lookup,
    LookupReply,
    ManifestReply,
    MemberRequest,
    Message,
    Models,
    OpenBulk,
    Ping,
    Pong,
    Presence,
    Proof,
    RefusalReason,
    Refused,
    Reply,
    Request,
    Sample,
    Statements,
    Tell,
    Told,
    decode_message,
    encode_message,
)
from kvnet.trust.namespace import Namespace

SESSION_ID_SIZE_BYTES = 16
_MAX_LATE = 1024
"""Requests given up whose late answer is still ignored; a session may last for weeks."""
_SESSION_CONTEXT = "kvnet 2026-11 control session"


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """What a session starts from.

    Attributes:
        role: who opened the control stream.
        own: our peer id.
        other: the peer's, as the transport has authenticated it.
        namespaces: ours, at most 8; the indices in `SessionOpened.slots` are positions here.
        nonce: 32 fresh random bytes.
        padding: 256 fresh random bytes.
        capabilities: what we offer.
        agent: program and version in words.
    """

    role: Role
    own: PeerId
    other: PeerId
    namespaces: Sequence[Namespace]
    nonce: bytes
    padding: bytes
    capabilities: Sequence[str] = (Capability.SERVE,)
    agent: str = "kvnet"


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
class SessionOpened:
    """The handshake is done.

    Attributes:
        session_id: 16 bytes, the same on both sides; chunk requests name it.
        slots: slot -> index in the config's namespaces, for those both sides have proved; may be empty.
        namespaces: slot -> the namespace itself; what serving goes by, so that a peer that has proved a namespace
            this node has left, or its old lookup secret, gets nothing out of the ones it is in now.
        version: of the protocol, the highest both speak.
        capabilities: the peer's.
        agent: the peer's, escaped.
    """

    session_id: bytes
    slots: Mapping[int, int]
    namespaces: Mapping[int, Namespace]
    version: int
    capabilities: frozenset[str]
    agent: str


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


class _Phase(Enum):
    HELLO = "hello"
    CHALLENGE = "challenge"
    PROOF = "proof"
    OPEN = "request or reply"
    CLOSED = "nothing"


@dataclass(slots=True)
class _Waiting:
    request: Request
    deadline: float


@dataclass(slots=True)
class _Peer:
    """What the peer has said in the handshake."""

    version: int = 0
    capabilities: frozenset[str] = frozenset()
    agent: str = ""
    occasion: Occasion | None = None
    sent_proof: list[bytes] = field(default_factory=list)


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
        _check_config(config)
        self._config = config
        self._limits = limits or SessionLimits()
        self._reader = FrameReader()
        self._output = bytearray()
        self._phase = _Phase.HELLO
        self._peer = _Peer()
        self._opened: SessionOpened | None = None
        self._next_id = 0
        self._waiting: dict[int, _Waiting] = {}
        self._late: dict[int, None] = {}  # in order of their requests; the oldest are forgotten
        self._unanswered = 0
        self._incoming: dict[int, Request] = {}
        self._allowance = self._limits.request_burst_bytes
        self._handshake_deadline = now + self._limits.handshake_s
        self._last_heard = now
        self._send(
            Hello(
                versions=(PROTOCOL_VERSION,),
                capabilities=tuple(config.capabilities),
                agent=config.agent[:MAX_AGENT_LENGTH],
            )
        )
        self._send(Challenge(nonce=config.nonce))

    # --- what the driver reads ---

    @property
    def opened(self) -> SessionOpened | None:
        """The result of the handshake; None before."""
        return self._opened

    @property
    def occasion(self) -> Occasion | None:
        """What binds proofs to this session, seen from this side; None before the peer's challenge."""
        return self._peer.occasion

    @property
    def closed(self) -> bool:
        """Whether the session is over."""
        return self._phase is _Phase.CLOSED

    def take_output(self) -> bytes:
        """Bytes to send now, in order; empty when there are none."""
        output = bytes(self._output)
        self._output.clear()
        return output

    def next_deadline(self) -> float | None:
        """When `on_time` must be called at the latest; None when the session is closed."""
        if self._phase is _Phase.CLOSED:
            return None
        if self._phase is not _Phase.OPEN:
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
        if self._phase is not _Phase.OPEN or self._opened is None:
            raise UsageError("expected an open control session for a request")
        if isinstance(request, ArtifactRequest | MemberRequest) and request.slot not in self._opened.slots:
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
        if self._phase is _Phase.CLOSED:
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
            self._phase = _Phase.CLOSED
            raise
        return events

    def receive_end(self) -> None:
        """The peer has ended the stream; the session is over.

        Raises:
            ProtocolViolationError: it ended inside a frame.
        """
        self._phase = _Phase.CLOSED
        self._reader.end()

    def on_time(self, now: float) -> list[Event]:
        """Let time pass: expire what is late, ping a silent peer."""
        if self._phase is _Phase.CLOSED:
            return []
        if self._phase is not _Phase.OPEN:
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
        self._phase = _Phase.CLOSED
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
        match self._phase, message:
            case _Phase.HELLO, Hello():
                self._on_hello(message)
            case _Phase.CHALLENGE, Challenge():
                self._on_challenge(message)
            case _Phase.PROOF, Proof():
                return [self._on_proof(message)]
            case _Phase.OPEN, _ if isinstance(message, Request):
                return self._on_request(message)
            case _Phase.OPEN, _ if isinstance(message, Reply):
                return self._on_reply(message)
            case _:
                raise ProtocolViolationError(f"expected {self._phase.value}, found a {type(message).__name__} message")
        return []

    def _on_hello(self, hello: Hello) -> None:
        if any(first >= second for first, second in pairwise(hello.versions)):
            raise ProtocolViolationError("expected protocol versions in ascending order, each once")
        if PROTOCOL_VERSION not in hello.versions:
            raise UnsupportedVersionError(
                f"expected a peer that speaks protocol version {PROTOCOL_VERSION}, found one that speaks "
                f"{', '.join(map(str, hello.versions))}",
                hint="run the same version of kvnet on both machines",
            )
        self._peer.version = PROTOCOL_VERSION
        self._peer.capabilities = frozenset(hello.capabilities)
        self._peer.agent = escape_text(hello.agent)
        self._phase = _Phase.CHALLENGE

    def _on_challenge(self, challenge: Challenge) -> None:
        config = self._config
        if challenge.nonce == config.nonce:
            raise ProtocolViolationError("expected a nonce of the peer's own, found ours sent back")
        nonces = (config.nonce, challenge.nonce)
        if config.role is Role.RESPONDER:
            nonces = (challenge.nonce, config.nonce)
        self._peer.occasion = Occasion(config.role, config.own, config.other, *nonces)
        self._peer.sent_proof = make_proof(config.namespaces, self._peer.occasion, config.padding)
        self._send(Proof(entries=tuple(self._peer.sent_proof)))
        self._phase = _Phase.PROOF

    def _on_proof(self, proof: Proof) -> SessionOpened:
        occasion = self._peer.occasion
        assert occasion is not None  # noqa: S101 - the phase before has set it
        slots = shared_slots(self._peer.sent_proof, proof.entries, self._config.namespaces, occasion)
        of_initiator = occasion if occasion.role is Role.INITIATOR else occasion.reversed()
        session_id = derive_key(_SESSION_CONTEXT, of_initiator.encode())[:SESSION_ID_SIZE_BYTES]
        peer = self._peer
        namespaces = {slot: self._config.namespaces[index] for slot, index in slots.items()}
        self._opened = SessionOpened(session_id, slots, namespaces, peer.version, peer.capabilities, peer.agent)
        self._phase = _Phase.OPEN
        return self._opened

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


def _check_config(config: SessionConfig) -> None:
    if config.own == config.other:
        raise UsageError("expected two different peer ids for a control session, found the same twice")
    if len(config.nonce) != NONCE_SIZE_BYTES or len(config.padding) != PADDING_SIZE_BYTES:
        raise UsageError(
            f"expected {NONCE_SIZE_BYTES} + {PADDING_SIZE_BYTES} random bytes for a control session, "
            f"found {len(config.nonce)} + {len(config.padding)}"
        )
    if len(config.namespaces) > PROOF_ENTRIES:
        raise ConfigError(f"expected at most {PROOF_ENTRIES} namespaces on one node, found {len(config.namespaces)}")


def escape_text(text: str) -> str:
    """Text from a peer, safe to show: backslashes and what cannot be printed become escape sequences."""
    return "".join(
        char if char.isprintable() and char != "\\" else char.encode("unicode_escape").decode("ascii") for char in text
    )


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
