"""The toy engine with live caches, answering chat bodies: what completions are simulated with."""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import trio
from blake3 import blake3

from kvnet.engine.completions import Completed, CompletionBody, CompletionEvent, CompletionRequest, CompletionStarted
from kvnet.engine.interface import LiveCaches
from kvnet.engine.kv_state import Exported, ExportEvent, ExportRequest, Origin
from kvnet.engine.prompts import Boundary, BoundaryKind, PreparedPrompt, PromptRequest
from kvnet.engine.toy import ToyCosts, ToyEngine
from kvnet.engine.toy_model import EOS, FIRST_BYTE, Rows, extended, next_token, rendered, tokens_text, write_tiles
from kvnet.errors import EngineCrashedError, NoLiveStateError, PromptError
from kvnet.format.prefix import common_prefix

ANSWER_TOKENS = 12


@dataclass(frozen=True)
class Live:
    """K/V held in RAM, and what it came from."""

    tokens: tuple[int, ...]
    rows: Rows
    origins: tuple[Origin, ...]


class TalkingEngine(ToyEngine):
    """See the module.

    Attributes:
        lives: what is held in RAM.
        exports: exports that were begun.
        crash_at_token: break off at this token of the next answer; -1 for never.
    """

    def __init__(self, model_path: Path, costs: ToyCosts | None = None, window_tokens: int = 1 << 20) -> None:
        super().__init__(model_path, costs or ToyCosts(), window_tokens, 1 << 40)
        self.lives: list[Live] = []
        self.exports = 0
        self.crash_at_token = -1

    def _longest(self, tokens: Sequence[int]) -> tuple[int, Live | None]:
        best: tuple[int, Live | None] = (0, None)
        for live in self.lives:
            shared = common_prefix(live.tokens, tokens)
            if shared > best[0]:
                best = (shared, live)
        return best

    async def prepare(self, request: PromptRequest) -> PreparedPrompt:
        await trio.lowlevel.checkpoint()
        messages = json.loads(request.body).get("messages")
        if not messages:
            raise PromptError("expected messages, found none")
        tokens = rendered(messages, request.template_inputs, answer=True)
        ends = [len(rendered(messages[:n], request.template_inputs, answer=False)) for n in range(1, len(messages) + 1)]
        boundaries = tuple(Boundary(end, BoundaryKind.MESSAGE, n + 1) for n, end in enumerate(ends))
        live = min(self._longest(tokens)[0], len(tokens) - 1)
        return PreparedPrompt(tuple(tokens), boundaries, len(tokens), live)

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[CompletionEvent, None]:
        accepted_s = trio.current_time()
        tokens = list(request.prompt.tokens)
        shared, live = self._longest(tokens) if request.use_live else (0, None)
        shared = min(shared, len(tokens) - 1)
        rows = await self._restore(None, 0)
        origins: tuple[Origin, ...] = ()
        planned = request.restore.n_tokens if request.restore is not None else 0
        if request.restore is not None and planned > shared:
            rows = await self._restore(request.restore, len(tokens) - 1)
            origins, shared = (Origin(request.restore.manifest, len(rows)),), 0
        elif live is not None:
            rows, origins = live.rows[:shared], _cut(live.origins, shared)
        live_tokens, restored = (shared, 0) if shared else (0, len(rows))
        restore_s = trio.current_time() - accepted_s
        yield CompletionStarted(200, "application/json", live_tokens, restored, restore_s)
        began_s = trio.current_time()
        await self._prefill_cost_of(len(tokens) - len(rows))
        prefill_s = trio.current_time() - began_s
        made: list[int] = []
        answer_rows = extended(rows, tokens)
        state = blake3(answer_rows.tobytes())
        for n in range(ANSWER_TOKENS):
            if n == self.crash_at_token:
                self.crash_at_token = -1
                raise EngineCrashedError("the engine process ended")
            token = next_token(state.digest())
            token = FIRST_BYTE + ord("a") if token == EOS else token
            made.append(token)
            state.update(token.to_bytes(4, "little"))
            yield CompletionBody(tokens_text([token]).encode())
        whole = [*tokens, *made]
        if request.keep_live:
            held = whole[:-1]
            self.lives.append(Live(tuple(held), extended(answer_rows, held), origins))
        yield Completed(
            tokens=tuple(made),
            finish_reason="length",
            held_tokens=len(whole) - 1 if request.keep_live else 0,
            ttft_s=trio.current_time() - accepted_s,
            prefilled_tokens=len(tokens) - len(rows),
            prefill_s=prefill_s,
            decode_s=0.0,
        )

    async def _prefill_cost_of(self, n_tokens: int) -> None:
        await trio.sleep(n_tokens * self._costs.prefill_s_per_token)

    async def export(self, request: ExportRequest) -> AsyncGenerator[ExportEvent, None]:
        if request.prefill:
            async with aclosing(super().export(request)) as events:
                async for event in events:
                    yield event
            return
        self.exports += 1
        await trio.lowlevel.checkpoint()
        shared, live = self._longest(request.tokens)
        if live is None or shared < len(request.tokens):
            raise NoLiveStateError("no live cache holds these tokens")
        rows = live.rows[: len(request.tokens)]
        written = write_tiles(request, self._layers, rows)
        yield Exported(written, len(rows), 0, 0.0, 0.0, _cut(live.origins, len(rows)))

    async def text_of(self, tokens: Sequence[int]) -> str:
        await trio.lowlevel.checkpoint()
        return tokens_text(tokens)

    async def live(self) -> LiveCaches:
        await trio.lowlevel.checkpoint()
        return LiveCaches(len(self.lives), sum(live.rows.nbytes for live in self.lives))

    async def drop_live(self) -> None:
        await trio.lowlevel.checkpoint()
        self.lives.clear()


def _cut(origins: tuple[Origin, ...], n_tokens: int) -> tuple[Origin, ...]:
    return tuple(Origin(origin.manifest, min(origin.n_tokens, n_tokens)) for origin in origins)


def body(*messages: tuple[str, str]) -> bytes:
    """A chat body of (role, text) messages."""
    return json.dumps({"messages": [{"role": role, "content": text} for role, text in messages]}).encode()
