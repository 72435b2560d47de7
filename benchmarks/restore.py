"""How long stored state takes to become caches, beside what MLX needs to load the same bytes from a warm file.

Hashing is part of a restore, and is shown apart too. Nothing is computed: the values are made up.
"""

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.report import Rate, print_rates
from kvnet.engine.interface import ModelInfo
from kvnet.engine.kv_state import Exported, ExportRequest, RestorePlan, WrittenChunk
from kvnet.engine.mlx import blas, runtime
from kvnet.engine.scratch import new_pack, scratch_restore
from kvnet.format.chunks import ChunkKind, ChunkPlan, layer_groups
from kvnet.format.fingerprint import Fingerprint, LayerLayout, Producer
from kvnet.format.hashes import blake3_hash
from kvnet.format.tensor import DType, LayerKind

N_TOKENS = 4_681
"""With 28 layers of 8 heads, 128 wide, in 16 bits: 512 MiB, as a model of 3 billion parameters makes."""

FINGERPRINT = Fingerprint(
    weights=bytes(32),
    config=bytes(32),
    adapters=(),
    architecture="made-up",
    layers=LayerLayout((LayerKind(cache="kv", heads=8, k_dim=128, v_dim=128, dtype=DType.FLOAT16),), bytes(28)),
)
ROUNDS = 7


def main() -> None:
    """Print medians, spreads and ratios."""
    blas.preload()
    runtime.import_mlx_lm()
    import mlx.core as mx

    from kvnet.engine.mlx.restoring import restore
    from kvnet.engine.mlx.unfilled import clear_cache

    def load() -> None:
        arrays: Any = mx.load(str(file))
        mx.eval(list(arrays.values()))

    def hash_all() -> None:
        for number, tile in enumerate(tiles):
            assert blake3_hash(tile) == plan.chunks[number].hash

    def restore_all() -> None:
        restore(plan, FINGERPRINT, capacity_tokens=N_TOKENS, between=lambda: None)

    with TemporaryDirectory(prefix="kvnet-restore-") as folder:
        plan, file = _artifact(Path(folder) / "pack"), Path(folder) / "arrays.safetensors"
        data = plan.chunks[0].path.read_bytes()
        tiles = [data[chunk.offset : chunk.offset + chunk.length_bytes] for chunk in plan.chunks]
        caches = restore(plan, FINGERPRINT, capacity_tokens=N_TOKENS, between=lambda: None)
        rows = {f"{n}.{name}": getattr(cache, name) for n, cache in enumerate(caches) for name in ("keys", "values")}
        mx.save_safetensors(str(file), {name: mx.contiguous(array[:, :, :N_TOKENS]) for name, array in rows.items()})
        del caches, rows
        runs = {"mx.load and eval, warm file": load, "restore": restore_all, "hashing alone, one thread": hash_all}
        rates: dict[str, list[float]] = {what: [] for what in runs}
        for number in range(ROUNDS + 1):
            for what, run in runs.items():
                clear_cache()
                begun = time.perf_counter()
                run()
                if number:
                    rates[what].append(len(data) / (time.perf_counter() - begun))
    # Per round, so that both times are of the same moment.
    pairs = zip(rates["restore"], rates["hashing alone, one thread"], strict=True)
    rates["restore, less the hashing in it"] = [1 / (1 / restored - 1 / hashed) for restored, hashed in pairs]
    title = f"restore, {len(data) >> 20} MiB of K/V, {ROUNDS} rounds side by side"
    print_rates(title, [Rate(what, tuple(each)) for what, each in rates.items()])


def _artifact(pack: Path) -> RestorePlan:
    import numpy as np

    plan = ChunkPlan(n_tokens=N_TOKENS, layers=FINGERPRINT.layers, groups=layer_groups(FINGERPRINT.layers))
    generator = np.random.default_rng(0)
    written: list[WrittenChunk] = []
    with new_pack(pack).open("wb") as file:
        for spec in plan:
            if spec.kind is ChunkKind.TILE:
                tile = generator.random(spec.raw_size_bytes // 2, np.float32).astype(np.float16).tobytes()
                written.append(WrittenChunk(spec.index, file.tell(), len(tile), blake3_hash(tile)))
                file.write(tile)
    request = ExportRequest([1] * N_TOKENS, None, pack, 0)
    return scratch_restore(_info(), request, Exported(tuple(written), 0, N_TOKENS, 0.0, 0.0))


def _info() -> ModelInfo:
    return ModelInfo(
        name="made-up",
        path=Path(),
        fingerprint=FINGERPRINT,
        producer=Producer(runtime="mlx-lm", versions="", device="", system="", prefill_step=512),
        tokenizer_digest=bytes(32),
        template_digest=bytes(32),
        window_tokens=0,
        kv_bytes_per_token=FINGERPRINT.layers.bytes_per_token,
        weights_size_bytes=0,
        memory_budget_bytes=1 << 40,
        shareable=True,
        refusal="",
    )


if __name__ == "__main__":
    main()
