"""A peer that breaks rules on purpose: it speaks the protocol as far as a test wants, on any network."""

import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress

import msgspec
import trio

from kvnet.errors import KvnetError, NetworkError
from kvnet.exchange.frames import receive_frame
from kvnet.network.interface import ByteStream, Network, StreamKind
from kvnet.protocol.framing import encode_frame
from kvnet.protocol.handshake import SessionConfig, SessionOpened
from kvnet.protocol.ids import PeerId
from kvnet.protocol.membership import Role
from kvnet.protocol.messages.artifacts import (
    ChunkListReply,
    GetChunkList,
    GetManifest,
    Lookup,
    LookupReply,
    ManifestReply,
)
from kvnet.protocol.messages.base import encode_message
from kvnet.protocol.messages.chunks import ChunkHeader, GetChunks, decode_chunk_request
from kvnet.protocol.messages.control import Reply, Request
from kvnet.protocol.messages.handshake import Capability, Challenge, Hello, Proof
from kvnet.protocol.messages.liveness import Ping
from kvnet.protocol.messages.refusals import RefusalReason, Refused
from kvnet.protocol.session import ControlSession, RequestReceived
from kvnet.store.interface import ArtifactRecord
from kvnet.trust.namespace import Namespace

Answer = Callable[[Request], Reply | None]
ChunkHandler = Callable[[ByteStream, GetChunks], Awaitable[None]]

FOUR_GIGABYTES = b"\xff\xff\xff\xff"
_ANYTHING = bytes(32)


def frame(message: object) -> bytes:
    """A message as it goes over a stream."""
    return encode_frame(encode_message(message))  # type: ignore[arg-type]


HELLO = Hello(versions=(1,), capabilities=(), agent="evil")
BROKEN_HANDSHAKES = {
    "junk": encode_frame(os.urandom(64)),
    "four gigabytes declared": FOUR_GIGABYTES + b"x",
    "an empty frame": bytes(4),
    "500 levels of nesting": encode_frame(b"\x81" * 500 + b"\0"),
    "100,000 levels of nesting": encode_frame(b"\x81" * 100_000),
    "a proof before anything": frame(Proof(entries=(_ANYTHING,) * 8)),
    "hello twice": frame(HELLO) * 2,
    "a request before the proof": frame(HELLO) + frame(Ping(request_id=0)),
    "another version": frame(Hello(versions=(99,), capabilities=(), agent="evil")),
    "a proof that is none, then a request": frame(HELLO)
    + frame(Challenge(nonce=b"n" * 32))
    + frame(Proof(entries=(_ANYTHING,) * 8))
    + frame(GetManifest(request_id=0, slot=0, artifact=_ANYTHING)) * 3,
    "the end at once": b"",
}
"""What a peer may send in place of a handshake, by what it is."""

BROKEN_CHUNK_REQUESTS = {
    "junk": encode_frame(b"\x9f" * 300),
    "four gigabytes declared": FOUR_GIGABYTES + bytes(1000),
    "an answer in place of a request": frame(ChunkHeader(index=0, length_bytes=1)),
    "100,000 levels of nesting": encode_frame(b"\xa1\x00" * 50_000),
    "a session that never was": frame(GetChunks(session=bytes(16), slot=0, artifact=_ANYTHING, indices=(0, 1))),
    "half a frame": encode_frame(bytes(100))[:50],
}
"""What a peer may send in place of a chunk request."""


class EvilPeer:
    """Waits for others to open sessions with it, and answers as it is told.

    Args:
        network: not running yet; its handlers are set here.
        namespaces: it is a member of.
        answer: decides replies, ``None`` for silence; their request id is put right.
        chunks: answers chunk requests; by default with silence.
        capabilities: what it says it can do.
    """

    def __init__(
        self,
        network: Network,
        namespaces: Sequence[Namespace],
        answer: Answer,
        chunks: ChunkHandler | None = None,
        *,
        capabilities: Sequence[str] = (Capability.SERVE,),
    ) -> None:
        self._capabilities = capabilities
        self.network = network
        self.requests: list[Request] = []
        self.chunk_requests = 0
        self._namespaces = namespaces
        self.answer = answer
        self._chunks = chunks
        network.set_handler(StreamKind.CONTROL, self._serve_control)
        network.set_handler(StreamKind.CHUNKS, self._serve_chunks)

    async def _serve_control(self, peer: PeerId, stream: ByteStream) -> None:
        machine = _machine(self.network, peer, self._namespaces, Role.RESPONDER, self._capabilities)
        await stream.send_all(machine.take_output())
        while data := await stream.receive_some(1 << 16):
            for event in machine.receive(data, trio.current_time()):
                if isinstance(event, RequestReceived):
                    self.requests.append(event.request)
                    reply = self.answer(event.request)
                    if reply is not None:
                        machine.reply(msgspec.structs.replace(reply, request_id=event.request.request_id))
            if output := machine.take_output():
                await stream.send_all(output)

    async def _serve_chunks(self, peer: PeerId, stream: ByteStream) -> None:
        stream.idle_timeout_s = None
        while (body := await receive_frame(stream)) is not None:
            self.chunk_requests += 1
            if self._chunks is None:
                await trio.sleep_forever()
            else:
                await self._chunks(stream, decode_chunk_request(body))


def _machine(
    network: Network,
    peer: PeerId,
    namespaces: Sequence[Namespace],
    role: Role,
    capabilities: Sequence[str] = (Capability.SERVE,),
) -> ControlSession:
    config = SessionConfig(
        role=role,
        own=network.peer_id,
        other=peer,
        namespaces=namespaces,
        nonce=os.urandom(32),
        padding=os.urandom(256),
        agent="evil",
        capabilities=capabilities,
    )
    return ControlSession(config, trio.current_time())


def manifest_answer(envelope: bytes, match: Callable[[Lookup], LookupReply] | None = None) -> Answer:
    """Answers every question for a manifest with ``envelope``, lookups with ``match``, all else with a refusal."""

    def answer(request: Request) -> Reply:
        if isinstance(request, GetManifest):
            return ManifestReply(request_id=0, envelope=envelope)
        if isinstance(request, Lookup):
            return match(request) if match is not None else LookupReply(request_id=0, matches=())
        return Refused(request_id=0, reason=RefusalReason.UNKNOWN)

    return answer


def relay_answer(record: ArtifactRecord, match: Callable[[Lookup], LookupReply] | None = None) -> Answer:
    """Passes on the signed manifest and the chunk list of an artifact as they are; lookups go to ``match``."""

    def answer(request: Request) -> Reply:
        if isinstance(request, GetManifest):
            return ManifestReply(request_id=0, envelope=record.envelope)
        if isinstance(request, GetChunkList):
            return ChunkListReply(request_id=0, page=record.pages[request.page])
        if isinstance(request, Lookup):
            return match(request) if match is not None else LookupReply(request_id=0, matches=())
        return Refused(request_id=0, reason=RefusalReason.UNKNOWN)

    return answer


async def open_session(
    network: Network, peer: PeerId, namespaces: Sequence[Namespace]
) -> tuple[ByteStream, ControlSession]:
    """An open control session with a connected peer, opened by us."""
    stream = await network.open_stream(peer, StreamKind.CONTROL)
    machine = _machine(network, peer, namespaces, Role.INITIATOR)
    await stream.send_all(machine.take_output())
    while True:
        data = await stream.receive_some(1 << 16)
        if not data:
            raise NetworkError("the peer ended the handshake")
        events = machine.receive(data, trio.current_time())
        if output := machine.take_output():
            await stream.send_all(output)
        if any(isinstance(event, SessionOpened) for event in events):
            return stream, machine


async def send_and_wait(network: Network, peer: PeerId, kind: StreamKind, data: bytes, *, patience_s: float) -> bytes:
    """Send bytes on a fresh stream; what comes back until the peer gives the stream up or patience ends."""
    received = b""
    with suppress(KvnetError), trio.move_on_after(patience_s):
        stream = await network.open_stream(peer, kind)
        try:
            if data:
                await stream.send_all(data)
            else:
                await stream.aclose()
            while piece := await stream.receive_some(1 << 16):
                received += piece
        finally:
            with trio.CancelScope(shield=True):
                await stream.reset()
    return received


def attacks() -> Iterator[tuple[StreamKind, bytes]]:
    """Everything a stranger may send on a fresh stream."""
    for data in BROKEN_HANDSHAKES.values():
        yield StreamKind.CONTROL, data
    for data in BROKEN_CHUNK_REQUESTS.values():
        yield StreamKind.CHUNKS, data


# --- manifests that break the format: each under a sound signature, of an artifact of 1,500 tokens --------------------

N_TOKENS = bytes.fromhex("686e5f746f6b656e73 1905dc")
"""The field n_tokens = 1500 of a manifest, as it is written."""


def spelt(n_tokens: str) -> Callable[[bytes], bytes]:
    """The manifest with its token count written in another way."""

    def make(manifest: bytes) -> bytes:
        assert N_TOKENS in manifest
        return manifest.replace(N_TOKENS, N_TOKENS[:9] + bytes.fromhex(n_tokens), 1)

    return make


def twice(manifest: bytes) -> bytes:
    """The token count a second time, with another meaning."""
    head = bytes([manifest[0] + 1])
    return head + manifest[1:].replace(N_TOKENS, N_TOKENS + N_TOKENS[:9] + bytes.fromhex("19270f"), 1)


def out_of_order(manifest: bytes) -> bytes:
    """Two whole fields of the map exchanged."""
    first, _, rest = manifest.partition(N_TOKENS)
    return first[:1] + N_TOKENS + first[1:] + rest


MALFORMED_MANIFESTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a key twice": (twice, "twice|out of order"),
    "a trailing byte": (lambda manifest: manifest + b"\0", "bytes after"),
    "an indefinite map": (lambda manifest: b"\xbf" + manifest[1:] + b"\xff", "indefinite"),
    "a token count in too many bytes": (spelt("1a000005dc"), "more bytes than needed"),
    "a token count as a float": (spelt("f965dc"), "a float"),
    "a token count as a bignum": (spelt("c24205dc"), "a tag"),
    "a token count under an unknown tag": (spelt("d903e81905dc"), "a tag"),
    "an indefinite string as token count": (spelt("5f4205dcff"), "indefinite"),
    "an indefinite array as token count": (spelt("9f1905dcff"), "indefinite"),
    "keys out of order": (out_of_order, "out of order"),
    "500 levels inside": (spelt("81" * 500 + "00"), "levels"),
    "nested arrays": (lambda _: b"\x81" * 4000, "levels"),
    "nested maps": (lambda _: b"\xa1\x00" * 2000, "not text"),
    "nested tags": (lambda _: b"\xc1" * 4000, "a tag"),
    "nested indefinite arrays": (lambda _: b"\x9f" * 4000, "indefinite"),
    "another token count than its chunks": (spelt("19270f"), "chunks by its own layout"),
}
"""How a sound manifest is spoilt, and what the refusal says."""
