"""What every engine does: the real one and the toy one pass the same suite."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from kvnet.engine.client import open_engine
from kvnet.engine.generations import FirstToken, Generated, GenerateRequest, LogitsRequest, TextDelta
from kvnet.engine.interface import Engine, OpenEngine
from kvnet.engine.kv_state import Exported, ExportRequest, PrefillProgress, WrittenChunk
from kvnet.engine.prompts import BoundaryKind, PromptKind
from kvnet.engine.scratch import new_pack, scratch_restore
from kvnet.engine.selftest import last, run_selftest
from kvnet.engine.toy import open_toy_engine
from kvnet.errors import (
    CompatibilityError,
    CrowdedError,
    EngineError,
    IntegrityError,
    NoLiveStateError,
    OverBudgetError,
    PromptError,
    WindowError,
)
from kvnet.format.codecs import Codec
from kvnet.format.hashes import blake3_hash
from kvnet.format.prefix import common_prefix
from kvnet.format.sample import decode_sample
from tests.mlx import tinymodels
from tests.mlx.completing import complete, prepare, told
from tests.mlx.requests import cut, export, generate, made_up_tokens

KINDS = [pytest.param("toy"), pytest.param("mlx", marks=pytest.mark.mlx)]
OPENERS: dict[str, OpenEngine] = {"toy": open_toy_engine, "mlx": open_engine}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(kind: str, tmp_path: Path) -> Path:
    return tmp_path / "model" if kind == "toy" else tinymodels.write_model(tmp_path / "model")


@pytest.fixture
async def engine(kind: str, model: Path, tmp_path: Path) -> AsyncIterator[Engine]:
    async with OPENERS[kind](model, digest_cache=tmp_path / "digests", work_dir=tmp_path) as opened:
        yield opened


async def test_state_restored_from_an_export_gives_the_cold_answer(engine: Engine, tmp_path: Path) -> None:
    tokens = made_up_tokens(520)
    for codec in (Codec.RAW, Codec.SHUFFLE_ZSTD1):
        plan = await export(engine, tokens[:515], tmp_path / f"pack-{codec.name}", codec=codec)
        for n in (1, 256, 300, 515):
            cold = await generate(engine, tokens)
            warm = await generate(engine, tokens, cut(plan, n))
            assert (warm.tokens, warm.text) == (cold.tokens, cold.text)
            assert (warm.restored_tokens, warm.prefilled_tokens) == (n, 520 - n)
        values = [
            (await engine.logits(LogitsRequest(tokens, plan))).values,
            (await engine.logits(LogitsRequest(tokens, stops=(515,)))).values,
        ]
        assert values[0] == values[1]


async def test_events_come_in_order_and_the_answer_is_the_sum_of_the_deltas(engine: Engine) -> None:
    async with aclosing(engine.generate(GenerateRequest(made_up_tokens(40), None, 12))) as events:
        seen = [event async for event in events]
    kinds = [type(event) for event in seen]
    assert kinds[0] is PrefillProgress
    assert kinds[-1] is Generated
    assert kinds.index(FirstToken) < kinds.index(TextDelta)
    answer = seen[-1]
    assert isinstance(answer, Generated)
    assert "".join(event.text for event in seen if isinstance(event, TextDelta)) == answer.text
    assert answer.finish_reason in {"stop", "length"}
    assert len(answer.tokens) <= 12
    assert (answer.finish_reason == "length") == (len(answer.tokens) == 12)


async def test_written_tiles_lie_one_after_the_other_in_plan_order_and_match_their_hashes(
    engine: Engine, tmp_path: Path
) -> None:
    tokens = made_up_tokens(300)
    pack = new_pack(tmp_path / "pack")
    request = ExportRequest(tokens, None, pack, 8192, context_size_bytes=10)
    exported = await last(engine.export(request), Exported)
    data = (tmp_path / "pack").read_bytes()
    position = 8192
    for chunk in exported.chunks:
        assert chunk.offset == position
        position += chunk.length_bytes
        assert blake3_hash(data[chunk.offset : position]) == chunk.hash
    # One chunk of token ids and one of context come first in the plan.
    assert [chunk.index for chunk in exported.chunks] == list(range(2, 2 + len(exported.chunks)))
    assert position == len(data) == 8192 + 300 * engine.info.kv_bytes_per_token


async def test_progress_of_an_export_tells_of_tiles_that_lie_in_the_pack_by_then(
    engine: Engine, tmp_path: Path
) -> None:
    pack = new_pack(tmp_path / "pack")
    request = ExportRequest(made_up_tokens(1300), None, pack, 0)
    told: list[WrittenChunk] = []
    before_the_end = 0
    async with aclosing(engine.export(request)) as events:
        async for event in events:
            if isinstance(event, Exported):
                assert tuple(told) == event.chunks[: len(told)]
                continue
            assert isinstance(event, PrefillProgress)
            for chunk in event.written:
                data = pack.read_bytes()[chunk.offset : chunk.offset + chunk.length_bytes]
                assert blake3_hash(data) == chunk.hash
            told += event.written
            if event.done_tokens < event.total_tokens:
                before_the_end = len(told)
    assert before_the_end > 0


async def test_extension_of_an_artifact_equals_its_parts(engine: Engine, tmp_path: Path) -> None:
    tokens = made_up_tokens(600)
    shorter = await export(engine, tokens[:300], tmp_path / "shorter")
    whole_blocks = cut(shorter, 256)
    request = ExportRequest(tokens[:590], whole_blocks, new_pack(tmp_path / "longer"), 0, first_block=1)
    exported = await last(engine.export(request), Exported)
    assert sum(chunk.length_bytes for chunk in exported.chunks) == (590 - 256) * engine.info.kv_bytes_per_token
    earlier = [ref for ref in shorter.chunks if ref.offset < 256 * engine.info.kv_bytes_per_token]
    longer = scratch_restore(engine.info, request, exported, earlier=earlier)
    assert (await generate(engine, tokens, longer)).tokens == (await generate(engine, tokens)).tokens


async def test_prompt_equal_to_the_artifact_still_gets_an_answer(engine: Engine, tmp_path: Path) -> None:
    tokens = made_up_tokens(30)
    plan = await export(engine, tokens, tmp_path / "pack")
    cold = await generate(engine, tokens)
    for _ in range(2):
        warm = await generate(engine, tokens, plan)
        assert warm.text
        assert (warm.tokens, warm.restored_tokens, warm.prefilled_tokens) == (cold.tokens, 29, 1)
    assert (await generate(engine, tokens[:1], cut(plan, 1))).tokens == (await generate(engine, tokens[:1])).tokens


async def test_damaged_missing_or_foreign_state_is_refused_and_the_engine_goes_on(
    engine: Engine, kind: str, tmp_path: Path
) -> None:
    tokens = made_up_tokens(40)
    plan = await export(engine, tokens, tmp_path / "pack")
    with pytest.raises(CompatibilityError, match="where it lies"):
        await generate(engine, tokens, replace(plan, chunks=()))
    with pytest.raises(CompatibilityError, match="1 to 40 tokens"):
        await generate(engine, made_up_tokens(60), cut(plan, 41))
    data = bytearray((tmp_path / "pack").read_bytes())
    data[100] ^= 1
    (tmp_path / "pack").write_bytes(data)
    with pytest.raises(IntegrityError, match="does not match its hash"):
        await generate(engine, tokens, plan)
    other = tmp_path / "other" if kind == "toy" else tinymodels.write_model(tmp_path / "other", seed=1)
    async with OPENERS[kind](other, digest_cache=tmp_path / "digests", work_dir=tmp_path) as stranger:
        with pytest.raises(CompatibilityError, match="fingerprint"):
            await generate(stranger, tokens, plan)
    assert (await generate(engine, tokens)).text


async def test_requests_run_together_without_touching_each_other(engine: Engine, tmp_path: Path) -> None:
    prompts = [made_up_tokens(20 + i, seed=i) for i in range(4)]
    alone = [(await generate(engine, prompt)).tokens for prompt in prompts]
    together: dict[int, tuple[int, ...]] = {}

    async def one(i: int) -> None:
        together[i] = (await generate(engine, prompts[i])).tokens

    async with trio.open_nursery() as nursery:
        for i in range(4):
            nursery.start_soon(one, i)
        nursery.start_soon(export, engine, prompts[0], tmp_path / "pack")
    assert [together[i] for i in range(4)] == alone


async def test_context_is_what_renderings_with_different_questions_share(engine: Engine) -> None:
    system = {"role": "system", "content": "A document."}
    shared = await engine.context_tokens([system], {})
    first, second = [await engine.render([system, {"role": "user", "content": q}], {}) for q in ("Why?", "7?")]
    assert 0 < len(shared) <= common_prefix(first, second)
    assert first[: len(shared)] == second[: len(shared)] == shared


async def test_what_cannot_run_is_refused_before_it_starts(engine: Engine, kind: str, model: Path) -> None:
    with pytest.raises(EngineError, match="at least one token"):
        await generate(engine, [])
    async with OPENERS[kind](
        model, digest_cache=model.parent / "digests", work_dir=model.parent, memory_budget_bytes=400_000
    ) as small:
        with pytest.raises(OverBudgetError, match="memory budget is 400,000 bytes"):
            await generate(small, made_up_tokens(3000))


async def test_selftest_passes(kind: str, model: Path, tmp_path: Path) -> None:
    report = await run_selftest(model, tmp_path, n_tokens=270, opener=OPENERS[kind])
    assert report.passed
    assert report.size_bytes == 270 * report.model.kv_bytes_per_token


TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a llama? " * 20}]


async def test_the_same_request_twice_continues_from_ram_and_answers_the_same(engine: Engine) -> None:
    for stream in (False, True):
        await engine.drop_live()
        body = {"messages": TALK, "max_tokens": 8, "stream": stream, "stream_options": {"include_usage": True}}
        first = await complete(engine, body, live=True)
        again = await complete(engine, body, live=True)
        n = len(first.prompt.tokens)
        assert told(first.body) == told(again.body)
        assert (first.started.status, first.started.live_tokens) == (200, 0)
        assert first.started.content_type == ("text/event-stream" if stream else "application/json")
        assert (again.prompt.live_tokens, again.started.live_tokens) == (n - 1, n - 1)
        assert (first.completed.prefilled_tokens, again.completed.prefilled_tokens) == (n, 1)
        assert again.completed.held_tokens >= n
        assert told(again.body)["usage"]["completion_tokens"] >= len(again.completed.tokens)
    assert (await engine.live()).n_caches >= 1
    await engine.drop_live()
    assert (await engine.live()).size_bytes == 0


async def test_an_engine_keeps_no_more_in_ram_than_it_was_told(kind: str, model: Path) -> None:
    for cap_bytes in (0, 1 << 20):
        async with OPENERS[kind](
            model, digest_cache=model.parent / "digests", work_dir=model.parent, live_bytes=cap_bytes
        ) as engine:
            answer = await complete(engine, {"messages": TALK, "max_tokens": 4}, live=True)
            held = await engine.live()
            assert held.cap_bytes == cap_bytes >= held.size_bytes
            assert (held.n_caches > 0, answer.completed.held_tokens > 0) == (cap_bytes > 0, cap_bytes > 0)


async def test_an_engine_makes_room_for_other_models_and_gets_it_back(engine: Engine) -> None:
    info = engine.info
    answer = await complete(engine, {"messages": TALK, "max_tokens": 4}, live=True)
    limit_bytes = info.weights_size_bytes + 100 * info.kv_bytes_per_token
    assert await engine.limit_memory(limit_bytes) == limit_bytes
    assert (await engine.live()).size_bytes <= 100 * info.kv_bytes_per_token
    with pytest.raises(CrowdedError, match=f"{limit_bytes:,}"):
        await complete(engine, {"messages": TALK, "max_tokens": 4}, live=True)
    assert await engine.limit_memory(0) == info.weights_size_bytes
    assert (await engine.live()).size_bytes == 0
    assert await engine.limit_memory(info.memory_budget_bytes) == info.memory_budget_bytes
    again = await complete(engine, {"messages": TALK, "max_tokens": 4}, live=True)
    assert (again.started.live_tokens, told(again.body)) == (0, told(answer.body))


async def test_what_live_caches_hold_is_exported_without_computing(engine: Engine, tmp_path: Path) -> None:
    answer = await complete(engine, {"messages": TALK, "max_tokens": 4}, live=True)
    tokens = answer.prompt.tokens[:256]
    request = ExportRequest(tokens, None, new_pack(tmp_path / "pack"), 0, prefill=False, background=True)
    exported = await last(engine.export(request), Exported)
    assert (exported.restored_tokens, exported.prefilled_tokens) == (256, 0)
    await engine.drop_live()
    with pytest.raises(NoLiveStateError):
        await last(engine.export(request), Exported)
    plan = scratch_restore(engine.info, request, exported)
    warm = await complete(engine, {"messages": TALK, "max_tokens": 4}, restore=plan)
    assert (warm.started.restored_tokens, told(warm.body)) == (256, told(answer.body))


async def test_boundaries_are_places_in_the_prompt_in_ascending_order(engine: Engine) -> None:
    prompt = await prepare(engine, {"messages": TALK, "tools": [{"type": "function"}]}, marks=(1,))
    places = [boundary.n_tokens for boundary in prompt.boundaries]
    assert places == sorted(places)
    assert all(1 <= place <= len(prompt.tokens) for place in places)
    kinds = {boundary.kind for boundary in prompt.boundaries}
    assert {BoundaryKind.SYSTEM, BoundaryKind.MESSAGE, BoundaryKind.MARK, BoundaryKind.STABLE} <= kinds
    assert 1 <= prompt.stable_tokens <= len(prompt.tokens)
    assert "What is a llama?" in await engine.text_of(prompt.tokens)


async def test_a_text_completion_is_answered_with_text(engine: Engine) -> None:
    answer = await complete(engine, {"prompt": "Once", "max_tokens": 3}, PromptKind.TEXT)
    assert answer.json["object"] == "text_completion"
    assert isinstance(answer.json["choices"][0]["text"], str)


async def test_what_is_no_prompt_is_refused_and_what_is_not_supported_a_400(engine: Engine) -> None:
    image: list[Any] = [{"role": "user", "content": [{"type": "image_url"}]}]
    bodies: list[dict[str, Any]] = [{}, {"messages": []}, {"messages": image}]
    for body in bodies:
        with pytest.raises(PromptError):
            await prepare(engine, body)
    for asked in ({"n": 2}, {"max_tokens": 0}):
        answer = await complete(engine, {"messages": TALK, **asked})
        assert answer.started.status == 400
        assert answer.json["error"]["type"] == "invalid_request_error"
    with pytest.raises(WindowError):
        await complete(engine, {"messages": TALK, "max_tokens": 1 << 40})


async def test_a_model_has_one_sample_however_often_it_is_made(engine: Engine) -> None:
    fingerprint = engine.info.fingerprint
    assert fingerprint is not None
    first = await engine.sample()
    made = decode_sample(first, fingerprint)
    assert (made.producer, len(set(made.rows)) > 16) == (engine.info.producer, True)
    await complete(engine, {"messages": TALK, "max_tokens": 4}, live=True)
    assert await engine.sample() == first
    # It leaves nothing behind, and takes nothing that was kept.
    assert (await engine.live()).n_caches == 1
