"""The models on this machine, and which of them a name means; nothing is loaded or downloaded for it.

`model_places` says where they lie, `model_folder` what the files of one say.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvnet.engine.model_folder import ModelEntry, inspect_model, read_config
from kvnet.engine.model_places import model_places
from kvnet.errors import UnknownModelError


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
    for source, name, path in model_places(extra_paths, data_dir, home, environment):
        real = _real(path)
        if real not in found and (entry := inspect_model(path, name=name, source=source)) is not None:
            found[real] = entry
    return sorted(found.values(), key=lambda entry: (entry.name.casefold(), entry.name, str(entry.path)))


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


def _real(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return path


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
