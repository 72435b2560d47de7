"""Which model and which context a request means by its ``model``, and the list of what it may name."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvnet.engine.model_folder import ModelEntry
from kvnet.engine.models import choose_model
from kvnet.errors import UnknownModelError
from kvnet.exchange.lane import Lane
from kvnet.store.names import NameBook, NamedVersion
from kvnet_node.api.aliases import Alias, with_alias
from kvnet_node.api.model_names import ModelName, choose_version, model_list, parse_model, unknown_model
from kvnet_node.engines import EngineShelf

MODELS_AGE_S = 5.0
"""How long the list of models may be old when a request names one; a name that is not in it is looked up anew."""


@dataclass(frozen=True, slots=True)
class Meant:
    """What a request means by its ``model``.

    Attributes:
        entry: the model that answers.
        version: of the named context; None when it names none.
        private: the name itself says that the request is.
    """

    entry: ModelEntry
    version: NamedVersion | None
    private: bool


class ModelNaming:
    """Finds the models and contexts that requests name.

    Args:
        engines: the models.
        names: the named contexts.
        lane: where blocking store work runs.
        aliases: what names mean that are no models here.
    """

    def __init__(self, engines: EngineShelf, names: NameBook, lane: Lane, aliases: Sequence[Alias]) -> None:
        self._engines = engines
        self._names = names
        self._lane = lane
        self._aliases = aliases

    async def models(self) -> list[dict[str, Any]]:
        """The ``data`` of ``/v1/models``."""
        entries = await self._engines.entries()
        versions = await self._lane.run(_all_versions, self._names)
        try:
            default = (await self._engines.choose(None, max_age_s=MODELS_AGE_S)).name
        except UnknownModelError:
            default = None
        created_s = {str(entry.path): _created_s(entry.path) for entry in entries}
        return model_list(entries, versions, created_s, default)

    async def find(self, model: Any) -> Meant:
        """What the ``model`` of a request means.

        Raises:
            ApiError: it is no text, or none that names a model.
            UnknownModelError: no such model, context or version.
        """
        name = await self._meant(parse_model(model))
        version, entry = await self._resolve(name.model, name.context, str(model or ""))
        return Meant(entry, version, name.private)

    async def _meant(self, name: ModelName) -> ModelName:
        """A name that is no model here, as its alias has it."""
        if name.model is None or (meant := with_alias(name, self._aliases)) is None:
            return name
        try:
            choose_model(name.model, None, await self._engines.entries(max_age_s=MODELS_AGE_S))
        except UnknownModelError:
            return meant
        return name

    async def _resolve(self, model: str | None, context: str, text: str) -> tuple[NamedVersion | None, ModelEntry]:
        """The context's version, and the model that answers."""
        if not context:
            return None, await self._choose(model, text)
        entry = await self._choose(model, text) if model is not None else None
        name = context.partition("@")[0]
        versions = await self._lane.run(_versions, self._names, name)
        version = choose_version(context, versions, entry)
        if version is None:
            raise unknown_model(text, [each["id"] for each in await self.models()])
        if entry is None:
            entry = await self._choose_for(version)
        return version, entry

    async def _choose(self, model: str | None, text: str) -> ModelEntry:
        try:
            return await self._engines.choose(model, max_age_s=MODELS_AGE_S)
        except UnknownModelError as error:
            if model is None:
                raise
            raise unknown_model(text, [each["id"] for each in await self.models()]) from error

    async def _choose_for(self, version: NamedVersion) -> ModelEntry:
        """The model a context was computed with, or the node's choice when it is not here."""
        try:
            return await self._engines.choose(version.model or None, max_age_s=MODELS_AGE_S)
        except UnknownModelError:
            return await self._engines.choose(None, max_age_s=MODELS_AGE_S)


def _versions(names: NameBook, name: str) -> list[NamedVersion]:
    """Versions of what may be no name at all."""
    return names.versions(name) if name in names.names() else []


def _all_versions(names: NameBook) -> list[NamedVersion]:
    found = [version for versions in names.by_artifact().values() for version in versions]
    return sorted(found, key=lambda version: (version.name, version.version))


def _created_s(path: Path) -> int:
    try:
        return int(path.stat().st_mtime)
    except OSError:
        return 0
