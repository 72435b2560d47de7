"""What a model folder says of itself: found out from its files alone, without loading or downloading anything.

A model is a folder with ``config.json`` and ``*.safetensors``. The engine decides for good when it loads it.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvnet.engine import layer_sizes
from kvnet.errors import CompatibilityError, KvnetError, MalformedError, UnknownModelError

# The largest config.json of a published model is below 1 MiB; 16 MiB leaves room and bounds the read.
_MAX_CONFIG_SIZE_BYTES = 16 << 20
# The safetensors library refuses longer headers (its MAX_HEADER_SIZE).
_MAX_HEADER_SIZE_BYTES = 100_000_000

_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How weights are packed: ``bits`` a weight, in groups of ``group_size`` with a scale each."""

    bits: int
    group_size: int

    def __str__(self) -> str:
        return f"{self.bits}-bit, groups of {self.group_size}"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One model folder.

    Attributes:
        name: ``organisation/name`` in the Hugging Face cache and LM Studio, else the folder's name.
        path: the folder to load.
        source: ``configured``, ``data``, ``huggingface`` or ``lmstudio``.
        size_bytes: of the weights.
        model_type: as the config says; empty for a broken folder.
        quantisation: of the weights, or None.
        dtype: of the activations and so of K/V: float32, float16 or bfloat16; empty when unknown.
        window_tokens: the longest prompt, or None when the config does not say.
        kv_bytes_per_token: while no window is full; None when only loading can tell.
        shareable: whether its K/V can be an artifact; None when that is decided when loaded.
        reason: why not, or why undecided, or what is broken; empty otherwise.
        broken: the folder cannot be loaded at all.
    """

    name: str
    path: Path
    source: str
    size_bytes: int
    model_type: str = ""
    quantisation: Quantisation | None = None
    dtype: str = ""
    window_tokens: int | None = None
    kv_bytes_per_token: int | None = None
    shareable: bool | None = None
    reason: str = ""
    broken: bool = False

    def as_json(self) -> dict[str, Any]:
        """The entry as one JSON object."""
        packed = self.quantisation
        return {
            "name": self.name,
            "path": str(self.path),
            "source": self.source,
            "size_bytes": self.size_bytes,
            "model_type": self.model_type,
            "quantisation": None if packed is None else {"bits": packed.bits, "group_size": packed.group_size},
            "dtype": self.dtype,
            "window_tokens": self.window_tokens,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "shareable": self.shareable,
            "reason": self.reason,
            "broken": self.broken,
        }


def inspect_model(path: Path, *, name: str | None = None, source: str = "configured") -> ModelEntry | None:
    """Describe the model in ``path``; None when the folder holds neither a config nor weights."""
    name = name if name is not None else path.name or str(path)
    try:
        weights = sorted(file for file in path.glob("*.safetensors") if not file.name.startswith("."))
        size_bytes = sum(file.stat().st_size for file in weights if file.exists())
        if not weights and not os.path.lexists(path / "config.json"):
            return None
        return _describe(path, name, source, weights, size_bytes)
    except KvnetError as error:
        return _broken(path, name, source, str(error))
    except OSError as error:
        return _broken(path, name, source, f"cannot be read: {error.strerror or type(error).__name__}")


def read_config(path: Path) -> dict[str, Any]:
    """Read ``config.json``, given as the file or as the folder that holds it.

    Raises:
        UnknownModelError: no such file.
        MalformedError: too large, or not a JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as opened:
            data = opened.read(_MAX_CONFIG_SIZE_BYTES + 1)
    except FileNotFoundError as error:
        raise UnknownModelError(f"expected a config.json at {file}, found none") from error
    except OSError as error:
        raise UnknownModelError(f"config.json at {file} cannot be read: {error.strerror or error}") from error
    if len(data) > _MAX_CONFIG_SIZE_BYTES:
        raise MalformedError(f"expected a config.json of at most {_MAX_CONFIG_SIZE_BYTES:,} bytes, found more")
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"expected JSON in config.json, found something else: {error}") from error
    if not isinstance(config, dict):
        raise MalformedError(f"expected a JSON object in config.json, found {type(config).__name__}")
    return config


def _describe(path: Path, name: str, source: str, weights: list[Path], size_bytes: int) -> ModelEntry:
    if not os.path.lexists(path / "config.json"):
        raise MalformedError("no config.json beside the weights")
    config = read_config(path)
    if not weights:
        raise MalformedError("no *.safetensors beside config.json")
    _check_complete(path, weights)
    kind = layer_sizes.model_type(config)
    dtype = _activation_dtype(weights[0]) or layer_sizes.kv_dtype(config)[0]
    shareable, reason = layer_sizes.shareable(config)
    try:
        per_token = layer_sizes.kv_bytes_per_token(config, dtype=dtype)
    except CompatibilityError:
        per_token = None
    return ModelEntry(
        name=name,
        path=path,
        source=source,
        size_bytes=size_bytes,
        model_type=kind,
        quantisation=_quantisation(config),
        dtype=dtype,
        window_tokens=layer_sizes.window_tokens(config),
        kv_bytes_per_token=per_token,
        shareable=shareable,
        reason=reason,
    )


def _broken(path: Path, name: str, source: str, reason: str) -> ModelEntry:
    return ModelEntry(name=name, path=path, source=source, size_bytes=0, shareable=False, reason=reason, broken=True)


def _check_complete(path: Path, weights: list[Path]) -> None:
    missing = [file.name for file in weights if not file.exists()]
    index = path / "model.safetensors.index.json"
    if index.is_file():
        if index.stat().st_size > _MAX_CONFIG_SIZE_BYTES:
            raise MalformedError(f"expected {index.name} of at most {_MAX_CONFIG_SIZE_BYTES:,} bytes, found more")
        try:
            shards = json.loads(index.read_bytes())["weight_map"].values()
            missing += sorted({str(shard) for shard in shards} - {file.name for file in weights})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise MalformedError(f"expected a weight_map in {index.name}, found none") from error
    if missing:
        raise MalformedError(f"{len(missing)} weight files are missing, the first is {missing[0]}")


def _quantisation(config: Mapping[str, Any]) -> Quantisation | None:
    for key in ("quantization", "quantization_config"):
        packed = config.get(key)
        if isinstance(packed, dict) and isinstance(packed.get("bits"), int):
            group_size = packed.get("group_size")
            return Quantisation(packed["bits"], group_size if isinstance(group_size, int) else 0)
    return None


def _activation_dtype(file: Path) -> str:
    """The floating dtype most tensors of a safetensors file have: that of norms and scales, never of packed weights.

    Raises:
        MalformedError: the file's header is no safetensors header.
    """
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if not 2 <= size <= min(_MAX_HEADER_SIZE_BYTES, file.stat().st_size - 8):
            raise MalformedError(f"expected a safetensors header in {file.name}, found a length of {size:,} bytes")
        data = opened.read(size)
    try:
        header = json.loads(data)
        dtypes = Counter(tensor["dtype"] for key, tensor in header.items() if key != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MalformedError(f"expected a safetensors header in {file.name}, found something else") from error
    floating = {name: dtypes[tag] for tag, name in _DTYPE_NAMES.items() if dtypes[tag]}
    return max(floating, key=lambda name: floating[name], default="")
