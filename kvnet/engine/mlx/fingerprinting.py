"""Digests of a model folder: weights, configuration, tokenizer, chat template.

The weights digest depends on tensor names, dtypes, shapes and bytes alone, never on paths, shard files, their order or
times, so that nodes agree on it. Hashing is remembered per file under (device, inode, size, mtime, ctime).
"""

import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvnet.engine.mlx.safetensors import TensorDigest, hash_tensors
from kvnet.errors import EngineError
from kvnet.format.fingerprint import weights_digest

SETTLED_S = 2.0
"""A file changed less than this ago may change again within one tick of the file system's clock: never remembered."""

MAX_REMEMBERED_FILES = 512
"""Files in the digest cache; the oldest are forgotten."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tiktoken.model",
)
"""Files that decide which token ids a text becomes."""


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What tells two states of one file apart without reading it."""

    dev: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> "FileStamp":
        """The stamp of the file a path leads to; symbolic links are followed."""
        found = path.stat()
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    @property
    def key(self) -> str:
        """The stamp as a key of the digest cache."""
        return f"{self.dev}:{self.inode}:{self.size_bytes}:{self.mtime_ns}:{self.ctime_ns}"

    def settled(self, now_s: float) -> bool:
        """Whether the file is old enough for its stamp to be trusted."""
        return now_s - max(self.mtime_ns, self.ctime_ns) / 1e9 > SETTLED_S


class DigestCache:
    """Remembers tensor hashes by file stamp in one JSON file; a damaged one is started afresh.

    Args:
        path: where to keep it; ``None`` remembers nothing.
        verify: hash again even what is remembered, and remember the new result.
    """

    def __init__(self, path: Path | None, *, verify: bool = False) -> None:
        self._path = path
        self._entries: dict[str, list[list[Any]]] = {} if verify or path is None else _read_entries(path)
        self._changed = False

    def tensors(self, path: Path) -> list[TensorDigest]:
        """Tensor hashes of a file, remembered or made now.

        Raises:
            EngineError: the file changed while it was read, or is not a safetensors file.
        """
        before = FileStamp.of(path)
        remembered = self._entries.get(before.key)
        if remembered is not None:
            return [TensorDigest(n, d, tuple(s), bytes.fromhex(h)) for n, d, s, h in remembered]
        digests = hash_tensors(path)
        if FileStamp.of(path) != before:
            raise EngineError(f"{path.name} changed while it was read", hint="load the model again once it is complete")
        if before.settled(time.time()):
            self._entries[before.key] = [[t.name, t.dtype, list(t.shape), t.hash.hex()] for t in digests]
            self._changed = True
        return digests

    def save(self) -> None:
        """Writes the cache if it changed: a private temporary file, then a rename."""
        if self._path is None or not self._changed:
            return
        kept = dict(list(self._entries.items())[-MAX_REMEMBERED_FILES:])
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # mkstemp creates the file 0600.
        handle, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=".digests-", suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"version": 1, "files": kept}, file)
        os.replace(temporary, self._path)
        self._changed = False


def _read_entries(path: Path) -> dict[str, list[list[Any]]]:
    try:
        document = json.loads(path.read_bytes())
        entries = document["files"] if document["version"] == 1 else {}
        for tensors in entries.values():
            for name, dtype, shape, digest in tensors:
                if not (isinstance(name, str) and isinstance(dtype, str) and isinstance(shape, list)):
                    return {}
                if len(bytes.fromhex(digest)) != 32:
                    return {}
        return dict(entries)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def weight_files(folder: Path) -> list[Path]:
    """The files mlx-lm loads: ``model*.safetensors``.

    Raises:
        EngineError: there are none.
    """
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise EngineError(
            f"{folder.name}: expected model*.safetensors, found none",
            hint="kvnet model list shows the models kvnet can load",
        )
    return files


def digest_weights(files: list[Path], cache: DigestCache) -> bytes:
    """32 bytes over every tensor of a model.

    Raises:
        EngineError: two files hold a tensor of the same name: which one counts would depend on their order.
    """
    tensors: dict[str, TensorDigest] = {}
    for file in files:
        for tensor in cache.tensors(file):
            if tensor.name in tensors:
                raise EngineError(
                    f"tensor {tensor.name!r} is in two weight files; only one of them can count",
                    hint="remove the files that do not belong to the model",
                )
            tensors[tensor.name] = tensor
    return weights_digest((t.name, t.dtype, t.shape, t.hash) for t in tensors.values())


def read_config(folder: Path) -> dict[str, Any]:
    """The model's configuration as mlx-lm uses it, quantisation kept in a second file included.

    Raises:
        EngineError: ``config.json`` is missing or is not a JSON object.
    """
    config = _read_json(folder / "config.json")
    extra = folder / "hf_quant_config.json"
    if "quantization_config" not in config and extra.exists():
        config["quantization_config"] = _read_json(extra)
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise EngineError(
            f"{path.parent.name}: expected {path.name}, found none; without it the K/V cannot be told apart",
            hint="a model folder holds config.json, model*.safetensors and tokenizer.json",
        ) from None
    except (OSError, ValueError) as error:
        raise EngineError(f"{path.name}: expected a JSON object ({error})") from error
    if not isinstance(document, dict):
        raise EngineError(f"{path.name}: expected a JSON object, found {type(document).__name__}")
    return document


def digest_tokenizer(folder: Path) -> bytes:
    """32 bytes over the tokenizer's files, by name and content."""
    digest = blake3()
    for name in TOKENIZER_FILES:
        path = folder / name
        if path.is_file():
            digest.update(name.encode() + b"\0" + blake3(path.read_bytes()).digest())
    return digest.digest()


def digest_template(template: str | Mapping[str, str] | list[Any] | None) -> bytes:
    """32 bytes over the chat template's text; over an empty text when there is none."""
    if template is None:
        template = ""
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return blake3(text.encode()).digest()
