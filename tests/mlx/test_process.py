"""The engine's process: many requests at once, cancellation, sudden death, refusals before any work."""

import os
import signal
import sys
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import trio

from kvnet.engine.generations import Generated, GenerateRequest, TextDelta
from kvnet.engine.kv_state import Exported, ExportRequest, PrefillProgress
from kvnet.engine.scratch import new_pack
from kvnet.engine.selftest import last
from kvnet.errors import (
    CompatibilityError,
    EngineCrashedError,
    EngineError,
    IntegrityError,
    OverBudgetError,
    StoreError,
    StoreFullError,
)
from kvnet.format.hashes import blake3_hash
from tests.mlx import tinymodels
from tests.mlx.conftest import Opener
from tests.mlx.requests import cut, export, generate, made_up_tokens

pytestmark = pytest.mark.mlx


async def test_simultaneous_completions_and_an_export_each_equal_their_sequential_result(
    opener: Opener, tiny_llama: Path, tmp_path: Path
) -> None:
    prefix = made_up_tokens(300)
    prompts = [prefix + made_up_tokens(3 + 5 * i, seed=i) for i in range(8)]
    async with opener(tiny_llama) as engine:
        plan = await export(engine, prefix, tmp_path / "pack")
        stored = (tmp_path / "pack").read_bytes()
        alone = [await generate(engine, prompt, plan, max_tokens=6 + 3 * i) for i, prompt in enumerate(prompts)]
        for round_number in range(3):
            together: dict[int, Generated] = {}

            async def one(i: int, together: dict[int, Generated] = together) -> None:
                together[i] = await generate(engine, prompts[i], plan, max_tokens=6 + 3 * i)

            async with trio.open_nursery() as nursery:
                for i in range(len(prompts)):
                    nursery.start_soon(one, i)
                nursery.start_soon(export, engine, prefix, tmp_path / f"again-{round_number}")
            assert [together[i].tokens for i in range(8)] == [answer.tokens for answer in alone]
            assert [together[i].text for i in range(8)] == [answer.text for answer in alone]
            assert (tmp_path / f"again-{round_number}").read_bytes() == stored
        assert (tmp_path / "pack").read_bytes() == stored
        assert all(blake3_hash(stored[c.offset : c.offset + c.length_bytes]) == c.hash for c in plan.chunks)


async def test_export_while_decoding_crosses_threads_many_times(
    opener: Opener, tiny_llama: Path, tmp_path: Path
) -> None:
    tokens = made_up_tokens(60)
    async with opener(tiny_llama) as engine:
        cold = await generate(engine, tokens, max_tokens=200)
        packs: set[bytes] = set()

        async def exports() -> None:
            for i in range(30):
                await export(engine, tokens[:50], tmp_path / f"pack-{i}")
                packs.add((tmp_path / f"pack-{i}").read_bytes())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(exports)
            again = await generate(engine, tokens, max_tokens=200)
        assert again.tokens == cold.tokens
        assert len(packs) == 1


async def test_killed_engine_fails_the_running_request_only_and_is_started_anew(
    opener: Opener, tiny_llama: Path, tmp_path: Path
) -> None:
    tokens = made_up_tokens(20)
    async with opener(tiny_llama) as engine:
        plan = await export(engine, tokens[:10], tmp_path / "pack")
        cold = await generate(engine, tokens)
        first_process = engine.process_id
        assert first_process is not None
        async with aclosing(engine.generate(GenerateRequest(tokens, None, 4000))) as events:
            with pytest.raises(EngineCrashedError, match="SIGKILL"):
                async for event in events:
                    if isinstance(event, TextDelta) and engine.process_id is not None:
                        os.kill(engine.process_id, signal.SIGKILL)
        again = await generate(engine, tokens, plan)
        assert again.tokens == cold.tokens
        assert engine.process_id not in {None, first_process}


async def test_leaving_a_request_early_frees_the_engine_for_the_next(
    opener: Opener, tiny_llama: Path, tmp_path: Path
) -> None:
    tokens = made_up_tokens(3000)
    async with opener(tiny_llama) as engine:
        async with aclosing(engine.generate(GenerateRequest(tokens[:30], None, 4000))) as events:
            async for event in events:
                if isinstance(event, TextDelta):
                    break
        with trio.CancelScope() as scope:
            async with aclosing(engine.export(ExportRequest(tokens, None, new_pack(tmp_path / "p"), 0))) as progress:
                async for step in progress:
                    assert isinstance(step, PrefillProgress)
                    if step.done_tokens:
                        scope.cancel()
        assert scope.cancelled_caught
        # Stopped between two steps: the last block was never written.
        assert (await generate(engine, tokens[:30])).text
        assert (tmp_path / "p").stat().st_size < 3000 * engine.info.kv_bytes_per_token


async def test_progress_ends_at_absolute_multiples_of_the_step(
    opener: Opener, tiny_llama: Path, tmp_path: Path
) -> None:
    tokens = made_up_tokens(1100)
    async with opener(tiny_llama) as engine:
        assert engine.info.producer.prefill_step == 512
        plan = await export(engine, tokens[:300], tmp_path / "pack")
        request = ExportRequest(tokens, plan, new_pack(tmp_path / "longer"), 0, first_block=1)
        seen: list[int] = []
        async with aclosing(engine.export(request)) as events:
            async for event in events:
                if isinstance(event, PrefillProgress):
                    seen.append(event.done_tokens)
                else:
                    exported = event
        assert seen == [300, 512, 1024, 1100]
        assert isinstance(exported, Exported)
        assert (exported.restored_tokens, exported.prefilled_tokens) == (300, 800)


async def test_extending_an_artifact_writes_only_new_blocks_and_continues_it(
    opener: Opener, tiny_llama: Path, tmp_path: Path
) -> None:
    from kvnet.engine.scratch import scratch_restore

    tokens = made_up_tokens(700)
    async with opener(tiny_llama) as engine:
        plan = await export(engine, tokens[:300], tmp_path / "pack")
        request = ExportRequest(tokens[:690], plan, new_pack(tmp_path / "longer"), 0, first_block=1)
        exported = await last(engine.export(request), Exported)
        assert sum(c.length_bytes for c in exported.chunks) == (690 - 256) * engine.info.kv_bytes_per_token
        # The first block's tiles are those of the shorter artifact: equal tiles are stored once.
        first_block = [ref for ref in plan.chunks if ref.offset < 256 * engine.info.kv_bytes_per_token]
        longer = scratch_restore(engine.info, request, exported, earlier=first_block)
        assert (await generate(engine, tokens, longer)).tokens == (await generate(engine, tokens)).tokens
        with pytest.raises(EngineError, match="only 300 tokens are restored"):
            bad = ExportRequest(tokens[:690], plan, tmp_path / "longer", 0, first_block=2)
            await last(engine.export(bad), Exported)


async def test_damaged_missing_and_foreign_state_is_refused_and_the_engine_lives_on(
    opener: Opener, tiny_llama: Path, tmp_path: Path
) -> None:
    from dataclasses import replace

    tokens = made_up_tokens(40)
    other_model = tinymodels.write_model(tmp_path / "other", seed=1)
    async with opener(tiny_llama) as engine:
        plan = await export(engine, tokens, tmp_path / "pack")
        async with opener(other_model) as other:
            with pytest.raises(CompatibilityError, match="fingerprint"):
                await generate(other, tokens, plan)
        with pytest.raises(CompatibilityError, match="where it lies"):
            await generate(engine, tokens, replace(plan, chunks=()))
        with pytest.raises(CompatibilityError, match="1 to 40 tokens"):
            await generate(engine, made_up_tokens(60), cut(plan, 41))
        data = bytearray((tmp_path / "pack").read_bytes())
        # Its last token is left out of a tile, or the tile is read to where it belongs.
        prompts = (tokens, [*tokens, 1])
        data[100] ^= 1
        (tmp_path / "pack").write_bytes(data)
        for prompt in prompts:
            with pytest.raises(IntegrityError, match="does not match its hash"):
                await generate(engine, prompt, plan)
        data[100:104] = np.float32("nan").tobytes()
        (tmp_path / "pack").write_bytes(data)
        [tile] = plan.chunks
        untrue = replace(plan, chunks=(replace(tile, hash=blake3_hash(bytes(data))),))
        for prompt in prompts:
            with pytest.raises(CompatibilityError, match="not finite"):
                await generate(engine, prompt, untrue)
        os.truncate(tmp_path / "pack", len(data) - 1)
        with pytest.raises(IntegrityError, match=f"{len(data) - 1} of {len(data)} bytes read"):
            await generate(engine, tokens, plan)
        assert (await generate(engine, tokens)).text


async def test_requests_over_window_or_memory_are_refused_with_figures(
    opener: Opener, tiny_llama: Path, tmp_path: Path
) -> None:
    async with opener(tiny_llama, memory_budget_bytes=1_000_000) as engine:
        with pytest.raises(OverBudgetError, match="4,096 tokens; the prompt has 4,000 and 97 may be generated"):
            await generate(engine, made_up_tokens(4000), max_tokens=97)
        with pytest.raises(OverBudgetError, match="memory budget is 1,000,000 bytes"):
            await generate(engine, made_up_tokens(3000), max_tokens=1)
        with pytest.raises(OverBudgetError, match="memory budget"):
            await export(engine, made_up_tokens(3000), tmp_path / "pack")
        with pytest.raises(EngineError, match="at least one token"):
            await generate(engine, [])
        assert (await generate(engine, made_up_tokens(10))).text


@pytest.mark.parametrize(
    ("config", "reason"),
    [("SLIDING_WINDOW", "RotatingKVCache.*sliding window"), ("MAMBA", "ArraysCache.*recurrent")],
)
async def test_other_cache_kinds_are_refused_by_name_and_still_generate(
    opener: Opener, tmp_path: Path, config: str, reason: str
) -> None:
    model = tinymodels.write_model(tmp_path / "model", getattr(tinymodels, config))
    tokens = made_up_tokens(40)
    async with opener(model) as engine:
        assert not engine.info.shareable
        assert engine.info.fingerprint is None
        with pytest.raises(CompatibilityError, match=reason):
            await last(engine.export(ExportRequest(tokens, None, new_pack(tmp_path / "pack"), 0)), Exported)
        first, second = await generate(engine, tokens), await generate(engine, tokens)
        assert first.tokens == second.tokens
        assert first.text
        assert (tmp_path / "pack").stat().st_size == 0


async def test_folder_that_cannot_be_loaded_is_refused_with_the_reason(
    opener: Opener, tiny_llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match="expected a model folder"):
        async with opener(tmp_path / "absent"):
            pass
    bare = tinymodels.write_model(tmp_path / "bare")
    (bare / "config.json").unlink()
    with pytest.raises(EngineError, match=r"expected config\.json"):
        async with opener(bare):
            pass
    unknown = tinymodels.write_model(tmp_path / "unknown")
    (unknown / "config.json").write_text('{"model_type": "nonesuch"}')
    with pytest.raises(EngineError, match="could not load unknown"):
        async with opener(unknown):
            pass


async def test_body_errors_leave_the_engine_as_they_are(opener: Opener, tiny_llama: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        async with opener(tiny_llama):
            raise ZeroDivisionError


async def test_closed_engine_leaves_no_process(opener: Opener, tiny_llama: Path) -> None:
    async with opener(tiny_llama) as engine:
        process_id = engine.process_id
        assert process_id is not None
    assert engine.process_id is None
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)
    with pytest.raises(EngineError, match="closed"):
        await generate(engine, [1, 2, 3])


async def test_pack_that_cannot_be_written_fails_the_export_and_nothing_else(
    opener: Opener, tiny_llama: Path, tmp_path: Path
) -> None:
    tokens = made_up_tokens(30)
    async with opener(tiny_llama) as engine:
        with pytest.raises(StoreError, match="could not write the pack: No such file"):
            await last(engine.export(ExportRequest(tokens, None, tmp_path / "absent", 0)), Exported)
        if sys.platform == "linux":
            # A device that is always full.
            with pytest.raises(StoreFullError, match="No space left"):
                await last(engine.export(ExportRequest(tokens, None, Path("/dev/full"), 0)), Exported)
        assert (await generate(engine, tokens)).text
