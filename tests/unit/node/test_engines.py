import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from kvnet.engine.completions import Completed, CompletionRequest
from kvnet.engine.interface import Engine, ModelInfo
from kvnet.engine.model_folder import inspect_model
from kvnet.engine.prompts import PreparedPrompt, PromptKind
from kvnet.engine.selftest import last
from kvnet.engine.toy import ToyCosts, ToyEngine, open_toy_engine
from kvnet.errors import BusyError, CrowdedError, EngineError, UnknownModelError
from kvnet_node.config import load_config
from kvnet_node.engines import EngineShelf
from kvnet_node.paths import DataPaths


def make_model(directory: Path, name: str) -> Path:
    """A folder that looks like a model; nobody loads it, the toy engine is its name."""
    folder = directory / "models" / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "vocab_size": 512, "torch_dtype": "float32",
            }
        ),
        encoding="utf-8",
    )  # fmt: skip
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return folder


@asynccontextmanager
async def shelf(
    data_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str] | None = None,
    open_engine: Any = open_toy_engine,
) -> AsyncIterator[EngineShelf]:
    monkeypatch.setenv("HOME", str(data_dir))
    monkeypatch.setenv("HF_HOME", str(data_dir / "hf"))
    monkeypatch.setenv("KVNET_CACHE_DIR", str(data_dir / "cache"))
    config = load_config(data_dir, environment=environment or {})
    engines = EngineShelf(config, DataPaths(data_dir), open_engine)
    async with trio.open_nursery() as nursery:
        await nursery.start(engines.run)
        yield engines
        nursery.cancel_scope.cancel()


async def test_the_only_shareable_model_needs_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path, "only")
    async with shelf(tmp_path, monkeypatch) as engines, engines.use(None) as engine:
        assert engine.info.name == "only"
        assert engines.loaded() == ["only"]


async def test_of_several_models_the_default_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path, "one")
    make_model(tmp_path, "two")
    async with shelf(tmp_path, monkeypatch) as engines:
        with pytest.raises(UnknownModelError) as raised:
            await engines.choose(None)
        assert "one" in raised.value.hint
        assert "two" in raised.value.hint
    async with shelf(tmp_path, monkeypatch, {"KVNET_MODEL_DEFAULT": "two"}) as engines, engines.use(None) as engine:
        assert engine.info.name == "two"


async def test_the_demos_model_is_chosen_only_where_there_is_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path / "cache", "demo")
    async with shelf(tmp_path, monkeypatch) as engines:
        assert (await engines.choose(None)).name == "demo"
        make_model(tmp_path, "own")
        assert (await engines.choose(None)).name == "own"
        assert (await engines.choose("demo")).name == "demo"


async def test_an_engine_stays_loaded_for_the_next_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path, "only")
    async with shelf(tmp_path, monkeypatch) as engines:
        async with engines.use("only") as first:
            pass
        async with engines.use(None) as second:
            assert second is first


async def test_the_asker_is_told_when_a_model_is_loaded_and_not_when_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path, "only")
    told: list[str] = []
    async with shelf(tmp_path, monkeypatch) as engines:
        for _ in range(2):
            async with engines.use(None, told.append):
                pass
    assert told == ["only"]


class HeavyEngine(ToyEngine):
    """Its weights are most of what there is."""

    @property
    def info(self) -> ModelInfo:
        return replace(super().info, weights_size_bytes=LIMIT_BYTES - 3)


LIMIT_BYTES = 1 << 20


@asynccontextmanager
async def open_heavy_engine(model_path: Path, **_: object) -> AsyncIterator[HeavyEngine]:
    engine = HeavyEngine(model_path, ToyCosts(), 1 << 20, LIMIT_BYTES)
    yield engine
    await engine.aclose()


async def test_an_idle_engine_makes_room_for_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path, "one")
    make_model(tmp_path, "two")
    async with shelf(tmp_path, monkeypatch, open_engine=open_heavy_engine) as engines:
        async with engines.use("one"):
            pass
        async with engines.use("two"):
            assert engines.loaded() == ["two"]


async def test_a_model_that_does_not_fit_beside_those_in_use_is_refused_with_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path, "one")
    make_model(tmp_path, "two")
    async with shelf(tmp_path, monkeypatch, open_engine=open_heavy_engine) as engines, engines.use("one"):
        with pytest.raises(BusyError, match=r"need \d+ B; 1\.05 MB of 1\.05 MB"):
            async with engines.use("two"):
                pass
        assert engines.loaded() == ["one"]


class FullEngine(ToyEngine):
    """Requests that run hold more of its memory than it is told to keep, until ``busy_bytes`` is 0."""

    busy_bytes = 0

    async def limit_memory(self, limit_bytes: int) -> int:
        return max(await super().limit_memory(limit_bytes), self.busy_bytes)


@asynccontextmanager
async def open_small_engine(model_path: Path, **_: object) -> AsyncIterator[FullEngine]:
    engine = FullEngine(model_path, ToyCosts(), 1 << 20, LIMIT_BYTES, live_bytes=LIMIT_BYTES)
    yield engine
    await engine.aclose()


async def talk(engine: Engine, n_tokens: int) -> Completed:
    """A request of so many tokens, 256 bytes each, and an answer of one."""
    prompt = PreparedPrompt(tuple(range(3, 3 + n_tokens)), (), 0, 0)
    body = b'{"prompt": "made up", "max_tokens": 1}'
    return await last(engine.complete(CompletionRequest(PromptKind.TEXT, body, prompt, None)), Completed)


async def until_all_may_use(engines: EngineShelf, expected: list[int]) -> None:
    with trio.fail_after(60):
        while [each.held_bytes for each in engines._loaded.values()] != expected:
            await trio.lowlevel.checkpoint()


async def test_models_in_memory_together_share_it_and_live_caches_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        make_model(tmp_path, name)
    async with shelf(tmp_path, monkeypatch, open_engine=open_small_engine) as engines, engines.use("one") as one:
        assert (await talk(one, 3000)).held_tokens >= 3000
        async with engines.use("two") as two:
            assert (await one.live()).n_caches == 0
            assert (await talk(two, 1000)).held_tokens >= 1000
            await until_all_may_use(engines, [LIMIT_BYTES // 2, LIMIT_BYTES // 2])


async def test_a_request_that_another_model_keeps_out_is_told_so_and_runs_when_it_asks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        make_model(tmp_path, name)
    async with shelf(tmp_path, monkeypatch, open_engine=open_small_engine) as engines:
        async with engines.use("two") as two:
            for _ in range(2):
                # One that is in use stays.
                with pytest.raises(CrowdedError, match=f"{LIMIT_BYTES // 2:,} bytes are left"):
                    async with engines.use("one") as one:
                        await talk(one, 3000)
                assert set(engines.loaded()) == {"one", "two"}
            await talk(two, 10)
        with pytest.raises(CrowdedError):
            async with engines.use("one") as one:
                await talk(one, 3000)
        await until_all_may_use(engines, [LIMIT_BYTES])
        async with engines.use("one") as one:
            assert (await talk(one, 3000)).held_tokens >= 3000


async def test_what_running_requests_hold_is_not_given_to_another_model_before_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        make_model(tmp_path, name)
    held_bytes = LIMIT_BYTES * 3 // 4
    async with shelf(tmp_path, monkeypatch, open_engine=open_small_engine) as engines:
        async with engines.use("one") as one:
            assert isinstance(one, FullEngine)
            one.busy_bytes = LIMIT_BYTES
            with pytest.raises(BusyError, match=r"1\.05 MB of 1\.05 MB"):
                async with engines.use("two"):
                    pass
            one.busy_bytes = held_bytes
            async with engines.use("two"):
                await until_all_may_use(engines, [held_bytes, LIMIT_BYTES - held_bytes])
                one.busy_bytes = 0
        await until_all_may_use(engines, [LIMIT_BYTES // 2, LIMIT_BYTES // 2])


async def test_models_that_fit_stay_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path, "one")
    make_model(tmp_path, "two")
    async with shelf(tmp_path, monkeypatch) as engines:
        for name in ("one", "two"):
            async with engines.use(name):
                pass
        assert engines.loaded() == ["one", "two"]


async def test_an_engine_that_nobody_uses_leaves_memory(
    autojump_clock: MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (entry,) = [inspect_model(make_model(tmp_path, "only"))]
    assert entry is not None
    async with shelf(tmp_path, monkeypatch, {"KVNET_ENGINE_IDLE_UNLOAD_S": "100"}) as engines:
        async with engines.use_entry(entry):
            await trio.sleep(150)
            assert engines.loaded() == ["only"]
        await trio.sleep(99)
        assert engines.loaded() == ["only"]
        await trio.sleep(2)
        assert engines.loaded() == []


async def test_a_client_that_leaves_while_a_model_loads_does_not_make_others_wait_twice(
    autojump_clock: MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = inspect_model(make_model(tmp_path, "only"))
    assert entry is not None
    begun = 0

    @asynccontextmanager
    async def open_slowly(model_path: Path, **_: object) -> AsyncIterator[ToyEngine]:
        nonlocal begun
        begun += 1
        await trio.sleep(10)
        async with open_toy_engine(model_path) as engine:
            yield engine

    async with shelf(tmp_path, monkeypatch, open_engine=open_slowly) as engines:
        with trio.move_on_after(5) as impatient:
            async with engines.use_entry(entry):
                pass
        assert impatient.cancelled_caught
        async with engines.use_entry(entry):
            assert begun == 1
            assert trio.current_time() == pytest.approx(10)


async def test_a_model_that_cannot_be_loaded_fails_its_askers_and_is_tried_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path, "only")
    broken = True

    @asynccontextmanager
    async def open_maybe(model_path: Path, **_: object) -> AsyncIterator[ToyEngine]:
        if broken:
            raise EngineError("no such layer")
        async with open_toy_engine(model_path) as engine:
            yield engine

    async with shelf(tmp_path, monkeypatch, open_engine=open_maybe) as engines:
        with pytest.raises(EngineError, match="no such layer"):
            async with engines.use(None):
                pass
        assert engines.failure() == "no such layer"
        broken = False
        async with engines.use(None):
            assert engines.failure() == ""


async def test_an_engine_in_use_is_never_ended_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path, "one")
    make_model(tmp_path, "two")
    async with shelf(tmp_path, monkeypatch) as engines, engines.use("one"), engines.use("two"):
        assert engines.loaded() == ["one", "two"]


async def test_requests_for_one_model_share_one_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path, "only")
    got: list[object] = []

    async def use(engines: EngineShelf) -> None:
        async with engines.use(None) as engine:
            got.append(engine)

    async with shelf(tmp_path, monkeypatch) as engines:
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(use, engines)
        assert len({id(engine) for engine in got}) == 1
