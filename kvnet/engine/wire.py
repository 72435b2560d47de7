"""Frames between the node and its engine process, over an inherited socket pair.

A frame is a u32 big-endian length, one byte that says which call or event follows, and that record in the strict CBOR
profile. Both ends are of one build: there is no version. `wire_values` says how values of the interface are written in
these records.
"""

import struct
from typing import Any

import msgspec

from kvnet.errors import EngineError, MalformedError
from kvnet.format import cbor

MAX_FRAME_BYTES = 64 << 20
"""A prompt of four million tokens with room to spare; more is a defect, not a request."""

HEADER = struct.Struct(">IB")
"""Of a frame: length of what follows it, and the place of its type in `CALLS` or `EVENTS`."""


class Record(msgspec.Struct, frozen=True):
    """Base of every call and event; ``id`` is the request's, 0 for the engine as a whole."""

    id: int


class RenderCall(Record, frozen=True):
    """Render messages; ``cut`` asks for the part every question shares. JSON in both byte fields."""

    messages: bytes
    inputs: bytes
    cut: bool


class TokenizeCall(Record, frozen=True):
    """Tokenize plain text."""

    text: bytes


class WireChunk(msgspec.Struct, frozen=True):
    """A ``ChunkRef`` or, with an empty path, a ``WrittenChunk``."""

    index: int
    path: bytes
    offset: int
    length: int
    hash: bytes


class WireRestore(msgspec.Struct, frozen=True):
    """A ``RestorePlan``."""

    manifest: bytes
    n_tokens: int
    chunks: list[WireChunk]


class ExportCall(Record, frozen=True):
    """An ``ExportRequest``; tokens as u32le."""

    tokens: bytes
    restores: list[WireRestore]
    pack_path: bytes
    pack_offset: int
    first_block: int
    codec: str
    context_size_bytes: int
    prefill: bool
    background: bool


class GenerateCall(Record, frozen=True):
    """A ``GenerateRequest``; tokens as u32le."""

    tokens: bytes
    restores: list[WireRestore]
    max_tokens: int


class LogitsCall(Record, frozen=True):
    """A ``LogitsRequest``; tokens as u32le."""

    tokens: bytes
    restores: list[WireRestore]
    stops: list[int]
    one_shot: bool


class WirePrompt(msgspec.Struct, frozen=True):
    """A ``PreparedPrompt``; tokens as u32le, a boundary as its tokens, kind and messages."""

    tokens: bytes
    boundaries: list[tuple[int, str, int]]
    stable_tokens: int
    live_tokens: int


class PrepareCall(Record, frozen=True):
    """A ``PromptRequest``; template inputs as JSON."""

    kind: str
    body: bytes
    inputs: bytes
    marks: list[int]


class CompleteCall(Record, frozen=True):
    """A ``CompletionRequest``."""

    kind: str
    body: bytes
    prompt: WirePrompt
    restores: list[WireRestore]
    use_live: bool
    keep_live: bool
    created_tokens: int


class TextOfCall(Record, frozen=True):
    """Ask for the text of tokens; u32le."""

    tokens: bytes


class LiveCall(Record, frozen=True):
    """Ask what live caches hold."""


class DropLiveCall(Record, frozen=True):
    """Forget every live cache."""


class LimitMemoryCall(Record, frozen=True):
    """Say what weights and K/V may use; see ``Engine.limit_memory``."""

    limit_bytes: int


class SampleCall(Record, frozen=True):
    """Ask for the model's sample; see ``Engine.sample``."""


class CancelCall(Record, frozen=True):
    """Stop a request; its answer no longer matters."""


class ReadyEvent(Record, frozen=True):
    """The model is loaded."""

    name: bytes
    path: bytes
    fingerprints: list[bytes]
    producer: list[Any]
    tokenizer_digest: bytes
    template_digest: bytes
    window_tokens: int
    kv_bytes_per_token: int
    weights_size_bytes: int
    memory_budget_bytes: int
    refusal: bytes


class FailedEvent(Record, frozen=True):
    """A request failed, or with id 0 the loading did."""

    code: str
    message: bytes
    hint: bytes


class TokensEvent(Record, frozen=True):
    """Answer to a render or tokenize call; tokens as u32le."""

    tokens: bytes


class WireOrigin(msgspec.Struct, frozen=True):
    """An ``Origin``."""

    manifest: bytes
    n_tokens: int


class ProgressEvent(Record, frozen=True):
    """A ``PrefillProgress``."""

    done: int
    total: int
    written: list[WireChunk] = msgspec.field(default_factory=list)
    origins: list[WireOrigin] = msgspec.field(default_factory=list)


class FirstTokenEvent(Record, frozen=True):
    """A ``FirstToken``."""

    ttft_us: int


class DeltaEvent(Record, frozen=True):
    """A ``TextDelta``."""

    text: bytes
    token: int


class GeneratedEvent(Record, frozen=True):
    """A ``Generated``; tokens as u32le."""

    text: bytes
    tokens: bytes
    finish_reason: str
    ttft_us: int
    restored_tokens: int
    prefilled_tokens: int
    restore_us: int
    prefill_us: int


class ExportedEvent(Record, frozen=True):
    """An ``Exported``."""

    chunks: list[WireChunk]
    restored_tokens: int
    prefilled_tokens: int
    restore_us: int
    prefill_us: int
    origins: list[WireOrigin] = msgspec.field(default_factory=list)


class LogitsEvent(Record, frozen=True):
    """A ``Logits``."""

    values: bytes
    positions: list[int]


class PreparedEvent(Record, frozen=True):
    """Answer to a prepare call."""

    prompt: WirePrompt


class StartedEvent(Record, frozen=True):
    """A ``CompletionStarted``."""

    status: int
    content_type: str
    live_tokens: int
    restored_tokens: int
    restore_us: int


class BodyEvent(Record, frozen=True):
    """A ``CompletionBody``."""

    data: bytes


class CompletedEvent(Record, frozen=True):
    """A ``Completed``; tokens as u32le."""

    tokens: bytes
    finish_reason: str
    held_tokens: int
    ttft_us: int
    prefilled_tokens: int
    prefill_us: int
    decode_us: int


class TextEvent(Record, frozen=True):
    """Answer to a text call."""

    text: bytes


class LimitedEvent(Record, frozen=True):
    """Answer to a limit-memory call."""

    held_bytes: int


class SampleEvent(Record, frozen=True):
    """Answer to a sample call."""

    sample: bytes


class LiveEvent(Record, frozen=True):
    """Answer to a live or drop-live call: ``LiveCaches`` as they are then."""

    n_caches: int
    size_bytes: int
    cap_bytes: int


CALLS: tuple[type[Record], ...] = (
    RenderCall,
    TokenizeCall,
    ExportCall,
    GenerateCall,
    LogitsCall,
    PrepareCall,
    CompleteCall,
    TextOfCall,
    LiveCall,
    DropLiveCall,
    LimitMemoryCall,
    SampleCall,
    CancelCall,
)
EVENTS: tuple[type[Record], ...] = (
    ReadyEvent,
    FailedEvent,
    TokensEvent,
    ProgressEvent,
    FirstTokenEvent,
    DeltaEvent,
    GeneratedEvent,
    ExportedEvent,
    LogitsEvent,
    PreparedEvent,
    StartedEvent,
    BodyEvent,
    CompletedEvent,
    TextEvent,
    LiveEvent,
    LimitedEvent,
    SampleEvent,
)
FINAL_EVENTS = (
    FailedEvent,
    TokensEvent,
    GeneratedEvent,
    ExportedEvent,
    LogitsEvent,
    PreparedEvent,
    CompletedEvent,
    TextEvent,
    LiveEvent,
    LimitedEvent,
    SampleEvent,
)
"""Events after which a request is over."""
_TYPES: tuple[type[Record], ...] = (*CALLS, *EVENTS)
_NUMBERS = {record: number for number, record in enumerate(_TYPES)}


def encode_frame(record: Record) -> bytes:
    """A whole frame, header included.

    Raises:
        EngineError: the record exceeds the frame limit.
    """
    body = cbor.encode_struct(record)
    if len(body) > MAX_FRAME_BYTES:
        raise EngineError(f"a request to the engine takes at most {MAX_FRAME_BYTES} bytes, this one {len(body)}")
    return HEADER.pack(len(body), _NUMBERS[type(record)]) + body


class FrameBuffer:
    """Cuts a byte stream into records."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Record]:
        """Adds bytes; returns the records now complete.

        Raises:
            MalformedError: the stream is not frames of this build.
        """
        self._buffer += data
        records: list[Record] = []
        while len(self._buffer) >= HEADER.size:
            length, number = HEADER.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES or number >= len(_TYPES):
                raise MalformedError(f"engine frame: length {length}, record type {number}")
            end = HEADER.size + length
            if len(self._buffer) < end:
                break
            body = bytes(self._buffer[HEADER.size : end])
            del self._buffer[:end]
            records.append(cbor.decode_as(_TYPES[number], body, max_bytes=MAX_FRAME_BYTES, what="engine frame"))
        return records
