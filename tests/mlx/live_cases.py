"""Cases of live caches, each run in a process of its own: ``python -m tests.mlx.live_cases FOLDER CASE``.

They drive the prefill lane and the decode thread themselves: a process that ends under a living MLX thread aborts, so
that each case ends with ``os._exit``.
"""

import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kvnet.engine.mlx import blas, runtime

REPORT = blas.preload()
runtime.import_mlx_lm()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from kvnet.engine.interface import (  # noqa: E402
    Boundary,
    BoundaryKind,
    CompletionRequest,
    ExportRequest,
    GenerateRequest,
    Origin,
    PreparedPrompt,
    PromptKind,
    RestorePlan,
)
from kvnet.engine.mlx.budget import Budget  # noqa: E402
from kvnet.engine.mlx.caches import HEADROOM_TOKENS  # noqa: E402
from kvnet.engine.mlx.decoding import DecodeThread, Generation  # noqa: E402
from kvnet.engine.mlx.fingerprinting import DigestCache  # noqa: E402
from kvnet.engine.mlx.lane import Lane, Prefilled, Reused, Runner  # noqa: E402
from kvnet.engine.mlx.live import Shelf, size_of  # noqa: E402
from kvnet.engine.mlx.loader import load_folder  # noqa: E402
from kvnet.engine.mlx.prefill import prefill, step_ends  # noqa: E402
from kvnet.engine.mlx.requests import CancelledRequestError, Request  # noqa: E402
from kvnet.engine.scratch import scratch_restore  # noqa: E402
from kvnet.engine.wire import ExportedEvent, FailedEvent, GeneratedEvent, Record  # noqa: E402
from kvnet.engine.wire_values import written_chunks  # noqa: E402
from kvnet.errors import BusyError, NoLiveStateError, OverBudgetError, WindowError  # noqa: E402
from kvnet.format.hashes import blake3_hash  # noqa: E402
from kvnet.format.prefix import tokens_from_bytes  # noqa: E402
from tests.mlx import tinymodels  # noqa: E402
from tests.mlx.requests import made_up_tokens  # noqa: E402

LENGTHS = (1, 2, 5, 255, 256, 257, 511, 512, 513)


@dataclass
class Answer:
    """A finished completion."""

    tokens: list[int]
    reused: Reused
    held_tokens: int


@dataclass
class Running:
    """A completion on its way."""

    request: Request
    ended: "queue.SimpleQueue[Any]" = field(default_factory=queue.SimpleQueue)
    first: threading.Event = field(default_factory=threading.Event)
    reused: Reused | None = None
    held_tokens: int = 0

    def result(self) -> Answer:
        item = self.ended.get(timeout=120)
        if isinstance(item, Exception):
            raise item
        assert self.reused is not None
        return Answer(list(tokens_from_bytes(item.tokens)), self.reused, self.held_tokens)


class Bench:
    """A model with a lane, a decode thread and a shelf."""

    def __init__(self, model: Path, *, live_bytes: int = 1 << 30, limit_bytes: int = 8 << 30, wait_s: float = 60.0):
        self.loaded = load_folder(model, digests=DigestCache(None), blas=REPORT, memory_budget_bytes=limit_bytes)
        info = self.loaded.info
        self.shelf = Shelf(live_bytes)
        self.budget = Budget(
            weights_size_bytes=info.weights_size_bytes,
            cost=self.loaded.cost,
            window_tokens=info.window_tokens,
            limit_bytes=limit_bytes,
            live=self.shelf,
            live_bytes=live_bytes,
            wait_s=wait_s,
        )
        self.decode = DecodeThread(self.loaded.model, self.loaded.tokenizer)
        self.lane = Lane()
        self.runner = Runner(
            self.loaded,
            self.budget,
            self.decode,
            self.shelf,
            waiting=self.lane.shared_by_waiting,
            give_way=self.lane.give_way,
        )
        self.decode.start()
        self.lane.start()
        self._ids = iter(range(1, 1 << 30))

    def start(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int = 8,
        boundaries: tuple[Boundary, ...] = (),
        stable: int = 0,
        restore: RestorePlan | None = None,
        use_live: bool = True,
        keep_live: bool = True,
        on_started: Callable[[Running], None] = lambda _: None,
        on_token: Callable[[Running], None] = lambda _: None,
    ) -> Running:
        running: Running

        def send(event: Record) -> None:
            if isinstance(event, GeneratedEvent):
                running.ended.put(event)
            elif isinstance(event, FailedEvent):
                running.ended.put(RuntimeError(event.code, event.message))
            elif type(event).__name__ == "DeltaEvent":
                running.first.set()
                on_token(running)

        running = Running(Request(next(self._ids), send))
        asked = CompletionRequest(
            PromptKind.TEXT, b"{}", PreparedPrompt(tuple(tokens), boundaries, stable, 0), restore, use_live, keep_live
        )

        def started(reused: Reused) -> None:
            running.reused = reused
            on_started(running)

        def generation(ready: Prefilled) -> Generation:
            def finished(caches: list[Any], held: list[int]) -> int:
                running.held_tokens = ready.finished(caches, held)
                if running.request.cancelled:
                    running.ended.put(CancelledRequestError())
                return running.held_tokens

            return Generation(
                request=running.request,
                caches=ready.caches,
                tokens=ready.tokens,
                logits=ready.logits,
                max_tokens=max_tokens,
                restored_tokens=ready.reused.live_tokens + ready.reused.restored_tokens,
                restore_s=ready.reused.restore_s,
                prefill_s=ready.prefill_s,
                release=ready.release,
                finished=finished,
            )

        self.lane.submit(
            running.request,
            lambda: self.runner.complete(running.request, asked, max_tokens, started=started, generation=generation),
            tokens=tokens,
            failed=running.ended.put,
        )
        return running

    def complete(self, tokens: Sequence[int], **named: Any) -> Answer:
        return self.start(tokens, **named).result()

    def cold(self, tokens: Sequence[int], max_tokens: int = 8) -> list[int]:
        """What a plain generation answers."""
        ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        request = Request(
            next(self._ids), lambda e: ended.put(e) if isinstance(e, GeneratedEvent | FailedEvent) else None
        )
        self.lane.submit(
            request, lambda: self.runner.generate(request, GenerateRequest(list(tokens), None, max_tokens))
        )
        event = ended.get(timeout=120)
        assert isinstance(event, GeneratedEvent), event
        return list(tokens_from_bytes(event.tokens))

    def start_export(self, asked: ExportRequest) -> "queue.SimpleQueue[Any]":
        ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        request = Request(next(self._ids), lambda e: ended.put(e) if isinstance(e, ExportedEvent) else None)
        asked.pack_path.touch(mode=0o600)
        self.lane.submit(
            request,
            lambda: self.runner.export(request, asked),
            background=asked.background,
            tokens=asked.tokens,
            failed=ended.put,
        )
        return ended

    def export(self, tokens: Sequence[int], pack: Path, **named: Any) -> ExportedEvent:
        item = self.start_export(ExportRequest(list(tokens), named.pop("restore", None), pack, 0, **named)).get(
            timeout=120
        )
        if isinstance(item, Exception):
            raise item
        assert isinstance(item, ExportedEvent)
        return item

    def plan(self, tokens: Sequence[int], pack: Path, **named: Any) -> RestorePlan:
        from kvnet.engine.interface import Exported

        event = self.export(tokens, pack, **named)
        request = ExportRequest(list(tokens), None, pack, 0)
        exported = Exported(written_chunks(event.chunks), event.restored_tokens, event.prefilled_tokens, 0.0, 0.0)
        return scratch_restore(self.loaded.info, request, exported)


def refused(kind: type[Exception], action: Callable[[], Any]) -> str:
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")


def until(condition: Callable[[], bool]) -> None:
    """Waits for what another thread does."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.001)


def llama(folder: Path) -> Path:
    return tinymodels.write_model(folder / "llama")


def every_length_from_live_equals_cold(folder: Path) -> None:
    bench = Bench(llama(folder))
    tokens = made_up_tokens(max(LENGTHS) + 20)
    bench.complete(tokens)
    for n in LENGTHS:
        prompt = tokens[:n] + made_up_tokens(7, seed=n)
        answer = bench.complete(prompt, keep_live=False)
        assert answer.tokens == bench.cold(prompt), n
        assert answer.reused.live_tokens == n or (n < 10 and answer.reused.live_tokens >= n), answer.reused


def the_same_prompt_twice_and_one_token_more_or_less_equal_cold(folder: Path) -> None:
    bench = Bench(llama(folder))
    tokens = made_up_tokens(301)
    first = bench.complete(tokens[:300])
    assert first.reused.live_tokens == 0
    assert first.held_tokens == 300 + len(first.tokens)
    for n, live in ((300, 299), (300, 299), (301, 300), (299, 298), (1, 0)):
        answer = bench.complete(tokens[:n])
        assert answer.tokens == bench.cold(tokens[:n]), n
        assert answer.tokens
        # The answer of the first may happen to begin with the 301st token.
        assert answer.reused.live_tokens == live, (n, answer.reused)


def a_conversation_continues_from_its_own_answer(folder: Path) -> None:
    bench = Bench(llama(folder))
    bench.shelf.min_move_bytes = 1
    tokens = made_up_tokens(700)
    previous = 0
    for turn in range(4):
        answer = bench.complete(tokens, max_tokens=20)
        assert answer.tokens == bench.cold(tokens, 20), turn
        assert answer.reused.live_tokens == previous, turn
        # The last token told was never fed.
        assert answer.held_tokens in {len(tokens) + 19, len(tokens) + 20}
        previous = answer.held_tokens
        tokens = tokens + answer.tokens + made_up_tokens(9, seed=turn)
        assert bench.shelf.figures().n_caches == 1


def layers_that_cannot_be_cut_continue_at_boundaries_only(folder: Path) -> None:
    for name in ("SLIDING_WINDOW", "MAMBA"):
        bench = Bench(tinymodels.write_model(folder / name, getattr(tinymodels, name)))
        for system in (15, 16, 17, 40, 300):
            tokens = made_up_tokens(system + 60, seed=system)
            boundaries = (
                Boundary(system, BoundaryKind.SYSTEM, 1),
                Boundary(system + 30, BoundaryKind.MESSAGE, 2),
                Boundary(system + 55, BoundaryKind.STABLE, 3),
            )
            named: dict[str, Any] = {"boundaries": boundaries, "stable": system + 55, "max_tokens": 20}
            first = bench.complete(tokens, **named)
            assert (first.tokens, first.reused.live_tokens) == (bench.cold(tokens, 20), 0), (name, system)
            for shared, live in ((system, system), (system + 40, system + 30), (system + 57, system + 55)):
                prompt = [*tokens[:shared], 3, *made_up_tokens(25, seed=1)]
                answer = bench.complete(prompt, **{**named, "boundaries": (), "stable": 0}, keep_live=False)
                assert answer.reused.live_tokens == live, (name, system, shared, answer.reused)
                assert answer.tokens == bench.cold(prompt, 20), (name, system, shared)
            again = bench.complete(tokens, **named)
            assert (again.tokens, again.reused.live_tokens) == (first.tokens, system + 55)
            longer = tokens + first.tokens + made_up_tokens(5, seed=2)
            answer = bench.complete(longer, max_tokens=20)
            assert answer.reused.live_tokens == first.held_tokens, (name, system, answer.reused)
            assert answer.tokens == bench.cold(longer, 20), (name, system)


def simultaneous_requests_over_one_live_cache_and_an_export_equal_sequential_ones(folder: Path) -> None:
    for move in (1, 1 << 40):
        bench = Bench(llama(folder))
        bench.shelf.min_move_bytes = move
        prefix = made_up_tokens(600)
        prompts = [prefix + made_up_tokens(3 + 5 * i, seed=i) for i in range(8)]
        alone = [bench.cold(prompt, 6 + 3 * i) for i, prompt in enumerate(prompts)]
        bench.complete(prefix, max_tokens=1)
        stored = None
        for number in range(5):
            running = [bench.start(prompt, max_tokens=6 + 3 * i) for i, prompt in enumerate(prompts)]
            pack = folder / f"pack-{move}-{number}"
            background = bool(number % 2)
            export = bench.start_export(ExportRequest(prefix, None, pack, 0, prefill=False, background=background))
            answers = [one.result() for one in running]
            assert [answer.tokens for answer in answers] == alone, number
            assert all(answer.reused.live_tokens >= 600 for answer in answers), [a.reused for a in answers]
            event = export.get(timeout=120)
            assert isinstance(event, ExportedEvent), event
            data = pack.read_bytes()
            assert all(blake3_hash(data[c.offset : c.offset + c.length]) == c.hash for c in event.chunks)
            assert stored in {None, data}
            stored = data


def a_moved_cache_comes_back_after_cancellation(folder: Path) -> None:
    bench = Bench(llama(folder))
    bench.shelf.min_move_bytes = 1
    tokens = made_up_tokens(700)
    held = bench.complete(tokens).held_tokens
    longer = tokens + bench.cold(tokens) + made_up_tokens(1500, seed=1)
    assert bench.shelf.covered(longer) == held

    def give_up(running: Running) -> None:
        assert bench.shelf.figures().n_caches == 0
        running.request.cancel()

    # In the lane: before prefill; and in the decode thread: after the third token.
    refused(CancelledRequestError, lambda: bench.complete(longer, on_started=give_up))
    until(lambda: bench.shelf.covered(longer) >= held)
    count = iter(range(1000))
    running = bench.start(longer, max_tokens=400, on_token=lambda r: r.request.cancel() if next(count) == 3 else None)
    refused(CancelledRequestError, running.result)
    assert bench.shelf.covered(longer) == len(longer)
    answer = bench.complete(longer)
    assert answer.reused.live_tokens == len(longer) - 1
    assert answer.tokens == bench.cold(longer)
    assert bench.shelf.figures().n_caches == 1


def private_requests_leave_nothing_and_take_nothing_away(folder: Path) -> None:
    bench = Bench(llama(folder))
    bench.shelf.min_move_bytes = 1
    tokens = made_up_tokens(300)
    boundaries = (Boundary(200, BoundaryKind.SYSTEM, 1),)
    assert bench.complete(tokens, keep_live=False, boundaries=boundaries).held_tokens == 0
    assert bench.shelf.figures().n_caches == 0
    for stop in ("on_started", "on_token"):
        named: dict[str, Any] = {stop: lambda running: running.request.cancel()}
        running = bench.start(tokens, keep_live=False, max_tokens=300, **named)
        refused(CancelledRequestError, running.result)
        assert bench.shelf.figures().n_caches == 0
    held = bench.complete(tokens).held_tokens
    size = bench.shelf.size_bytes
    private = tokens + bench.cold(tokens) + [5, 6, 7]
    answer = bench.complete(private, keep_live=False)
    assert (answer.reused.live_tokens, answer.held_tokens) == (held, 0)
    assert (bench.shelf.size_bytes, bench.shelf.covered(private)) == (size, held)
    # And a request that must not use live caches computes everything.
    assert bench.complete(private, use_live=False, keep_live=False).reused.live_tokens == 0


def state_that_cannot_be_shared_counts_as_much_as_it_takes(folder: Path) -> None:
    for name in ("LLAMA", "SLIDING_WINDOW", "MAMBA", "MLA"):
        model = tinymodels.write_model(folder / name, getattr(tinymodels, name))
        loaded = Bench(model).loaded
        for n_tokens in (1, 300, 1024, 1900):
            caches = loaded.new_caches()
            ends = step_ends(0, n_tokens, loaded.info.producer.prefill_step)
            tokens = made_up_tokens(n_tokens)
            prefill(loaded.model, caches, tokens, start=0, ends=ends, between=lambda _: None)
            size = size_of(caches)
            assert size <= loaded.cost.bytes_for(n_tokens + HEADROOM_TOKENS), (name, n_tokens)
            assert size >= loaded.cost.bytes_for(n_tokens) // 2 or n_tokens == 1, (name, n_tokens)
        room = Bench(model, limit_bytes=loaded.info.weights_size_bytes + loaded.cost.bytes_for(HEADROOM_TOKENS + 900))
        assert room.complete(made_up_tokens(800), max_tokens=3, keep_live=False).tokens
        if name == "MAMBA":
            # Its state is as large after one token as after a thousand.
            assert room.complete(made_up_tokens(1200), max_tokens=3, keep_live=False).tokens
        else:
            refused(OverBudgetError, partial(room.complete, made_up_tokens(1200)))


def live_caches_go_when_running_requests_need_their_memory(folder: Path) -> None:
    model = llama(folder)
    per_token = 2 * 2 * (16 + 16) * 4
    weights = Bench(model).loaded.info.weights_size_bytes
    bench = Bench(model, limit_bytes=weights + 4000 * per_token, live_bytes=3000 * per_token)
    first, second, third = (made_up_tokens(400, seed=seed) for seed in range(3))
    for tokens in (first, second, first):
        bench.complete(tokens)
    assert bench.shelf.covered(first) == bench.shelf.covered(second) == 400
    bench.complete(made_up_tokens(2500, seed=9), keep_live=False)
    assert bench.shelf.covered(second) == 0, "the one used longest ago goes first"
    assert bench.shelf.covered(first) == 400
    bench.complete(made_up_tokens(3500, seed=9), keep_live=False)
    assert bench.shelf.figures().n_caches == 0
    # What is wanted itself is moved rather than copied when both do not fit.
    bench.complete(third)
    longer = third + bench.cold(third) + made_up_tokens(3300, seed=4)
    answer = bench.complete(longer, max_tokens=4)
    assert answer.reused.live_tokens >= 400
    assert answer.tokens == bench.cold(longer, 4)
    refused(OverBudgetError, lambda: bench.complete(made_up_tokens(4050)))
    assert "window is 4,096" in refused(WindowError, lambda: bench.complete(made_up_tokens(4090)))


def system_prompts_are_evicted_last(folder: Path) -> None:
    bench = Bench(llama(folder), live_bytes=2700 * 512)
    system = made_up_tokens(300)
    boundaries = (Boundary(300, BoundaryKind.SYSTEM, 1),)
    for turn in range(6):
        tokens = system + made_up_tokens(60 + 5 * turn, seed=turn)
        answer = bench.complete(tokens, boundaries=boundaries)
        assert answer.reused.live_tokens >= (300 if turn else 0)
        assert answer.tokens == bench.cold(tokens)
        bench.complete(made_up_tokens(700, seed=100 + turn))
        assert bench.shelf.covered(system) == 300, turn
        assert bench.shelf.size_bytes <= 2700 * 512


def waiting_for_memory_ends_with_figures(folder: Path) -> None:
    model = llama(folder)
    weights = Bench(model).loaded.info.weights_size_bytes
    bench = Bench(model, limit_bytes=weights + 5200 * 512, wait_s=0.2)
    long = bench.start(made_up_tokens(30), max_tokens=2000)
    assert long.first.wait(120)
    message = refused(BusyError, lambda: bench.complete(made_up_tokens(30), max_tokens=2000))
    assert "1 requests with 2,030 tokens run" in message, message
    long.request.cancel()
    refused(CancelledRequestError, long.result)
    assert bench.complete(made_up_tokens(30), max_tokens=3).tokens


def exports_read_live_caches_and_hold_exactly_their_tokens(folder: Path) -> None:
    bench = Bench(llama(folder))
    tokens = made_up_tokens(700)
    for n in LENGTHS:
        nothing = partial(bench.export, tokens[:n], folder / "none", prefill=False)
        assert "found 0 in RAM" in refused(NoLiveStateError, nothing)
    honest = {n: bench.plan(tokens[:n], folder / f"honest-{n}") for n in LENGTHS}
    bench.complete(tokens)
    for n in LENGTHS:
        event = bench.export(tokens[:n], folder / f"live-{n}", prefill=False)
        assert (event.restored_tokens, event.prefilled_tokens) == (n, 0)
        data = (folder / f"live-{n}").read_bytes()
        assert len(data) == n * 512
        values, wanted = (np.frombuffer((folder / f"{kind}-{n}").read_bytes(), "<f4") for kind in ("live", "honest"))
        assert np.abs(values - wanted).max() < 1e-4
        answer = bench.complete(tokens[: n + 5], restore=honest[n], use_live=False, keep_live=False)
        assert answer.tokens == bench.cold(tokens[: n + 5])
    # Partly covered: the rest is computed, or not, as asked.
    longer = tokens[:600] + made_up_tokens(100, seed=5)
    refused(NoLiveStateError, lambda: bench.export(longer, folder / "none", prefill=False))
    assert bench.export(longer, folder / "longer").restored_tokens == 600
    assert bench.shelf.figures().n_caches == 1
    assert bench.shelf._entries[0].borrowers == 0


def exports_name_what_their_live_cache_came_from(folder: Path) -> None:
    bench = Bench(llama(folder))
    tokens = made_up_tokens(500)
    plan = bench.plan(tokens[:300], folder / "pack")
    answer = bench.complete(tokens, restore=plan)
    assert (answer.reused.restored_tokens, answer.reused.live_tokens) == (300, 0)
    event = bench.export(tokens[:450], folder / "longer", prefill=False)
    assert [(origin.manifest, origin.n_tokens) for origin in event.origins] == [(plan.manifest, 300)]
    event = bench.export(tokens[:200], folder / "shorter", prefill=False)
    assert [origin.n_tokens for origin in event.origins] == [200]
    entry = bench.shelf._entries[0]
    assert entry.origins == (Origin(plan.manifest, 300),)


def background_exports_give_way_between_blocks(folder: Path) -> None:
    bench = Bench(llama(folder))
    tokens = made_up_tokens(4000)
    bench.complete(tokens, max_tokens=1)
    order: list[str] = []
    gate = threading.Event()
    blocker = Request(10_000, lambda _: None)

    def block() -> None:
        gate.wait(120)

    bench.lane.submit(blocker, block)
    pack = folder / "pack"
    export = bench.start_export(ExportRequest(tokens, None, pack, 0, prefill=False, background=True))
    written: list[int] = []
    for i in range(3):
        request = Request(10_001 + i, lambda _: None)

        def job(i: int = i) -> None:
            order.append(f"job {i}")
            written.append(pack.stat().st_size)

        bench.lane.submit(request, job)
    gate.set()
    until(lambda: len(order) == 3)
    assert written == [0, 0, 0], "the export ran before requests that waited"
    # Once it runs, a request that comes waits for a block at most.
    until(lambda: pack.stat().st_size > 0)
    late = threading.Event()
    bench.lane.submit(Request(10_009, lambda _: None), late.set)
    assert late.wait(120)
    event = export.get(timeout=120)
    assert isinstance(event, ExportedEvent)
    assert pack.stat().st_size == 4000 * 512
    # Cancelled: nothing is held, and the lane goes on.
    cancelled = Request(10_010, lambda _: None)
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    asked = ExportRequest(tokens, None, pack, 0, prefill=False, background=True)
    steps = bench.runner.export(cancelled, asked)

    def counted() -> Any:
        try:
            for number, step in enumerate(steps):
                if number == 2:
                    cancelled.cancel()
                yield step
        finally:
            steps.close()  # type: ignore[attr-defined]

    bench.lane.submit(cancelled, counted, background=True, failed=ended.put)
    assert isinstance(ended.get(timeout=120), CancelledRequestError)
    until(lambda: all(entry.borrowers == 0 for entry in bench.shelf._entries))
    assert bench.complete(tokens[:30]).tokens


def dropping_live_caches_also_drops_what_running_requests_would_leave(folder: Path) -> None:
    bench = Bench(llama(folder))
    tokens = made_up_tokens(100)
    running = bench.start(tokens, max_tokens=300)
    assert running.first.wait(120)
    bench.shelf.drop()
    assert running.result().held_tokens == 0
    assert bench.shelf.figures().n_caches == 0
    assert bench.complete(tokens).held_tokens > 100


def nothing_is_kept_with_a_cap_of_zero(folder: Path) -> None:
    bench = Bench(llama(folder), live_bytes=0)
    tokens = made_up_tokens(100)
    for _ in range(2):
        answer = bench.complete(tokens)
        assert (answer.reused.live_tokens, answer.held_tokens) == (0, 0)


def main() -> None:
    """Runs one case."""
    status = 1
    try:
        globals()[sys.argv[2]](Path(sys.argv[1]))
        status = 0
    except BaseException:  # noqa: BLE001 - told on stderr, then the process ends without teardown
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    mx.random.seed(0)
    main()
