"""Cases of live caches, each run in a process of its own: ``python -m tests.mlx.live_cases FOLDER CASE``.

They drive the prefill lane and the decode thread themselves: a process that ends under a living MLX thread aborts, so
that each case ends with `leave`.
"""

# isort: off
from tests.mlx.live_bench import Bench, Running, llama, refused, until  # before anything that imports mlx

# isort: on
import queue
import sys
import threading
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from kvnet.engine.kv_state import ExportRequest, Origin
from kvnet.engine.mlx.caches import HEADROOM_TOKENS
from kvnet.engine.mlx.leaving import leave
from kvnet.engine.mlx.live import size_of
from kvnet.engine.mlx.prefill import prefill, step_ends
from kvnet.engine.mlx.requests import CancelledRequestError, Request
from kvnet.engine.prompts import Boundary, BoundaryKind
from kvnet.engine.wire import ExportedEvent
from kvnet.errors import BusyError, NoLiveStateError, OverBudgetError, WindowError
from kvnet.format.hashes import blake3_hash
from tests.mlx import tinymodels
from tests.mlx.requests import made_up_tokens

LENGTHS = (1, 2, 5, 255, 256, 257, 511, 512, 513)


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
    leave(status)


if __name__ == "__main__":
    mx.random.seed(0)
    main()
