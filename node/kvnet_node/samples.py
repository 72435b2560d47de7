"""The models of this machine whose identity is known, and the sample of each: kept on disk, made when nobody waits.

A fingerprint is known once a model was loaded, and a sample is made once for each fingerprint and producer. A folder
whose files changed, or another version of MLX, makes both unknown again.
"""

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import structlog
from blake3 import blake3

from kvnet.engine.interface import ModelInfo
from kvnet.engine.model_folder import ModelEntry
from kvnet.errors import KvnetError
from kvnet.exchange.models import OwnModel
from kvnet.format import cbor
from kvnet.format.fingerprint import Fingerprint, Producer, decode_fingerprint
from kvnet.format.sample import MAX_SAMPLE_BYTES, decode_sample
from kvnet.protocol.matching import ModelHere, Packing
from kvnet.protocol.messages.models import MAX_GROUP, MAX_WEIGHT_BITS
from kvnet_node.paths import write_private

_log = structlog.get_logger(__name__)

MAX_MODELS = 256
"""Models remembered; those loaded longest ago go first."""

BOOK_NAME = "models.json"

COMPUTES = ("mlx", "mlx-lm")
"""Packages whose version is part of what computes."""


class _Known(msgspec.Struct, frozen=True):
    """A model that was loaded once."""

    path: str
    stamp: str
    name: str
    fingerprint: bytes
    producer: bytes
    bits: int = 0
    group: int = 0
    dtype: str = ""


class _Book(msgspec.Struct, frozen=True):
    models: list[_Known]


def model_names(directory: Path) -> dict[bytes, str]:
    """What models that were ever loaded here are called, by the hash of their fingerprint. Reads a file.

    Args:
        directory: of a `SampleBook`.
    """
    try:
        known = _read_book(directory).models
        return {bytes(decode_fingerprint(each.fingerprint).hash): each.name for each in known}
    except (OSError, msgspec.DecodeError, KvnetError):
        return {}


def _read_book(directory: Path) -> _Book:
    return msgspec.json.decode((directory / BOOK_NAME).read_bytes(), type=_Book)


class SampleBook:
    """See the module. Its calls read and write files; none of them takes long.

    Args:
        directory: where it is kept.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[str, _Known] = {}
        self._own: dict[str, OwnModel] = {}

    def load(self) -> None:
        """Take up what was kept of folders that are as they were."""
        try:
            book = _read_book(self._directory)
        except (FileNotFoundError, msgspec.DecodeError):
            return
        for known in book.models[:MAX_MODELS]:
            try:
                if known.stamp == stamp_of(Path(known.path)):
                    self._known[known.path] = known
                    self._own[known.path] = self._read(known)
            except (KvnetError, OSError) as error:
                _log.info("a model is unknown again", model=known.name, reason=type(error).__name__)

    def models(self) -> list[OwnModel]:
        """Every model that is known, the one loaded last first."""
        return list(reversed(self._own.values()))

    def own(self, path: Path) -> OwnModel | None:
        """A model by its folder; None when it is not known."""
        return self._own.get(str(path))

    def note(self, entry: ModelEntry, info: ModelInfo) -> bool:
        """A model is loaded; whether that says anything new."""
        if info.fingerprint is None:
            return False
        packed = entry.quantisation
        if packed is not None and not (0 < packed.bits <= MAX_WEIGHT_BITS and 0 <= packed.group_size <= MAX_GROUP):
            packed = None
        known = _Known(
            str(entry.path),
            stamp_of(entry.path),
            entry.name,
            info.fingerprint.encode(),
            cbor.encode_struct(info.producer),
            packed.bits if packed is not None else 0,
            packed.group_size if packed is not None else 0,
            entry.dtype,
        )
        if self._known.get(known.path) == known:
            return False
        self._known.pop(known.path, None)
        self._own.pop(known.path, None)
        self._known[known.path] = known
        self._own[known.path] = self._read(known)
        for path in list(self._known)[:-MAX_MODELS]:
            del self._known[path], self._own[path]
        self._write()
        return True

    def put(self, entry: ModelEntry, info: ModelInfo, data: bytes) -> None:
        """Keep the sample that a loaded model has made.

        Raises:
            MalformedError: it is not the sample of this model.
        """
        if info.fingerprint is None:
            return
        decode_sample(data, info.fingerprint)
        self.note(entry, info)
        write_private(self._sample_file(info.fingerprint, cbor.encode_struct(info.producer)), data)
        for path, known in self._known.items():
            # A copy of the model in another folder has the same one.
            if known.fingerprint == info.fingerprint.encode():
                self._own[path] = self._read(known)

    def _read(self, known: _Known) -> OwnModel:
        """A known model with its sample, if there is one that is whole."""
        fingerprint = decode_fingerprint(known.fingerprint)
        producer = cbor.decode_as(Producer, known.producer, max_bytes=len(known.producer), what="producer")
        here = ModelHere(known.name, fingerprint, producer, Packing(known.bits, known.group, known.dtype))
        try:
            with self._sample_file(fingerprint, known.producer).open("rb") as file:
                sample = decode_sample(file.read(MAX_SAMPLE_BYTES + 1), fingerprint)
        except (OSError, KvnetError):
            return OwnModel(here)
        if sample.producer != producer:
            return OwnModel(here)
        return OwnModel.of(ModelHere(here.name, fingerprint, producer, here.packing, sample))

    def _write(self) -> None:
        write_private(self._directory / BOOK_NAME, msgspec.json.encode(_Book(list(self._known.values()))))

    def _sample_file(self, fingerprint: Fingerprint, producer: bytes) -> Path:
        return self._directory / f"{fingerprint.hash.hex()[:32]}-{blake3(producer).hexdigest()[:16]}.sample"


def stamp_of(folder: Path) -> str:
    """What changes when a model folder or what computes with it does: names, sizes and times of its files, versions.

    Raises:
        OSError: the folder cannot be read.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix in {".json", ".safetensors"})
    lines = [f"{path.name} {stat.st_size} {stat.st_mtime_ns}" for path in files for stat in (os.stat(path),)]
    lines += [f"{package} {_version(package)}" for package in COMPUTES]
    return blake3("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
