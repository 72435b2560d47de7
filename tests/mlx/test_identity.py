"""What makes two model folders the same model, and what does not."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from kvnet.engine.interface import ModelInfo
from kvnet.errors import EngineError
from tests.mlx import tinymodels
from tests.mlx.conftest import Opener

pytestmark = pytest.mark.mlx


async def info_of(opener: Opener, model: Path, *, digest_cache: Path | None = None) -> ModelInfo:
    async with opener(model, digest_cache=digest_cache) as engine:
        return engine.info


async def test_fingerprint_follows_what_changes_the_state_and_nothing_else(opener: Opener, tmp_path: Path) -> None:
    first = tinymodels.write_model(tmp_path / "m1", shards=1)
    original = await info_of(opener, first)
    assert original.fingerprint is not None

    # Other path, inode, times, shard files and their order.
    moved = tinymodels.write_model(tmp_path / "elsewhere" / "m3", shards=3)
    for file in moved.iterdir():
        os.utime(file, (1_000_000, 1_000_000))
    same = await info_of(opener, moved)
    assert same.fingerprint == original.fingerprint

    # One element of one tensor, size and times kept.
    changed = Path(shutil.copytree(first, tmp_path / "m2"))
    weights = changed / "model.safetensors"
    times = weights.stat()
    data = bytearray(weights.read_bytes())
    data[-4:] = np.float32(0.75).tobytes()
    weights.write_bytes(data)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    other = await info_of(opener, changed)
    assert other.fingerprint is not None
    assert other.fingerprint != original.fingerprint
    assert other.fingerprint.weights != original.fingerprint.weights

    # Only the rotation's scaling.
    scaled = Path(shutil.copytree(first, tmp_path / "m4"))
    config = json.loads((scaled / "config.json").read_text())
    config["rope_scaling"] = {"type": "linear", "factor": 2.0}
    (scaled / "config.json").write_text(json.dumps(config))
    rotated = await info_of(opener, scaled)
    assert rotated.fingerprint is not None
    assert rotated.fingerprint.weights == original.fingerprint.weights
    assert rotated.fingerprint.config != original.fingerprint.config

    # Only the tokenizer, only the template: token ids decide, the digests explain a miss.
    merged = tinymodels.write_model(tmp_path / "m5", merges=["a n"])
    remerged = await info_of(opener, merged)
    assert remerged.fingerprint == original.fingerprint
    assert remerged.tokenizer_digest != original.tokenizer_digest
    dated = tinymodels.write_model(tmp_path / "m6", template=tinymodels.DATED_TEMPLATE)
    retold = await info_of(opener, dated)
    assert retold.fingerprint == original.fingerprint
    assert retold.tokenizer_digest == original.tokenizer_digest
    assert retold.template_digest != original.template_digest


async def test_weights_changed_in_place_are_noticed_in_spite_of_the_digest_cache(
    opener: Opener, tmp_path: Path
) -> None:
    model = tinymodels.write_model(tmp_path / "model")
    cache = tmp_path / "digests.json"
    first = await info_of(opener, model, digest_cache=cache)
    weights = model / "model.safetensors"
    times = weights.stat()
    with weights.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(np.float32(0.75).tobytes())
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    second = await info_of(opener, model, digest_cache=cache)
    assert first.fingerprint != second.fingerprint


async def test_model_swapped_under_a_restarted_engine_is_refused(opener: Opener, tmp_path: Path) -> None:
    import signal

    from kvnet.errors import EngineCrashedError
    from tests.mlx.requests import generate

    model = tinymodels.write_model(tmp_path / "model")
    async with opener(model) as engine:
        await engine.tokenize("a")
        tinymodels.write_model(model, seed=7)
        assert engine.process_id is not None
        os.kill(engine.process_id, signal.SIGKILL)
        with pytest.raises((EngineCrashedError, EngineError)):
            await generate(engine, [5, 6, 7])
        with pytest.raises(EngineError, match="changed while it was in use"):
            await generate(engine, [5, 6, 7])


async def test_model_whose_configuration_has_no_canonical_form_generates_and_is_not_shared(
    opener: Opener, tmp_path: Path
) -> None:
    from tests.mlx.requests import generate

    model = tinymodels.write_model(tmp_path / "model", {**tinymodels.LLAMA, "time_step_limit": [0.0, float("inf")]})
    async with opener(model) as engine:
        assert engine.info.fingerprint is None
        assert engine.info.refusal.startswith("model configuration")
        assert (await generate(engine, [5, 6, 7])).text
