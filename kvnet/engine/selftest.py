"""Does reuse work on this machine? Prefill, export, a new process, restore, decode; compared and timed.

The promise tested: continuing from restored state equals, bit for bit, the producer's own run that ended a prefill step
at the same token. Against a prefill in one shot the greedy text is the same and the largest logit difference is
reported: other step sizes take other kernels, which round differently.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import numpy as np

from kvnet.engine.client import open_engine
from kvnet.engine.generations import Generated, GenerateRequest, Logits, LogitsRequest
from kvnet.engine.interface import Engine, ModelInfo, OpenEngine
from kvnet.engine.kv_state import Exported, ExportRequest, RestorePlan
from kvnet.engine.scratch import new_pack, scratch_restore
from kvnet.errors import CompatibilityError, EngineError
from kvnet.format.prefix import common_prefix

DEFAULT_TOKENS = 512
"""Prefix length: two blocks, a minute or less on a CPU."""

DECODED_TOKENS = 16
"""Greedy tokens compared."""

NEAR_TIE = 1e-3
"""Two best logits closer than this may change places by rounding alone."""

NOISE_FACTOR = 4.0
"""Restored logits further off than this many times what another step size makes are no rounding any more."""

LEAST_NOISE = 1e-4
"""Taken for rounding when both step sizes happen to agree."""

_WORDS = (
    "In the quiet library near the harbour, the keeper wrote down every ship that passed: its name, its cargo, the "
    "weather, and the hour at which the light was lit. "
)

Progress = Callable[[str], None]
Final = TypeVar("Final")


@dataclass(frozen=True, slots=True)
class SelftestReport:
    """What was found.

    Attributes:
        model: the model tested.
        n_tokens: tokens restored.
        exact: restored logits equal those of the run that stopped at the same token, bit for bit.
        same_text: the greedy tokens after restored state equal the cold ones.
        max_logit_difference: largest difference to a prefill in one shot.
        restored_difference: largest difference to the run that stopped at the same token; 0 when exact.
        noise: largest difference between that run and the one in one shot: what rounding alone does here.
        tie_margin: how far apart the two best logits of the cold run are where the texts part; None when they do not.
        cold_ttft_s: seconds to the first token without reuse.
        restored_ttft_s: the same from restored state, in a new process.
        export_s: seconds to prefill and write.
        size_bytes: bytes exported.
    """

    model: ModelInfo
    n_tokens: int
    exact: bool
    same_text: bool
    max_logit_difference: float
    restored_difference: float
    noise: float
    tie_margin: float | None
    cold_ttft_s: float
    restored_ttft_s: float
    export_s: float
    size_bytes: int

    @property
    def near_tie(self) -> bool:
        """Whether the texts part only where the model itself is undecided."""
        return self.tie_margin is not None and self.tie_margin <= max(NEAR_TIE, 2 * self.noise)

    @property
    def passed(self) -> bool:
        """Whether reuse may be used on this machine."""
        return self.exact and (self.same_text or self.near_tie)

    @property
    def finding(self) -> str:
        """What it comes to, in a few words: rounding is told apart from damage."""
        if self.exact:
            if self.same_text:
                return "exact"
            return "exact, texts part at a near tie" if self.near_tie else "exact, texts part by rounding"
        if self.restored_difference <= NOISE_FACTOR * max(self.noise, LEAST_NOISE):
            return "rounding: other kernels ran after the restore"
        return "damage: restored state is not what was exported"


@dataclass(frozen=True, slots=True)
class _Produced:
    """What the first process leaves for the second."""

    info: ModelInfo
    tokens: list[int]
    plan: RestorePlan
    size_bytes: int
    export_s: float
    stopped: Logits
    one_shot: Logits
    cold: Generated


async def run_selftest(
    model_path: Path,
    work_dir: Path,
    *,
    n_tokens: int = DEFAULT_TOKENS,
    digest_cache: Path | None = None,
    progress: Progress = lambda _: None,
    opener: OpenEngine = open_engine,
) -> SelftestReport:
    """Runs the test with two engine processes, one after the other.

    Args:
        model_path: the model folder.
        work_dir: where the scratch pack goes; it is removed again.
        n_tokens: tokens to restore.
        digest_cache: see ``open_engine``.
        progress: told what happens next.
        opener: how engines are opened.

    Raises:
        CompatibilityError: the model's K/V cannot be shared.
        EngineError: the model cannot be loaded or run.
    """
    cache = digest_cache or work_dir / "digests.json"
    with TemporaryDirectory(dir=work_dir, prefix="selftest-") as scratch:
        progress("loading the model")
        async with opener(model_path, digest_cache=cache, work_dir=work_dir) as engine:
            made = await _produce(engine, new_pack(Path(scratch) / "pack"), n_tokens, progress)
        progress("starting a new engine process")
        async with opener(model_path, digest_cache=cache, work_dir=work_dir) as engine:
            return await _consume(engine, made, progress)


async def _produce(engine: Engine, pack: Path, n_tokens: int, progress: Progress) -> _Produced:
    if not engine.info.shareable:
        raise CompatibilityError(f"{engine.info.name} cannot be shared: {engine.info.refusal}")
    tokens = await _some_tokens(engine, n_tokens + 8)
    await _warm_up(engine, tokens)
    progress(f"cold run of {len(tokens)} tokens")
    cold = await last(engine.generate(GenerateRequest(tokens, max_tokens=DECODED_TOKENS)), Generated)
    progress(f"prefill and export of {n_tokens} tokens")
    request = ExportRequest(tokens[:n_tokens], None, pack, 0)
    exported = await last(engine.export(request), Exported)
    progress("reference runs")
    return _Produced(
        info=engine.info,
        tokens=tokens,
        plan=scratch_restore(engine.info, request, exported),
        size_bytes=sum(chunk.length_bytes for chunk in exported.chunks),
        export_s=exported.prefill_s,
        stopped=await engine.logits(LogitsRequest(tokens, stops=(n_tokens,))),
        one_shot=await engine.logits(LogitsRequest(tokens, one_shot=True)),
        cold=cold,
    )


async def _consume(engine: Engine, made: _Produced, progress: Progress) -> SelftestReport:
    await _warm_up(engine, made.tokens)
    progress("restore and decode")
    warm = await last(engine.generate(GenerateRequest(made.tokens, made.plan, max_tokens=DECODED_TOKENS)), Generated)
    restored = await engine.logits(LogitsRequest(made.tokens, made.plan))
    same_text = warm.tokens == made.cold.tokens
    return SelftestReport(
        model=made.info,
        n_tokens=made.plan.n_tokens,
        exact=restored.values == made.stopped.values,
        same_text=same_text,
        max_logit_difference=max_difference(restored, made.one_shot),
        restored_difference=max_difference(restored, made.stopped),
        noise=max_difference(made.stopped, made.one_shot),
        tie_margin=None if same_text else await _margin_where_they_part(engine, made, warm),
        cold_ttft_s=made.cold.ttft_s,
        restored_ttft_s=warm.ttft_s,
        export_s=made.export_s,
        size_bytes=made.size_bytes,
    )


async def _margin_where_they_part(engine: Engine, made: _Produced, warm: Generated) -> float:
    """How far apart the two best logits are, without reuse, after what both texts begin with."""
    shared = common_prefix(made.cold.tokens, warm.tokens)
    logits = await engine.logits(LogitsRequest([*made.tokens, *made.cold.tokens[:shared]], one_shot=True))
    second, best = np.sort(np.frombuffer(logits.values, "<f4"))[-2:]
    return float(best - second)


def max_difference(a: Logits, b: Logits) -> float:
    """The largest absolute difference of two sets of logits."""
    left, right = (np.frombuffer(logits.values, "<f4") for logits in (a, b))
    return float(np.max(np.abs(left - right)))


async def last(events: AsyncGenerator[object, None], kind: type[Final]) -> Final:
    """The last event of a request, which is of the given kind."""
    found: object = None
    async with aclosing(events):
        async for event in events:
            found = event
    if not isinstance(found, kind):
        raise EngineError(f"expected {kind.__name__} at the end of the request, found {type(found).__name__}")
    return found


async def _warm_up(engine: Engine, tokens: list[int]) -> None:
    # Unrelated tokens: the first run of a process pays for what later ones find ready.
    await last(engine.generate(GenerateRequest(tokens[:32][::-1], max_tokens=2)), Generated)


async def _some_tokens(engine: Engine, n_tokens: int) -> list[int]:
    tokens: list[int] = []
    repeats = 1
    while len(tokens) < n_tokens:
        text = "".join(f"{i}. {_WORDS}" for i in range(repeats))
        tokens = await engine.tokenize(text)
        repeats *= 2
    return tokens[:n_tokens]
