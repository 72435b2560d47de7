"""Where models lie: configured folders, ``<data dir>/models``, the Hugging Face cache and LM Studio's folder."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


def model_places(
    extra_paths: Sequence[Path], data_dir: Path | None, home: Path, environment: Mapping[str, str]
) -> Iterator[tuple[str, str | None, Path]]:
    """Source, name (None: the folder's) and folder of everything that may be a model, in the order of the module."""
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
