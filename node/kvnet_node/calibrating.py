"""Measure what this machine does with one model: prefill by position, restoring, decoding. Bounded to a few seconds."""

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import trio

from kvnet.engine.generations import Generated, GenerateRequest
from kvnet.engine.interface import Engine, ModelInfo
from kvnet.engine.kv_state import ChunkRef, Exported, ExportRequest, PrefillProgress
from kvnet.engine.scratch import new_pack, scratch_restore
from kvnet.engine.selftest import last
from kvnet.errors import CompatibilityError, EngineError, MalformedError
from kvnet.format.chunks import ChunkPlan, layer_groups
from kvnet.format.codecs import Codec
from kvnet.format.fingerprint import Fingerprint
from kvnet.format.prefix import BLOCK_TOKENS
from kvnet_node.speeds import Calibration, Point

WARM_TOKENS = 64
MAX_TOKENS = 8192
"""Prefill is measured up to here, if the time suffices."""
PREFILL_S = 5.0
"""After this time no further step of the prefill is waited for."""
EXPORT_S = 1.5
"""About how long computing what is restored may take."""
MAX_RESTORED_TOKENS = 4096
RESTORES = 3
"""Each restore is measured so often; the median counts."""
DECODED_TILES = 8
DECODE_S = 0.1
FASTEST_BYTES_S = 1e12
"""What takes no measurable time is put down as this."""

_WORDS = "The tide came in over the flats, and the boats that had leaned on their sides stood up one after another. "

Say = Callable[[str, int, int], None]
"""Told the stage, how many tokens are done, and of how many."""


@dataclass(frozen=True, slots=True)
class _Restore:
    bytes_s: float
    fixed_s: float


async def calibrate(engine: Engine, work_dir: Path, *, now_s: int, say: Say = lambda *_: None) -> Calibration:
    """Measure one model.

    Args:
        engine: of the model; nobody else should be using it.
        work_dir: where the engine may write; what is written is removed again.
        now_s: seconds since 1970.
        say: told how it goes.

    Raises:
        CompatibilityError: the model's K/V cannot be shared.
        EngineError: the engine cannot run it.
    """
    info = engine.info
    if info.fingerprint is None:
        raise CompatibilityError(
            f"the K/V of model {info.name} cannot be shared: {info.refusal}",
            hint="`kvnet model list` shows which models can be shared.",
        )
    tokens = await _some_tokens(engine)
    await last(engine.generate(GenerateRequest(tokens[:WARM_TOKENS], max_tokens=1)), Generated)
    points = await _prefill(engine, tokens, say)
    with TemporaryDirectory(dir=work_dir, prefix="calibrate-") as scratch:
        restored = _affordable(points, len(tokens) - 1)
        say("restore", 0, restored)
        request = ExportRequest(tokens[:restored], None, new_pack(Path(scratch) / "pack"), 0)
        exported = await last(engine.export(request), Exported)
        restore = await _restore(engine, tokens, request, exported)
        say("restore", restored, restored)
        tiles = [
            ChunkRef(chunk.index, request.pack_path, chunk.offset, chunk.length_bytes, chunk.hash)
            for chunk in exported.chunks[:DECODED_TILES]
        ]
        decode, shares = await trio.to_thread.run_sync(_codecs, info.fingerprint, restored, tiles)
    return Calibration(
        model=info.name,
        fingerprint=info.fingerprint.hash.hex(),
        device=info.producer.device,
        versions=info.producer.versions,
        measured=now_s,
        prefill=points,
        restore_bytes_s=restore.bytes_s,
        restore_fixed_s=restore.fixed_s,
        decode_bytes_s=decode,
        kv_bytes_per_token=info.kv_bytes_per_token,
        stored_shares=shares,
    )


async def _some_tokens(engine: Engine) -> list[int]:
    """Tokens of repeated prose: as many as are measured, the window and the memory allow."""
    info = engine.info
    n_tokens = min(MAX_TOKENS, _most_tokens(info)) + 1
    once = await engine.tokenize(_WORDS)
    tokens = once * (n_tokens // max(1, len(once)) + 1)
    if n_tokens < BLOCK_TOKENS + 1:
        raise EngineError(
            f"expected room for {BLOCK_TOKENS + 1:,} tokens of {info.name}, found room for {n_tokens:,}",
            hint="Use a model with a longer window.",
        )
    return tokens[:n_tokens]


def _most_tokens(info: ModelInfo) -> int:
    room = info.memory_budget_bytes - info.weights_size_bytes
    by_memory = room // (2 * max(1, info.kv_bytes_per_token))
    return min(by_memory, info.window_tokens or by_memory) - 2


async def _prefill(engine: Engine, tokens: Sequence[int], say: Say) -> list[Point]:
    """The speed of each step of a prefill, as far as it comes in the time.

    First a request of two steps: an engine ends the step it is in before it does anything else, and on a slow machine
    one that nobody wants costs half as much as the two. A machine that was through with them in the time goes on with
    as many as fit into the rest of it.
    """
    ends_s = trio.current_time() + PREFILL_S
    first = 2 * engine.info.producer.prefill_step + 1
    points = await _timed(engine, tokens[:first], ends_s, lambda done: say("prefill", done, len(tokens)))
    if trio.current_time() < ends_s and first < len(tokens):
        further = await _timed(engine, tokens, ends_s, lambda done: say("prefill", done, len(tokens)))
        known = points[-1].position if points else -1
        points += [point for point in further if point.position > known]
    if not points:
        raise EngineError("the engine told nothing of its prefill", hint="run the command again")
    return points


async def _timed(engine: Engine, tokens: Sequence[int], ends_s: float, say: Callable[[int], None]) -> list[Point]:
    """The steps of one prefill until a moment; until twice as late when there would be none."""
    began_s = trio.current_time()
    heard: list[tuple[int, float]] = []
    async with aclosing(engine.generate(GenerateRequest(tokens, max_tokens=1))) as events:
        async for event in events:
            now_s = trio.current_time()
            if isinstance(event, Generated):
                # The last token is fed by the decoder; what came before it is the prefill.
                heard.append((len(tokens) - 1, began_s + event.prefill_s))
                break
            if isinstance(event, PrefillProgress):
                heard.append((event.done_tokens, now_s))
                say(event.done_tokens)
                n_points = len(points_of(heard))
                if n_points and now_s > ends_s + (0 if n_points > 1 else PREFILL_S):
                    break
    return points_of(heard)


def points_of(heard: Sequence[tuple[int, float]]) -> list[Point]:
    """Speeds between moments: each ``(tokens done, at seconds)``; a step's speed counts for its middle."""
    points: list[Point] = []
    before: tuple[int, float] | None = None
    for done, at_s in sorted(heard):
        if before is not None and done > before[0] and at_s > before[1]:
            points.append(Point((before[0] + done) // 2, (done - before[0]) / (at_s - before[1])))
        if before is None or done > before[0]:
            before = (done, at_s)
    return points


def _affordable(points: Sequence[Point], most: int) -> int:
    """How many tokens, in whole blocks, are computed in the time that there is for it."""
    tokens_s = statistics.median(point.tokens_s for point in points)
    n_blocks = int(min(MAX_RESTORED_TOKENS, most, EXPORT_S * tokens_s)) // BLOCK_TOKENS
    return max(1, n_blocks) * BLOCK_TOKENS


async def _restore(engine: Engine, tokens: Sequence[int], request: ExportRequest, exported: Exported) -> _Restore:
    """Two sizes, from a file that is still in memory: the difference is the rate, what is left is fixed."""
    large = len(request.tokens)
    sizes = sorted({BLOCK_TOKENS, large})
    seconds: list[float] = []
    for n_tokens in sizes:
        plan = scratch_restore(engine.info, request, exported, n_tokens=n_tokens)
        again = GenerateRequest(tokens[: n_tokens + 1], plan, max_tokens=1)
        measured = [(await last(engine.generate(again), Generated)).restore_s for _ in range(RESTORES)]
        seconds.append(statistics.median(measured))
    return restore_speed([n * engine.info.kv_bytes_per_token for n in sizes], seconds)


def restore_speed(sizes: Sequence[int], seconds: Sequence[float]) -> _Restore:
    """A rate and a fixed part out of one or two measured restores, the smaller first."""
    step_bytes, step_s = sizes[-1] - sizes[0], seconds[-1] - seconds[0]
    if len(sizes) < 2 or step_s <= 0:
        # All of it is put down to the bytes: nothing tells the parts apart.
        return _Restore(min(FASTEST_BYTES_S, sizes[-1] / max(seconds[-1], 1e-9)), 0.0)
    bytes_s = min(FASTEST_BYTES_S, step_bytes / step_s)
    return _Restore(bytes_s, max(0.0, seconds[0] - sizes[0] / bytes_s))


def _codecs(
    fingerprint: Fingerprint, n_tokens: int, tiles: Sequence[ChunkRef]
) -> tuple[dict[str, float], dict[str, float]]:
    """Raw bytes decoded per second, and stored by raw bytes, of each codec that can store them; blocking."""
    from kvnet.engine.tiles import decode_tile, encode_tile

    layers = fingerprint.layers
    plan = ChunkPlan(n_tokens=n_tokens, layers=layers, groups=layer_groups(layers), context_size_bytes=0)
    raws = [(plan[tile.index], _read(tile)) for tile in tiles]
    n_raw = sum(len(raw) for _, raw in raws)
    rates: dict[str, float] = {}
    shares: dict[str, float] = {Codec.RAW.value: 1.0}
    for codec in Codec:
        if codec is Codec.RAW:
            continue
        try:
            stored = [(spec, encode_tile(codec, layers, spec, raw)) for spec, raw in raws]
        except (CompatibilityError, MalformedError):
            continue
        shares[codec.value] = sum(len(each) for _, each in stored) / n_raw
        decoded, began_s = 0, time.perf_counter()
        while (spent_s := time.perf_counter() - began_s) < DECODE_S:
            decoded += sum(len(decode_tile(codec, layers, spec, each)) for spec, each in stored)
        rates[codec.value] = min(FASTEST_BYTES_S, decoded / spent_s)
    return rates, shares


def _read(tile: ChunkRef) -> bytes:
    handle = os.open(tile.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(handle, tile.length_bytes, tile.offset)
    finally:
        os.close(handle)


def finite(rate: float) -> float | None:
    """A rate for JSON, which knows no infinity."""
    return rate if math.isfinite(rate) else None
