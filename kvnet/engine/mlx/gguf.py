"""Turns a GGUF file of a Llama-type model into an MLX model folder.

MLX reads the file (Q4_0, Q4_1 and Q8_0 as packed weights with scales and biases; other quantisations it widens to
float16 itself). Here the packed ones are widened on the CPU in float32: scale x code is exact in float32 for these
formats and the one addition rounds once, so every machine writes the same weights from the same file.

Run as ``python -m kvnet.engine.mlx.gguf [--dtype D] GGUF OUT_DIR`` it prints the JSON lines of
``kvnet.engine.gguf_source`` and ends with the exit code of the error it reported.
"""

import argparse
import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from blake3 import blake3

from kvnet.engine.gguf_source import (
    IMPORT_DTYPES,
    ImportDType,
    ImportProgress,
    ImportResult,
    check_dtype,
    encode_line,
)
from kvnet.engine.mlx.gguf_config import ROPE_FACTORS, config_of
from kvnet.engine.mlx.gguf_tokenizer import TokenizerFiles, build_tokenizer
from kvnet.engine.mlx.leaving import leave
from kvnet.errors import CompatibilityError, EngineError, KvnetError, MalformedError, StoreError, UsageError

# What an import was made from; lies beside the weights and takes no part in the model's identity.
SOURCE_FILE = "gguf-import.json"
_SOURCE_VERSION = 1
# Largest read of one `read`: keeps memory flat while the source is hashed.
_READ_SIZE_BYTES = 1 << 20

# GGUF packs these formats in groups of 32 weights with one float16 scale (GGUF specification, "Quantization").
_GROUP_SIZE = 32

_BLOCK_TENSORS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_up": "mlp.up_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TOP_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

ProgressSink = Callable[[ImportProgress], None]


def import_gguf(
    gguf_path: Path, out_dir: Path, *, dtype: ImportDType = "float32", progress: ProgressSink | None = None
) -> ImportResult:
    """Write the model in ``gguf_path`` as an MLX folder at ``out_dir``.

    The folder appears whole or not at all: everything is written beside it and renamed at the end. When
    ``out_dir`` already is this import (same source bytes, same dtype), nothing is written.

    Args:
        gguf_path: a GGUF file whose ``general.architecture`` is ``llama``.
        out_dir: the folder to make; its parent is made when missing.
        dtype: of every weight written.
        progress: called between tensors with the bytes done and the bytes in all.

    Raises:
        UsageError: no such file, or ``out_dir`` is taken by something else.
        CompatibilityError: another architecture, tokenizer, or a tensor that does not belong to a Llama.
        MalformedError: not a GGUF file, or metadata that contradicts the tensors.
        StoreError: the folder cannot be written.
    """
    report = progress or (lambda _event: None)
    source = _describe_source(gguf_path, dtype, report)
    if out_dir.exists():
        _refuse_other_model(out_dir, source)
        return ImportResult(out_dir, reused=True)
    with mx.stream(mx.cpu):
        tensors, metadata = _read(gguf_path)
        config = config_of(metadata, tensors)
        files = build_tokenizer(metadata, window_tokens=config["max_position_embeddings"])
        config |= {"vocab_size": _vocab_size(tensors, files)} | _special_ids(files)
        weights = _weights(tensors, config, dtype, report)
        config["torch_dtype"] = dtype
        return _write(out_dir, weights, config, files, source, report)


def _describe_source(path: Path, dtype: str, report: ProgressSink) -> dict[str, Any]:
    if not path.is_file():
        raise UsageError(f"expected a GGUF file, found none at {path}")
    size_bytes = path.stat().st_size
    digest = blake3()
    done = 0
    with path.open("rb") as file:
        while piece := file.read(_READ_SIZE_BYTES):
            if done == 0 and piece[:4] != b"GGUF":
                raise MalformedError(
                    f"expected a GGUF file (it begins with 'GGUF'), found {piece[:4]!r} in {path.name}"
                )
            digest.update(piece)
            done += len(piece)
            if done % (32 * _READ_SIZE_BYTES) == 0 or done == size_bytes:
                report(ImportProgress("read", done, size_bytes))
    if done == 0:
        raise MalformedError(f"expected a GGUF file, found an empty one: {path.name}")
    return {
        "version": _SOURCE_VERSION, "file": path.name, "size_bytes": done, "blake3": digest.hexdigest(), "dtype": dtype,
    }  # fmt: skip


def _refuse_other_model(out_dir: Path, source: Mapping[str, Any]) -> None:
    try:
        found = json.loads((out_dir / SOURCE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    keys = ("version", "blake3", "dtype")
    if isinstance(found, dict) and all(found.get(key) == source[key] for key in keys):
        return
    raise UsageError(
        f"expected no folder, or this same import, at {out_dir}; found another model or other files there",
        hint="choose another name with --name, or move that folder away",
    )


def _read(path: Path) -> tuple[dict[str, mx.array], dict[str, Any]]:
    try:
        # The stubs say array; with metadata asked for it is the pair of both dictionaries.
        tensors, raw = cast("tuple[dict[str, mx.array], dict[str, Any]]", mx.load(str(path), "gguf", True))
    except (RuntimeError, ValueError) as error:
        raise MalformedError(f"expected a whole GGUF file, found one MLX cannot read: {error}") from error
    metadata: dict[str, Any] = {
        key: value.tolist() if isinstance(value, mx.array) else value for key, value in raw.items()
    }
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise CompatibilityError(
            f"expected general.architecture = llama, found {architecture!r}",
            hint="import works for Llama-type files; use an MLX folder of this model instead",
        )
    if metadata.get("llama.expert_count"):
        raise CompatibilityError("expected a dense Llama, found a mixture of experts (llama.expert_count)")
    return tensors, metadata


def _vocab_size(tensors: Mapping[str, mx.array], files: TokenizerFiles) -> int:
    rows = int(tensors["token_embd.weight"].shape[0]) if "token_embd.weight" in tensors else 0
    if rows < files.vocab_size:
        raise MalformedError(f"expected an embedding of at least {files.vocab_size} tokens, found {rows} rows")
    return rows


def _special_ids(files: TokenizerFiles) -> dict[str, int]:
    found = {"bos_token_id": files.bos_token_id, "eos_token_id": files.eos_token_id}
    return {key: value for key, value in found.items() if value is not None}


def _weights(
    tensors: dict[str, mx.array], config: Mapping[str, Any], dtype: str, report: ProgressSink
) -> dict[str, mx.array]:
    target = getattr(mx, dtype)
    names = sorted(name for name in tensors if name.endswith((".weight", ".bias")) and name != ROPE_FACTORS)
    total = sum(tensors[name].nbytes for name in names)
    done = 0
    weights = {}
    for name in names:
        stem, _, part = name.rpartition(".")
        array = _widen(tensors, stem) if part == "weight" else tensors[name]
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        if (block := stem.rpartition(".")[2]) in heads:
            array = _split_halves(array, heads[block])
        array = mx.contiguous(array.astype(target))
        mx.eval(array)
        weights[f"{_mlx_name(stem)}.{part}"] = array
        done += tensors[name].nbytes
        report(ImportProgress("weights", done, total))
    _check_shapes(weights, config)
    return weights


def _widen(tensors: Mapping[str, mx.array], stem: str) -> mx.array:
    packed = tensors[f"{stem}.weight"]
    scales, biases = tensors.get(f"{stem}.scales"), tensors.get(f"{stem}.biases")
    if scales is None or biases is None:
        return packed
    bits = packed.shape[-1] * 32 // (scales.shape[-1] * _GROUP_SIZE)
    return mx.dequantize(
        packed, scales.astype(mx.float32), biases.astype(mx.float32), group_size=_GROUP_SIZE, bits=bits
    )


def _split_halves(rows: mx.array, n_heads: int) -> mx.array:
    """Undo GGUF's order of rotary rows: it interleaves each head's two halves, Llama's code keeps them apart."""
    per_head = rows.shape[0] // n_heads
    pairs = rows.reshape(n_heads, per_head // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _mlx_name(stem: str) -> str:
    if stem in _TOP_TENSORS:
        return _TOP_TENSORS[stem]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match is None or match[2] not in _BLOCK_TENSORS:
        raise CompatibilityError(f"expected only the tensors of a Llama, found {stem!r}")
    return f"model.layers.{int(match[1])}.{_BLOCK_TENSORS[match[2]]}"


def _check_shapes(weights: Mapping[str, mx.array], config: Mapping[str, Any]) -> None:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    block = {
        "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    expected = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        expected["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        expected |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    for name, shape in expected.items():
        found = tuple(weights[name].shape) if name in weights else None
        if found != shape:
            raise MalformedError(f"expected {name} of shape {shape}, found {found or 'no such tensor'}")
    if extra := sorted(name for name in weights.keys() - expected.keys() if name.endswith(".weight")):
        raise CompatibilityError(f"expected only the tensors of a Llama of its size, found {extra[0]!r}")


def _write(
    out_dir: Path, weights: dict[str, mx.array], config: Mapping[str, Any], files: TokenizerFiles,
    source: Mapping[str, Any], report: ProgressSink,
) -> ImportResult:  # fmt: skip
    texts = {
        "config.json": json.dumps(config, indent=2, sort_keys=True) + "\n",
        "generation_config.json": json.dumps(_special_ids(files), indent=2, sort_keys=True) + "\n",
        "tokenizer.json": files.tokenizer_json,
        "tokenizer_config.json": files.tokenizer_config_json,
        SOURCE_FILE: json.dumps(source, indent=2, sort_keys=True) + "\n",
    }
    size_bytes = sum(array.nbytes for array in weights.values())
    report(ImportProgress("write", 0, size_bytes))
    try:
        with _temporary_folder(out_dir) as folder:
            mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
            for name, text in texts.items():
                (folder / name).write_text(text, encoding="utf-8")
            for path in folder.iterdir():
                _sync(path)
            folder.rename(out_dir)
            _sync(out_dir.parent)
    except OSError as error:
        if out_dir.exists():
            _refuse_other_model(out_dir, source)  # another import of the same file ended first
            return ImportResult(out_dir, reused=True)
        raise StoreError(f"the model folder could not be written at {out_dir}: {error.strerror or error}") from error
    report(ImportProgress("write", size_bytes, size_bytes))
    return ImportResult(out_dir, reused=False)


@contextmanager
def _temporary_folder(out_dir: Path) -> Iterator[Path]:
    """A folder beside ``out_dir`` that is gone in the end; those of killed imports are removed first.

    A running import holds a lock on its folder, so an abandoned one is known by its free lock.
    """
    parent = out_dir.parent
    parent.mkdir(parents=True, exist_ok=True)
    for abandoned in parent.glob(f".{out_dir.name}.*.importing"):
        with contextlib.suppress(OSError):
            descriptor = _lock(abandoned)
            shutil.rmtree(abandoned, ignore_errors=True)
            os.close(descriptor)
    folder = parent / f".{out_dir.name}.{secrets.token_hex(4)}.importing"
    folder.mkdir()
    descriptor = _lock(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _lock(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main(arguments: list[str] | None = None) -> int:
    """Import one file, JSON lines on stdout; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kvnet.engine.mlx.gguf", description="Import a GGUF file.")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--dtype", default="float32", choices=IMPORT_DTYPES)
    options = parser.parse_args(arguments)

    def emit(event: ImportProgress | ImportResult | KvnetError) -> None:
        sys.stdout.buffer.write(encode_line(event))
        sys.stdout.buffer.flush()

    try:
        emit(import_gguf(options.gguf, options.out_dir, dtype=check_dtype(options.dtype), progress=emit))
    except KvnetError as error:
        emit(error)
        return error.exit_code
    except (MemoryError, RuntimeError) as error:
        failure = EngineError(f"the import failed: {error}")
        emit(failure)
        return failure.exit_code
    return 0


if __name__ == "__main__":
    leave(main())
