"""Finding and importing models, for verbs that load none."""

import subprocess
from collections.abc import Callable
from pathlib import Path

from kvnet.engine.gguf_source import ImportProgress, ImportResult, check_dtype, import_command, parse_line
from kvnet.engine.model_folder import ModelEntry
from kvnet.engine.models import scan_models
from kvnet.errors import EngineError
from kvnet_node.config import Config
from kvnet_node.events import Progress
from kvnet_node.paths import default_cache_dir


def models_here(config: Config, data_dir: Path) -> list[ModelEntry]:
    """Every model on this machine that this configuration looks at, the one the demo imported included."""
    configured = [Path(path).expanduser() for path in config.model_paths]
    return scan_models([*configured, demo_models_dir()], data_dir=data_dir)


def missing_model_paths(config: Config) -> list[str]:
    """The configured folders that are not there."""
    return [path for path in config.model_paths if not Path(path).expanduser().is_dir()]


def demo_models_dir() -> Path:
    """Where ``kvnet demo`` keeps the model it imports."""
    return default_cache_dir() / "models"


def import_model(gguf: Path, folder: Path, *, dtype: str, on_progress: Callable[[Progress], None]) -> ImportResult:
    """Import a GGUF file as an MLX folder, in a process of its own that ends with this one.

    Raises:
        UsageError: an unknown dtype, no such file, or a folder that is taken.
        KvnetError: whatever the import reports.
    """
    command = import_command(gguf, folder, dtype=check_dtype(dtype))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        result: ImportResult | None = None
        try:
            assert process.stdout is not None  # noqa: S101 - PIPE was asked for
            for line in process.stdout:
                event = parse_line(line)
                if isinstance(event, ImportProgress):
                    on_progress(Progress(event.stage, event.done_bytes, event.total_bytes, "bytes"))
                else:
                    result = event
        except BaseException:
            process.terminate()
            raise
        stderr = process.stderr.read() if process.stderr else b""
    if result is None:
        last = stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no message"]
        raise EngineError(f"the import process ended with {process.returncode} before it was done: {last[0]}")
    return result
