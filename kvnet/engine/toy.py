"""A deterministic engine without MLX that fulfils the engine's contract; for simulated tests.

K/V rows are a pure function of the token prefix, and the text is a pure function of *all K/V rows*: whoever restores
one wrong byte gets another text. Work takes no time unless a cost is given, and then it sleeps on trio's clock, so a
mock clock drives it. It never uses threads.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import trio
from blake3 import blake3

from kvnet.engine import toy_answers
from kvnet.engine.completions import Completed, CompletionBody, CompletionEvent, CompletionRequest, CompletionStarted
from kvnet.engine.generations import (
    FirstToken,
    Generated,
    GenerateEvent,
    GenerateRequest,
    Logits,
    LogitsRequest,
    TextDelta,
)
from kvnet.engine.interface import Engine, LiveCaches, ModelInfo
from kvnet.engine.kv_state import (
    Exported,
    ExportEvent,
    ExportRequest,
    Origin,
    PrefillProgress,
    RestorePlan,
    WrittenChunk,
)
from kvnet.engine.prompts import JsonObject, PreparedPrompt, PromptRequest
from kvnet.engine.toy_model import (
    BOS,
    EOS,
    N_LAYERS,
    NO_ROWS,
    PREFILL_STEP,
    TURN,
    VOCABULARY,
    Rows,
    answer_tokens,
    extended,
    read_rows,
    rendered,
    step_begins,
    text_tokens,
    tokens_text,
    toy_fingerprint,
    write_tiles,
)
from kvnet.errors import CompatibilityError, CrowdedError, EngineError, NoLiveStateError, OverBudgetError, WindowError
from kvnet.format.fingerprint import LayerLayout, Producer
from kvnet.format.manifest import decode_manifest
from kvnet.format.prefix import common_prefix
from kvnet.format.sample import SAMPLE_VERSION, Sample, parts_of, sample_tokens


@dataclass(frozen=True, slots=True)
class ToyCosts:
    """Seconds the toy pretends to need."""

    prefill_s_per_token: float = 0.0
    decode_s_per_token: float = 0.0
    restore_s_per_token: float = 0.0


@asynccontextmanager
async def open_toy_engine(
    model_path: Path,
    *,
    digest_cache: Path | None = None,
    work_dir: Path | None = None,
    memory_budget_bytes: int | None = None,
    live_bytes: int | None = None,
    costs: ToyCosts | None = None,
    window_tokens: int = 1 << 20,
) -> AsyncIterator["ToyEngine"]:
    """A toy engine; ``model_path`` need not exist, its name alone is the model's identity."""
    del digest_cache, work_dir
    budget_bytes = memory_budget_bytes or 1 << 40
    engine = ToyEngine(model_path, costs or ToyCosts(), window_tokens, budget_bytes, live_bytes=live_bytes)
    yield engine
    await engine.aclose()


class ToyEngine(Engine):
    """See the module."""

    def __init__(
        self,
        model_path: Path,
        costs: ToyCosts,
        window_tokens: int,
        memory_budget_bytes: int,
        *,
        live_bytes: int | None = None,
    ) -> None:
        fingerprint = toy_fingerprint(model_path.name)
        self._costs = costs
        self.error = 0.0
        """What K/V in its sample is off by, as a share: another machine's arithmetic."""
        self._closed = False
        self._live: dict[tuple[int, ...], Rows] = {}
        self._origins: dict[tuple[int, ...], tuple[Origin, ...]] = {}
        self._live_bytes = memory_budget_bytes // 4 if live_bytes is None else live_bytes
        self._limit_bytes = memory_budget_bytes
        self._info = ModelInfo(
            name=model_path.name,
            path=model_path,
            fingerprint=fingerprint,
            producer=Producer(runtime="toy", versions="1", device="none", system="any", prefill_step=PREFILL_STEP),
            tokenizer_digest=blake3(b"toy tokenizer").digest(),
            template_digest=blake3(b"toy template").digest(),
            window_tokens=window_tokens,
            kv_bytes_per_token=fingerprint.layers.bytes_per_token,
            weights_size_bytes=0,
            memory_budget_bytes=memory_budget_bytes,
            shareable=True,
            refusal="",
        )

    @property
    def info(self) -> ModelInfo:
        """The toy model."""
        return self._info

    async def render(self, messages: Sequence[JsonObject], template_inputs: JsonObject) -> list[int]:
        """See ``Engine.render``; every template input is printed at the head."""
        await trio.lowlevel.checkpoint()
        return rendered(messages, template_inputs, answer=True)

    async def tokenize(self, text: str) -> list[int]:
        """See ``Engine.tokenize``."""
        await trio.lowlevel.checkpoint()
        return [BOS, *text_tokens(text)]

    async def context_tokens(self, messages: Sequence[JsonObject], template_inputs: JsonObject) -> list[int]:
        """See ``Engine.context_tokens``."""
        await trio.lowlevel.checkpoint()
        first, second = (
            rendered([*messages, {"role": "user", "content": question}], template_inputs, answer=True)
            for question in ("a", "b")
        )
        own = rendered(messages, template_inputs, answer=False)
        return first[: min(common_prefix(first, second), common_prefix(first, own))]

    async def export(self, request: ExportRequest) -> AsyncGenerator[ExportEvent, None]:
        """See ``Engine.export``."""
        tokens = self._admit(request.tokens, 0)
        began = trio.current_time()
        restored = await self._restore(request.restore, len(tokens))
        held, rows_held = self._held(tokens)
        origins: tuple[Origin, ...] = ()
        if rows_held is not None and held > len(restored):
            restored, origins = rows_held[:held], self._origins_of(tokens)
        if not request.prefill and len(restored) < len(tokens):
            raise NoLiveStateError(
                f"expected K/V of {len(tokens):,} tokens in RAM or the restore plan, found {len(restored):,}"
            )
        if request.first_block * 256 > len(restored):
            raise EngineError(f"blocks before {request.first_block} are not restored")
        restore_s, began = trio.current_time() - began, trio.current_time()
        rows, told = restored, 0
        written: tuple[WrittenChunk, ...] = ()
        for done in step_begins(len(restored), len(tokens)):
            rows = extended(rows, tokens[:done])
            written += write_tiles(request, self._layers, rows, written)
            yield PrefillProgress(done, len(tokens), written[told:], origins)
            told = len(written)
            await self._prefill_cost(done, len(tokens))
        written += write_tiles(request, self._layers, extended(rows, tokens), written)
        yield PrefillProgress(len(tokens), len(tokens), written[told:])
        prefill_s = trio.current_time() - began
        yield Exported(written, len(restored), len(tokens) - len(restored), restore_s, prefill_s, origins)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """See ``Engine.generate``."""
        accepted = trio.current_time()
        tokens = self._admit(request.tokens, request.max_tokens)
        restored = await self._restore(request.restore, len(tokens) - 1)
        restore_s, began = trio.current_time() - accepted, trio.current_time()
        for done in step_begins(len(restored), len(tokens) - 1):
            yield PrefillProgress(done, len(tokens))
            await self._prefill_cost(done, len(tokens) - 1)
        prefill_s = trio.current_time() - began
        rows = extended(restored, tokens)
        made: list[int] = []
        reason, ttft_s = "length", 0.0
        for token in answer_tokens(rows, request.max_tokens):
            await trio.sleep(self._costs.decode_s_per_token)
            if not made:
                ttft_s = trio.current_time() - accepted
                yield FirstToken(ttft_s)
            if token == EOS:
                reason = "stop"
                break
            made.append(token)
            yield TextDelta(tokens_text([token]), token)
        yield Generated(
            text=tokens_text(made),
            tokens=tuple(made),
            finish_reason=reason,
            ttft_s=ttft_s,
            restored_tokens=len(restored),
            prefilled_tokens=len(tokens) - len(restored),
            restore_s=restore_s,
            prefill_s=prefill_s,
        )

    async def logits(self, request: LogitsRequest) -> Logits:
        """See ``Engine.logits``: 64 values that depend on every K/V row."""
        tokens = self._admit(request.tokens, 0)
        restored = await self._restore(request.restore, len(tokens) - 1)
        digest = blake3(extended(restored, tokens).tobytes()).digest(length=64)
        values = np.frombuffer(digest, np.uint8).astype("<f4").tobytes()
        return Logits(values, (len(tokens) - 1,) * N_LAYERS)

    async def prepare(self, request: PromptRequest) -> PreparedPrompt:
        """See ``Engine.prepare``."""
        await trio.lowlevel.checkpoint()
        tokens, boundaries = toy_answers.prompt_of(request, rendered, lambda text: [BOS, *text_tokens(text)])
        return PreparedPrompt(tokens, boundaries, len(tokens), min(self._held(tokens)[0], len(tokens) - 1))

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[CompletionEvent, None]:
        """See ``Engine.complete``; of the parameters it knows ``max_tokens``, ``stream``, ``model`` and ``n``."""
        accepted = trio.current_time()
        asked = toy_answers.Asked.of(request)
        if asked.refusal:
            yield CompletionStarted(400, "application/json", 0, 0, 0.0)
            yield CompletionBody(asked.error_body())
            yield Completed((), "", 0, 0.0, 0, 0.0, 0.0)
            return
        tokens = self._admit(request.prompt.tokens, asked.max_tokens)
        rows, live_tokens = await self._beginning(request, tokens)
        restored = 0 if live_tokens else len(rows)
        restore_s, began = trio.current_time() - accepted, trio.current_time()
        yield CompletionStarted(200, asked.content_type, live_tokens, restored, restore_s)
        await trio.sleep((len(tokens) - len(rows)) * self._costs.prefill_s_per_token)
        prefill_s, begun_with, rows = trio.current_time() - began, len(rows), extended(rows, tokens)
        made: list[int] = []
        ttft_s, reason = 0.0, "length"
        for token in answer_tokens(rows, asked.max_tokens):
            await trio.sleep(self._costs.decode_s_per_token)
            ttft_s = ttft_s or trio.current_time() - accepted
            if token == EOS:
                reason = "stop"
                break
            made.append(token)
            if asked.stream:
                yield CompletionBody(asked.piece(tokens_text([token])))
        yield CompletionBody(asked.end(tokens_text(made), reason, len(tokens), len(made), live_tokens + restored))
        origins = self._origins_of(tokens) if live_tokens else ()
        if restored and request.restore is not None:
            origins = (Origin(request.restore.manifest, restored),)
        kept = request.keep_live and self._keep([*tokens, *made], rows)
        if kept:
            self._origins[(*tokens, *made)] = origins
        yield Completed(
            tokens=tuple(made),
            finish_reason=reason,
            held_tokens=len(tokens) + len(made) if kept else 0,
            ttft_s=ttft_s,
            prefilled_tokens=len(tokens) - begun_with,
            prefill_s=prefill_s,
            decode_s=trio.current_time() - accepted - ttft_s,
        )

    async def _beginning(self, request: CompletionRequest, tokens: list[int]) -> tuple[Rows, int]:
        """Rows to continue from, and how many of them are a live cache's."""
        limit = len(tokens) - 1
        live_tokens, rows = self._held(tokens) if request.use_live else (0, None)
        live_tokens = min(live_tokens, limit)
        planned = min(request.restore.n_tokens, limit) if request.restore is not None else 0
        if rows is not None and live_tokens >= planned:
            return rows[:live_tokens], live_tokens
        return await self._restore(request.restore, limit), 0

    def _held(self, tokens: Sequence[int]) -> tuple[int, Rows | None]:
        """The longest beginning of which a live cache has the rows, and these."""
        shared = max(self._live, key=lambda held: common_prefix(held, tokens), default=())
        return common_prefix(shared, tokens), self._live.get(shared)

    def _origins_of(self, tokens: Sequence[int]) -> tuple[Origin, ...]:
        """What the live cache that ``_held`` chooses was restored from."""
        return self._origins.get(max(self._live, key=lambda held: common_prefix(held, tokens), default=()), ())

    def _keep(self, tokens: list[int], rows: Rows) -> bool:
        """Keeps the rows of these tokens if they fit; those kept first make room."""
        rows = extended(rows, tokens)
        room_bytes = min(self._live_bytes, self._limit_bytes - self.info.weights_size_bytes)
        fits = rows.nbytes <= room_bytes
        if fits:
            self._evict_to(room_bytes - rows.nbytes)
            self._live[tuple(tokens)] = rows
        return fits

    def _evict_to(self, size_bytes: int) -> None:
        while self._live and sum(rows.nbytes for rows in self._live.values()) > size_bytes:
            del self._live[next(iter(self._live))]

    async def text_of(self, tokens: Sequence[int]) -> str:
        """See ``Engine.text_of``; special tokens are shown by their names."""
        await trio.lowlevel.checkpoint()
        names = {BOS: "<s>", EOS: "</s>", TURN: "<turn>"}
        return "".join(names.get(token, "") or tokens_text([token]) for token in tokens)

    async def live(self) -> LiveCaches:
        """See ``Engine.live``."""
        await trio.lowlevel.checkpoint()
        return LiveCaches(len(self._live), sum(rows.nbytes for rows in self._live.values()), self._live_bytes)

    async def limit_memory(self, limit_bytes: int) -> int:
        """See ``Engine.limit_memory``; what runs is not counted."""
        await trio.lowlevel.checkpoint()
        self._limit_bytes = max(limit_bytes, self.info.weights_size_bytes)
        self._evict_to(self._limit_bytes - self.info.weights_size_bytes)
        return self._limit_bytes

    async def drop_live(self) -> None:
        """See ``Engine.drop_live``."""
        await trio.lowlevel.checkpoint()
        self._live.clear()

    async def sample(self) -> bytes:
        """See ``Engine.sample``."""
        if self._closed:
            raise EngineError("the engine is closed")
        tokens = sample_tokens(VOCABULARY)
        for done in step_begins(0, len(tokens)):
            await self._prefill_cost(done, len(tokens))
        rows = extended(NO_ROWS, tokens) * np.float32(1.0 + self.error)
        parts = [rows[part.position, part.layer, int(part.values)] for part in parts_of(self._layers)]
        fingerprint = toy_fingerprint(self._info.name)
        return Sample(
            version=SAMPLE_VERSION,
            fingerprint=fingerprint.hash,
            producer=self._info.producer,
            vocabulary=VOCABULARY,
            rows=b"".join(np.ascontiguousarray(part, dtype="<f4").tobytes() for part in parts),
        ).encode()

    async def aclose(self) -> None:
        """See ``Engine.aclose``."""
        self._closed = True
        await trio.lowlevel.checkpoint()

    @property
    def _layers(self) -> LayerLayout:
        return toy_fingerprint(self._info.name).layers

    def _admit(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        if self._closed:
            raise EngineError("the engine is closed")
        if not tokens:
            raise EngineError("expected at least one token, found none")
        total = len(tokens) + max_tokens
        if total > self._info.window_tokens:
            raise WindowError(f"the model's window is {self._info.window_tokens:,} tokens; {total:,} asked for")
        needed = total * self._info.kv_bytes_per_token
        if needed > self._info.memory_budget_bytes:
            raise OverBudgetError(
                f"{total:,} tokens need {needed:,} bytes; the memory budget is {self._info.memory_budget_bytes:,} bytes"
            )
        if needed > self._limit_bytes - self.info.weights_size_bytes:
            raise CrowdedError(
                f"{total:,} tokens need {needed:,} bytes; {self._limit_bytes:,} bytes are left to this model"
            )
        return list(tokens)

    async def _prefill_cost(self, done: int, end: int) -> None:
        step_end = min((done // PREFILL_STEP + 1) * PREFILL_STEP, end)
        await trio.sleep((step_end - done) * self._costs.prefill_s_per_token)

    async def _restore(self, plan: RestorePlan | None, limit: int) -> Rows:
        await trio.lowlevel.checkpoint()
        if plan is None or limit == 0:
            return NO_ROWS
        manifest = decode_manifest(plan.manifest)
        expected = toy_fingerprint(self._info.name)
        if manifest.fingerprint.hash != expected.hash:
            raise CompatibilityError("the artifact's fingerprint is not that of the loaded model")
        if not 0 < plan.n_tokens <= manifest.n_tokens:
            raise CompatibilityError(f"expected to reuse 1 to {manifest.n_tokens} tokens, found {plan.n_tokens}")
        n_tokens = min(plan.n_tokens, limit)
        rows = read_rows(plan, manifest, n_tokens)
        await trio.sleep(n_tokens * self._costs.restore_s_per_token)
        return rows
