"""``kvnet model list`` and ``kvnet model import``."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from kvnet.engine.model_folder import ModelEntry
from kvnet.errors import UsageError
from kvnet_node.invocation import Context, absolute
from kvnet_node.output import columns, escape, format_bytes, format_count


def list_models(*, context: Context) -> None:
    """List MLX models on this machine: size, quantisation, dtype, window, bytes per token, shareable or why not."""
    from kvnet_node.models import missing_model_paths, models_here

    config = context.config()
    for path in missing_model_paths(config):
        context.output.warning(f"model.paths names a folder that does not exist: {escape(path)}")
    entries = models_here(config, context.data_dir)
    record = {"type": "model list", "models": [entry.as_json() for entry in entries]}

    def render(_: dict[str, Any]) -> str:
        headers = ("MODEL", "SIZE", "WEIGHTS", "DTYPE", "WINDOW", "K/V BYTES A TOKEN", "SHAREABLE")
        return columns([_row(entry) for entry in entries], headers) if entries else ""

    context.output.result(record, render)
    if not entries:
        context.output.message(
            "no MLX models found in the Hugging Face cache, ~/.lmstudio/models or model.paths; "
            "kvnet demo brings a small one, kvnet model import FILE.gguf makes one"
        )


def _row(entry: ModelEntry) -> tuple[str, ...]:
    shareable = {True: "yes", False: "no", None: "when loaded"}[entry.shareable]
    return (
        entry.name,
        format_bytes(entry.size_bytes),
        str(entry.quantisation) if entry.quantisation else "not quantised",
        entry.dtype or "?",
        format_count(entry.window_tokens) if entry.window_tokens else "?",
        format_count(entry.kv_bytes_per_token) if entry.kv_bytes_per_token else "?",
        f"{shareable}: {entry.reason}" if entry.reason else shareable,
    )


def import_model(
    gguf: Path,
    /,
    *,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    dtype: str = "float32",
    context: Context,
) -> None:
    """Make an MLX model folder from a GGUF file of a Llama-type model.

    Args:
        gguf: the GGUF file.
        output: the folder to make; by default one of the file's name in the data directory's models folder.
        dtype: of the weights: float32, float16 or bfloat16.
    """
    from kvnet_node.models import import_model as run_import

    if not gguf.expanduser().is_file():
        raise UsageError(f"expected a GGUF file, found none at {gguf}")
    settings = context.settings()
    folder = absolute(output) if output else settings.paths.data_dir / "models" / gguf.stem
    result = run_import(absolute(gguf), folder, dtype=dtype, on_progress=context.output.event)
    record = {"type": "model import", "name": folder.name, "path": str(result.path), "reused": result.reused}
    context.output.result(record, lambda _: str(result.path))
    context.output.message(f"use it: --model {result.path}")
