"""Complete: answer a client's request, continuing from the longest prefix in RAM, on disk or at peers.

Lookup and fetch happen before the engine is asked for anything, with a deadline; whatever goes wrong with them ends in
a plain local prefill. Once the answer has begun, a failure is the engine's and reaches the client as one.
"""

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import trio

from kvnet.engine.completions import CompletionBody, CompletionRequest, CompletionStarted
from kvnet.engine.interface import Engine, ModelInfo
from kvnet.engine.prompts import PreparedPrompt, PromptRequest
from kvnet.errors import BusyError, KvnetError, OverBudgetError, WindowError
from kvnet.exchange.admission import Signals
from kvnet.exchange.answers import Asked, Body, Finished, Reuse, Started
from kvnet.exchange.claims import Search
from kvnet.exchange.finder import PrefixFinder
from kvnet.exchange.keeping import Keeper, ToKeep
from kvnet.exchange.prefix_reuse import FetchPrefix, Prefix, PrefixReuse, Wanted
from kvnet.network.news import News
from kvnet.protocol.speeds import Machine

_log = logging.getLogger(__name__)


class Speeds(Protocol):
    """What this machine was measured to do."""

    def prefill_tokens_s(self, model: Path) -> float:
        """Tokens a second for the model in this folder; 0 when it was never measured."""
        ...

    def note(self, model: Path, n_tokens: int, seconds: float) -> None:
        """A prefill of ``n_tokens`` took ``seconds``."""
        ...

    def machine(self, info: ModelInfo) -> Machine | None:
        """What this machine was measured to do with a model; ``None`` when it never was."""
        ...


def ask_peers(finder: PrefixFinder, speeds: Speeds) -> FetchPrefix:
    """How a completion asks peers: for no longer than the prefill that it could spare is measured to take."""

    async def fetch_prefix(engine: Engine, wanted: Wanted, held_tokens: int) -> Search:
        return await finder.search(
            engine.info,
            wanted.tokens,
            held_tokens,
            ends=wanted.ends,
            prefill_tokens_s=speeds.prefill_tokens_s(engine.info.path),
            machine=speeds.machine(engine.info),
            live_tokens=wanted.live_tokens,
        )

    return fetch_prefix


class Completer:
    """Answers completion requests with whatever engine it is given.

    Args:
        reuse: finds what to continue from.
        speeds: measured prefill speeds: read for ``saved_s``, told of every prefill that was not private.
        keeper: keeps what is worth it, in the background; ``None`` to keep nothing on disk.
        used: told of every completion that was not private, once, when it is complete.
    """

    def __init__(
        self,
        reuse: PrefixReuse,
        *,
        speeds: Speeds,
        keeper: Keeper | None = None,
        used: Callable[[Finished], None] | None = None,
    ) -> None:
        self._reuse = reuse
        self._speeds = speeds
        self._keeper = keeper
        self._used = used
        self._draining = False
        self._running = 0
        self._idle = News()

    async def drain(self) -> None:
        """Refuse new requests, and return when the running ones are answered and the keeper has drained."""
        self._draining = True
        while self._running:
            await self._idle.wait()
        if self._keeper is not None:
            await self._keeper.drain()

    async def prepare(self, engine: Engine, asked: Asked) -> PreparedPrompt:
        """Tokenize a request's prompt, and nothing else.

        Raises:
            PromptError: the body holds no prompt that this model's template takes.
        """
        return await engine.prepare(PromptRequest(asked.kind, asked.body, asked.template_inputs, asked.marks))

    async def complete(self, engine: Engine, asked: Asked) -> AsyncGenerator[Started | Body | Finished, None]:
        """Answer a request: ``Started`` once, any number of ``Body``, ``Finished`` last.

        Raises:
            PromptError: the body holds no prompt that this model's template takes.
            WindowError: prompt and ``max_tokens`` are more than the window; the figures are in the message.
            OverBudgetError: they do not fit into memory.
            BusyError: there is no room now, or the node is shutting down.
            EngineError: the engine cannot answer; after ``Started`` only when it broke off.
        """
        if self._draining:
            raise BusyError("the node is shutting down", hint="Ask again when it is back.")
        self._running += 1
        try:
            async with aclosing(self._complete(engine, asked)) as events:
                async for event in events:
                    yield event
        finally:
            self._running -= 1
            if not self._running:
                self._idle.tell()

    async def _complete(self, engine: Engine, asked: Asked) -> AsyncGenerator[Started | Body | Finished, None]:
        began_s = trio.current_time()
        prepared = await self.prepare(engine, asked)
        require_room(engine.info, len(prepared.tokens), asked.max_tokens)
        wanted = Wanted(
            prepared.tokens,
            ends=tuple(boundary.n_tokens for boundary in prepared.boundaries),
            live_tokens=prepared.live_tokens,
            ask_peers=not asked.private,
            touch=not asked.private,
        )
        prefix = await self._reuse.find(engine, wanted) if asked.reuse else Prefix()
        answered = self._reuse.attempts(
            engine,
            wanted,
            prefix,
            lambda prefix: self._run(_Request(engine, asked, prepared, prefix, began_s)),
            has_begun=lambda _event: True,
        )
        async with aclosing(answered) as events:
            async for event in events:
                yield event

    async def _run(self, request: "_Request") -> AsyncGenerator[Started | Body | Finished, None]:
        """One attempt. What is told and kept of it happens before its last event, which nobody may wait for."""
        engine_began_s = trio.current_time()
        started: Started | None = None
        async with aclosing(request.engine.complete(self._for_engine(request))) as events:
            async for event in events:
                if isinstance(event, CompletionStarted):
                    started = Started(event.status, event.content_type, self._describe(request, event))
                    yield started
                elif isinstance(event, CompletionBody):
                    yield Body(event.data)
                elif started is not None:
                    ttft_s = engine_began_s - request.began_s + event.ttft_s
                    finished = Finished(event, started.reuse, ttft_s, trio.current_time() - request.began_s)
                    if started.status < BAD_REQUEST:
                        self._after(request, finished)
                    yield finished

    def _for_engine(self, request: "_Request") -> CompletionRequest:
        asked, prefix = request.asked, request.prefix
        return CompletionRequest(
            kind=asked.kind,
            body=asked.body,
            prompt=request.prepared,
            restore=prefix.plan,
            use_live=asked.reuse,
            keep_live=not asked.private,
            created_tokens=self._created_tokens(request),
        )

    def _after(self, request: "_Request", finished: Finished) -> None:
        """What an answer leaves behind: a measured speed, something to keep, a line in the ledger.

        Both may be files on a full disk; that is no reason to break off an answer that is complete.
        """
        done = finished.completed
        if request.asked.private:
            return
        if self._keeper is not None:
            tokens = (*request.prepared.tokens, *done.tokens)[: done.held_tokens]
            self._keeper.offer(ToKeep(request.engine, tokens, request.signals(done.held_tokens)))
        try:
            self._speeds.note(request.engine.info.path, done.prefilled_tokens, done.prefill_s)
            if self._used is not None:
                self._used(finished)
        except (KvnetError, OSError) as error:
            _log.warning("a completion was not noted: %s", error)

    def _describe(self, request: "_Request", started: CompletionStarted) -> Reuse:
        prefix, prepared = request.prefix, request.prepared
        reused = started.live_tokens + started.restored_tokens
        sources = prefix.sources(started.restored_tokens, started.restore_s)
        restored = prefix.hit if started.restored_tokens else None
        speed = self._speeds.prefill_tokens_s(request.engine.info.path)
        return Reuse(
            prompt_tokens=len(prepared.tokens),
            reused_tokens=reused,
            created_tokens=min(self._created_tokens(request), len(prepared.tokens) - reused),
            source="ram" if started.live_tokens else sources[0].source if sources else "none",
            sources=sources,
            saved_s=saved_seconds(reused, speed, prefix.lookup_s + started.restore_s),
            lookup_s=prefix.lookup_s,
            restore_s=started.restore_s,
            window_tokens=request.engine.info.window_tokens,
            verdict=restored.comparison.verdict if restored is not None else None,
            rejected=prefix.rejected,
            reasons=self._reasons(request, reused),
            prepared=prepared,
            plan=prefix.fetch_plan,
        )

    def _created_tokens(self, request: "_Request") -> int:
        """What will newly be kept, as far as it is known before the engine begins."""
        if self._keeper is None or not request.engine.info.shareable:
            return 0
        live_tokens = request.prepared.live_tokens if request.asked.reuse else 0
        plan = request.prefix.plan
        expected = max(live_tokens, plan.n_tokens if plan is not None else 0)
        signals = request.signals(len(request.prepared.tokens))
        return self._keeper.created_tokens(request.engine, signals, expected)

    def _reasons(self, request: "_Request", reused_tokens: int) -> tuple[str, ...]:
        """Why no more was reused: what turned artifacts down first, then what peers said, then what was never tried."""
        info, asked, prefix = request.engine.info, request.asked, request.prefix
        if reused_tokens >= len(request.prepared.tokens) - 1:
            return ()
        if not asked.reuse:
            return ("the request turned reuse off",)
        reasons = [*(rejected.text for rejected in prefix.rejected), *prefix.reasons]
        if not info.shareable:
            reasons.append(f"the model's K/V cannot be shared: {info.refusal}")
        elif asked.private:
            reasons.append("the request is private: no peer was asked")
        elif not self._reuse.asks_peers:
            reasons.append("this node is on no network: no peer was asked")
        if not reused_tokens:
            reasons.append("nothing held in RAM or on disk begins with these tokens")
        return tuple(dict.fromkeys(reasons))


BAD_REQUEST = 400
"""From this HTTP status on, an answer says why there is none."""


@dataclass(frozen=True, slots=True)
class _Request:
    """One attempt to answer a request, with what was found to continue from."""

    engine: Engine
    asked: Asked
    prepared: PreparedPrompt
    prefix: Prefix
    began_s: float

    def signals(self, held_tokens: int) -> Signals:
        return Signals(
            prompt_tokens=len(self.prepared.tokens),
            stable_tokens=self.prepared.stable_tokens,
            held_tokens=held_tokens,
            stored_tokens=self.prefix.stored_tokens,
            boundaries=self.prepared.boundaries,
            marks=self.asked.marks,
            mark_ttl_s=self.asked.mark_ttl_s,
            cache_key=self.asked.cache_key,
            private=self.asked.private,
        )


def saved_seconds(reused_tokens: int, prefill_tokens_s: float, cost_s: float) -> float:
    """Seconds of prefill that reuse spared, less what it cost; may be below 0.

    Args:
        reused_tokens: tokens that were not computed.
        prefill_tokens_s: measured prefill speed in tokens a second; 0 when unknown, and then the result is 0.
        cost_s: seconds of lookup, fetch and restore.
    """
    if not reused_tokens or prefill_tokens_s <= 0:
        return 0.0
    return reused_tokens / prefill_tokens_s - cost_s


def require_room(info: ModelInfo, prompt_tokens: int, max_tokens: int) -> None:
    """Refuse what can never be answered, before anybody is asked for a prefix of it.

    Raises:
        WindowError: prompt and answer are longer than the window.
        OverBudgetError: their K/V alone, with nothing else running, is more than the memory budget.
    """
    total = prompt_tokens + max_tokens
    if info.window_tokens and total > info.window_tokens:
        raise WindowError(
            f"the model's window is {info.window_tokens:,} tokens; the prompt has {prompt_tokens:,} and "
            f"{max_tokens:,} may be generated",
            hint="Shorten the prompt or lower max_tokens.",
        )
    needed = info.weights_size_bytes + total * info.kv_bytes_per_token
    if needed > info.memory_budget_bytes:
        raise OverBudgetError(
            f"the model and {total:,} tokens need {needed:,} bytes; the memory budget is "
            f"{info.memory_budget_bytes:,} bytes",
            hint="Shorten the prompt, lower max_tokens, or use a smaller model.",
        )
