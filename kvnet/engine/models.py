"""The models on this machine: MLX folders found without loading or downloading anything.

Looked at, in this order: configured folders, ``<data dir>/models``, the Hugging Face cache and LM Studio's folder.
A model is a folder with ``config.json`` and ``*.safetensors``. What can be said from those files alone is said here;
the engine decides for good when it loads the model.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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


def scan_models(
    extra_paths: Sequence[Path] = (),
    *,
    data_dir: Path | None = None,
    home: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[ModelEntry]:
    """Every model folder on this machine, one entry each, sorted by name and path.

    Args:
        extra_paths: configured folders; each is a model, or holds models one or two levels below.
        data_dir: the node's data directory; its ``models`` folder is looked at too.
        home: the user's home directory; None asks the system.
        environment: where ``HF_HOME`` and the like are read; None is this process's own.

    A folder that cannot be read or makes no sense is listed with the reason; nothing here raises for it.
    """
    environment = os.environ if environment is None else environment
    home = Path.home() if home is None else home
    found: dict[Path, ModelEntry] = {}
    for source, name, path in _candidates(extra_paths, data_dir, home, environment):
        real = _real(path)
        if real not in found and (entry := inspect_model(path, name=name, source=source)) is not None:
            found[real] = entry
    return sorted(found.values(), key=lambda entry: (entry.name.casefold(), entry.name, str(entry.path)))


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


def resolve_model(text: str, entries: Sequence[ModelEntry]) -> ModelEntry:
    """The entry ``text`` names: its full name, the last part of its name, or the path of a model folder.

    Raises:
        UnknownModelError: nothing, or more than one thing, goes by that name, or the folder is broken.
    """
    for matches in (
        [entry for entry in entries if entry.name == text],
        [entry for entry in entries if entry.name.rpartition("/")[2] == text],
        [entry for entry in entries if text.casefold() in (entry.name.casefold(), _last_part(entry).casefold())],
        _by_path(text, entries),
    ):
        if len(matches) == 1:
            return _usable(matches[0])
        if matches:
            places = ", ".join(f"{entry.name} ({entry.path})" for entry in matches)
            raise UnknownModelError(
                f"expected one model named {text!r}, found {len(matches)}: {places}", hint="give the path of one"
            )
    raise UnknownModelError(f"expected a model named {text!r} on this machine, found none", hint=_choices(entries))


def choose_model(text: str | None, default: str | None, entries: Sequence[ModelEntry]) -> ModelEntry:
    """The model to use: the one asked for, else the configured default, else the only shareable one.

    Raises:
        UnknownModelError: none of these gives exactly one model; the hint lists them.
    """
    if text or default:
        return resolve_model(text or default or "", entries)
    shareable = [entry for entry in entries if entry.shareable]
    if len(shareable) == 1:
        return shareable[0]
    found = "none that can be shared" if not shareable else f"{len(shareable)} that can"
    raise UnknownModelError(f"expected --model, or one model on this machine, found {found}", hint=_choices(entries))


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


def find_config(text: str, entries: Sequence[ModelEntry]) -> tuple[str, dict[str, Any]]:
    """Name and config of what ``text`` points to: a config.json, a folder that holds one, or a model's name.

    Raises:
        UnknownModelError: no such model, folder or file.
        MalformedError: the config is no JSON object.
    """
    path = Path(text).expanduser()
    if path.is_file():
        return path.resolve().parent.name if path.name == "config.json" else path.stem, read_config(path)
    if path.is_dir() and os.path.lexists(path / "config.json"):
        return path.resolve().name, read_config(path)
    entry = resolve_model(text, entries)
    return entry.name, read_config(entry.path)


# --- where models lie -----------------------------------------------------------------------------------------


def _candidates(
    extra_paths: Sequence[Path], data_dir: Path | None, home: Path, environment: Mapping[str, str]
) -> Iterator[tuple[str, str | None, Path]]:
    for path in extra_paths:
        yield from (("configured", None, folder) for folder in _model_folders(path.expanduser()))
    if data_dir is not None:
        yield from (("data", None, folder) for folder in _subfolders(data_dir / "models"))
    for repository in _subfolders(_hub_cache(home, environment)):
        if repository.name.startswith("models--") and (snapshot := _newest_snapshot(repository)) is not None:
            yield "huggingface", repository.name.removeprefix("models--").replace("--", "/"), snapshot
    for publisher in _subfolders(home / ".lmstudio" / "models"):
        for folder in _subfolders(publisher):
            yield "lmstudio", f"{publisher.name}/{folder.name}", folder


def _hub_cache(home: Path, environment: Mapping[str, str]) -> Path:
    """The cache folder huggingface_hub would use: the same variables in the same order."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environment.get(variable):
            return _expand(environment[variable], home)
    if environment.get("HF_HOME"):
        return _expand(environment["HF_HOME"], home) / "hub"
    cache = _expand(environment["XDG_CACHE_HOME"], home) if environment.get("XDG_CACHE_HOME") else home / ".cache"
    return cache / "huggingface" / "hub"


def _expand(text: str, home: Path) -> Path:
    return home / text[2:] if text.startswith("~/") else Path(text)


def _newest_snapshot(repository: Path) -> Path | None:
    """The snapshot that the ref written last points to; without refs, the newest snapshot folder."""
    snapshots = {folder.name: folder for folder in _subfolders(repository / "snapshots")}
    try:
        refs = [file for file in (repository / "refs").rglob("*") if file.is_file() and file.stat().st_size < 256]
        dated = sorted(((file.stat().st_mtime_ns, file.name == "main", file) for file in refs), reverse=True)
        for _, _, file in dated:
            if (commit := file.read_text(encoding="ascii", errors="replace").strip()) in snapshots:
                return snapshots[commit]
        return max(snapshots.values(), key=lambda folder: (folder.stat().st_mtime_ns, folder.name), default=None)
    except OSError:
        return next(iter(snapshots.values()), None)


def _model_folders(path: Path) -> Iterator[Path]:
    if _looks_like_model(path) or not path.is_dir():
        yield path
        return
    for folder in _subfolders(path):
        if _looks_like_model(folder):
            yield folder
        else:
            yield from (below for below in _subfolders(folder) if _looks_like_model(below))


def _looks_like_model(path: Path) -> bool:
    try:
        return os.path.lexists(path / "config.json") or next(path.glob("*.safetensors"), None) is not None
    except OSError:
        return False


def _subfolders(path: Path) -> list[Path]:
    try:
        return sorted(child for child in path.iterdir() if not child.name.startswith(".") and child.is_dir())
    except OSError:
        return []


def _real(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return path


# --- what a folder says ---------------------------------------------------------------------------------------


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


# --- names ----------------------------------------------------------------------------------------------------


def _last_part(entry: ModelEntry) -> str:
    return entry.name.rpartition("/")[2]


def _by_path(text: str, entries: Sequence[ModelEntry]) -> list[ModelEntry]:
    try:
        path = Path(text).expanduser()
        if not path.is_dir():
            return []
    except (OSError, ValueError, RuntimeError):
        return []  # too long, or the home of somebody unknown: no path at all
    real = _real(path)
    for entry in entries:
        if _real(entry.path) == real:
            return [entry]
    entry_there = inspect_model(path, name=real.name)
    return [entry_there] if entry_there is not None else []


def _usable(entry: ModelEntry) -> ModelEntry:
    if entry.broken:
        raise UnknownModelError(
            f"expected a whole model at {entry.path}, found a broken one: {entry.reason}",
            hint="download or import it again",
        )
    return entry


def _choices(entries: Sequence[ModelEntry]) -> str:
    names = [entry.name for entry in entries if not entry.broken]
    if not names:
        return "no model was found here: `kvnet model list` says where it looks, `kvnet demo` brings a small one"
    shown = ", ".join(names[:20])
    return f"models here: {shown}" + (f" and {len(names) - 20} more" if len(names) > 20 else "")
