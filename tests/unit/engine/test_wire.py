"""Frames between node and engine."""

from pathlib import Path

import pytest

from kvnet.engine import wire
from kvnet.engine.kv_state import ChunkRef, RestorePlan
from kvnet.engine.wire import DeltaEvent, FailedEvent, FrameBuffer, GenerateCall, TokenizeCall, encode_frame
from kvnet.engine.wire_values import error_event, raised_error, restore_plan, wire_restores
from kvnet.errors import CompatibilityError, EngineError, KvnetError, MalformedError, OverBudgetError
from kvnet.format.hashes import ChunkHash

PLAN = RestorePlan(b"manifest", 7, (ChunkRef(3, Path("/packs/a"), 4096, 99, ChunkHash(b"h" * 32)),))


def test_records_survive_any_cut_of_the_stream() -> None:
    records = [
        GenerateCall(1, b"\1\0\0\0", wire_restores(PLAN), 5),
        DeltaEvent(1, "e\u0301".encode(), 9),
        TokenizeCall(2, b""),
    ]
    stream = b"".join(encode_frame(record) for record in records)
    for size in (1, 2, 7, len(stream)):
        frames = FrameBuffer()
        parts = [stream[i : i + size] for i in range(0, len(stream), size)]
        assert [record for part in parts for record in frames.feed(part)] == records


def test_restore_plan_crosses_unchanged() -> None:
    assert restore_plan(wire_restores(PLAN)) == PLAN
    assert restore_plan(wire_restores(None)) is None


def test_paths_that_are_no_text_cross_unchanged() -> None:
    path = Path("/packs/\udcff\u0065\u0301")
    plan = RestorePlan(b"", 1, (ChunkRef(0, path, 0, 1, ChunkHash(bytes(32))),))
    [record] = FrameBuffer().feed(encode_frame(GenerateCall(1, b"", wire_restores(plan), 1)))
    assert isinstance(record, GenerateCall)
    crossed = restore_plan(record.restores)
    assert crossed is not None
    assert crossed.chunks[0].path == path


@pytest.mark.parametrize("header", [(wire.MAX_FRAME_BYTES + 1, 0), (1, 200)])
def test_stream_that_is_not_frames_is_refused(header: tuple[int, int]) -> None:
    with pytest.raises(MalformedError, match="engine frame"):
        FrameBuffer().feed(wire.HEADER.pack(*header))


def test_frame_over_the_limit_is_refused_before_it_is_sent() -> None:
    with pytest.raises(EngineError, match="at most"):
        encode_frame(TokenizeCall(1, bytes(wire.MAX_FRAME_BYTES)))


@pytest.mark.parametrize("kind", [EngineError, OverBudgetError, CompatibilityError])
def test_errors_keep_their_kind_message_and_hint(kind: type[KvnetError]) -> None:
    error = raised_error(error_event(4, kind("what happened", hint="what next")))
    assert (type(error), error.message, error.hint) == (kind, "what happened", "what next")


def test_foreign_errors_tell_their_kind_and_never_what_they_quote() -> None:
    event = error_event(4, ValueError("the secret prompt"))
    assert b"secret" not in event.message
    assert b"ValueError" in event.message
    assert isinstance(event, FailedEvent)
    assert type(raised_error(FailedEvent(1, "nonesuch", b"m", b""))) is EngineError
