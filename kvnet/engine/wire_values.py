"""Values of the engine's interface as they cross the socket pair, and back again.

The strict CBOR profile knows no real numbers and no null and wants text normalised: durations cross as microseconds, an
optional record as a list of none or one, free text as UTF-8 bytes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from kvnet.engine.completions import Completed, CompletionBody, CompletionEvent, CompletionStarted
from kvnet.engine.generations import Generated
from kvnet.engine.interface import ModelInfo
from kvnet.engine.kv_state import ChunkRef, Exported, Origin, PrefillProgress, RestorePlan, WrittenChunk
from kvnet.engine.prompts import Boundary, BoundaryKind, PreparedPrompt
from kvnet.engine.wire import (
    BodyEvent,
    CompletedEvent,
    ExportedEvent,
    FailedEvent,
    GeneratedEvent,
    ProgressEvent,
    ReadyEvent,
    Record,
    StartedEvent,
    WireChunk,
    WireOrigin,
    WirePrompt,
    WireRestore,
)
from kvnet.errors import EngineError, KvnetError
from kvnet.format.fingerprint import Producer, decode_fingerprint
from kvnet.format.hashes import ChunkHash
from kvnet.format.prefix import tokens_from_bytes, tokens_to_bytes

E = TypeVar("E", bound=Record)


def text_bytes(text: str) -> bytes:
    """Free text, also text that came from undecodable file names."""
    return text.encode("utf-8", "surrogateescape")


def bytes_text(data: bytes) -> str:
    """The reverse of ``text_bytes``."""
    return data.decode("utf-8", "surrogateescape")


def error_event(request_id: int, error: Exception) -> FailedEvent:
    """An exception as an event; one raised on purpose keeps its code and hint."""
    if isinstance(error, KvnetError):
        return FailedEvent(request_id, error.code, text_bytes(error.message), text_bytes(error.hint))
    # Foreign messages may quote what they choked on; only the kind of failure crosses.
    kind = f"{type(error).__module__}.{type(error).__name__}"
    return FailedEvent(request_id, EngineError.code, text_bytes(f"the engine failed: {kind}"), b"")


def raised_error(event: FailedEvent) -> KvnetError:
    """The exception an event stands for."""
    kind = _error_classes().get(event.code, EngineError)
    return kind(bytes_text(event.message), hint=bytes_text(event.hint))


def _error_classes() -> dict[str, type[KvnetError]]:
    found: dict[str, type[KvnetError]] = {}
    pending: list[type[KvnetError]] = [KvnetError]
    while pending:
        kind = pending.pop()
        found[kind.code] = kind
        pending += kind.__subclasses__()
    return found


def wire_restores(plan: RestorePlan | None) -> list[WireRestore]:
    """An optional restore plan as a list of none or one."""
    if plan is None:
        return []
    chunks = [WireChunk(c.index, text_bytes(str(c.path)), c.offset, c.length_bytes, bytes(c.hash)) for c in plan.chunks]
    return [WireRestore(plan.manifest, plan.n_tokens, chunks)]


def restore_plan(restores: Sequence[WireRestore]) -> RestorePlan | None:
    """The reverse of ``wire_restores``."""
    if not restores:
        return None
    wire = restores[0]
    chunks = tuple(
        ChunkRef(c.index, Path(bytes_text(c.path)), c.offset, c.length, ChunkHash(c.hash)) for c in wire.chunks
    )
    return RestorePlan(wire.manifest, wire.n_tokens, chunks)


def wire_prompt(prompt: PreparedPrompt) -> WirePrompt:
    """A prepared prompt as it crosses."""
    return WirePrompt(
        tokens_to_bytes(prompt.tokens),
        [(boundary.n_tokens, boundary.kind.value, boundary.n_messages) for boundary in prompt.boundaries],
        prompt.stable_tokens,
        prompt.live_tokens,
    )


def prepared_prompt(wire: WirePrompt) -> PreparedPrompt:
    """The reverse of ``wire_prompt``."""
    return PreparedPrompt(
        tokens=tuple(tokens_from_bytes(wire.tokens)),
        boundaries=tuple(Boundary(n, BoundaryKind(kind), messages) for n, kind, messages in wire.boundaries),
        stable_tokens=wire.stable_tokens,
        live_tokens=wire.live_tokens,
    )


def wire_chunks(chunks: Sequence[WrittenChunk]) -> list[WireChunk]:
    """Written chunks; their path is the caller's own."""
    return [WireChunk(c.index, b"", c.offset, c.length_bytes, bytes(c.hash)) for c in chunks]


def written_chunks(chunks: Sequence[WireChunk]) -> tuple[WrittenChunk, ...]:
    """The reverse of ``wire_chunks``."""
    return tuple(WrittenChunk(c.index, c.offset, c.length, ChunkHash(c.hash)) for c in chunks)


def ready_event(info: ModelInfo) -> ReadyEvent:
    """The loaded model as an event."""
    made = info.producer
    return ReadyEvent(
        id=0,
        name=text_bytes(info.name),
        path=text_bytes(str(info.path)),
        fingerprints=[info.fingerprint.encode()] if info.fingerprint is not None else [],
        producer=[*(text_bytes(t) for t in (made.runtime, made.versions, made.device, made.system)), made.prefill_step],
        tokenizer_digest=info.tokenizer_digest,
        template_digest=info.template_digest,
        window_tokens=info.window_tokens,
        kv_bytes_per_token=info.kv_bytes_per_token,
        weights_size_bytes=info.weights_size_bytes,
        memory_budget_bytes=info.memory_budget_bytes,
        refusal=text_bytes(info.refusal),
    )


def model_info(event: ReadyEvent) -> ModelInfo:
    """The reverse of ``ready_event``."""
    runtime, versions, device, system = (bytes_text(text) for text in event.producer[:4])
    return ModelInfo(
        name=bytes_text(event.name),
        path=Path(bytes_text(event.path)),
        fingerprint=decode_fingerprint(event.fingerprints[0]) if event.fingerprints else None,
        producer=Producer(
            runtime=runtime, versions=versions, device=device, system=system, prefill_step=event.producer[4]
        ),
        tokenizer_digest=event.tokenizer_digest,
        template_digest=event.template_digest,
        window_tokens=event.window_tokens,
        kv_bytes_per_token=event.kv_bytes_per_token,
        weights_size_bytes=event.weights_size_bytes,
        memory_budget_bytes=event.memory_budget_bytes,
        shareable=not event.refusal,
        refusal=bytes_text(event.refusal),
    )


def exported(event: ExportedEvent) -> Exported:
    """What an export came to."""
    return Exported(
        written_chunks(event.chunks),
        event.restored_tokens,
        event.prefilled_tokens,
        event.restore_us / 1e6,
        event.prefill_us / 1e6,
        _origins(event.origins),
    )


def export_progress(event: ProgressEvent) -> PrefillProgress:
    """How far an export is."""
    return PrefillProgress(event.done, event.total, written_chunks(event.written), _origins(event.origins))


def _origins(origins: Sequence[WireOrigin]) -> tuple[Origin, ...]:
    return tuple(Origin(origin.manifest, origin.n_tokens) for origin in origins)


def completion_event(event: Record) -> CompletionEvent:
    """An event of a completion.

    Raises:
        EngineError: it is none.
    """
    if isinstance(event, BodyEvent):
        return CompletionBody(event.data)
    if isinstance(event, StartedEvent):
        return CompletionStarted(
            event.status, event.content_type, event.live_tokens, event.restored_tokens, event.restore_us / 1e6
        )
    completed = expected_event(event, CompletedEvent)
    return Completed(
        tokens=tuple(tokens_from_bytes(completed.tokens)),
        finish_reason=completed.finish_reason,
        held_tokens=completed.held_tokens,
        ttft_s=completed.ttft_us / 1e6,
        prefilled_tokens=completed.prefilled_tokens,
        prefill_s=completed.prefill_us / 1e6,
        decode_s=completed.decode_us / 1e6,
    )


def generated(event: GeneratedEvent) -> Generated:
    """What a generation came to."""
    return Generated(
        text=bytes_text(event.text),
        tokens=tuple(tokens_from_bytes(event.tokens)),
        finish_reason=event.finish_reason,
        ttft_s=event.ttft_us / 1e6,
        restored_tokens=event.restored_tokens,
        prefilled_tokens=event.prefilled_tokens,
        restore_s=event.restore_us / 1e6,
        prefill_s=event.prefill_us / 1e6,
    )


def expected_event(event: Record, kind: type[E]) -> E:
    """An answer as the kind that it must be.

    Raises:
        EngineError: it is of another.
    """
    if not isinstance(event, kind):
        raise EngineError(f"the engine answered with {type(event).__name__}, expected {kind.__name__}")
    return event
