"""What clients put into ``model``: ``MODEL``, ``MODEL#NAME``, ``MODEL#NAME@3``, ``#NAME``, each with ``#private``.

A named context is a model to a client: it picks ``MODEL#NAME`` from its list and sends only the question.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvnet.engine.model_folder import ModelEntry
from kvnet.errors import UnknownModelError
from kvnet.store.names import NamedVersion
from kvnet_node.api.failures import invalid

PRIVATE = "private"
UNCHOSEN = frozenset({"", "default", "default_model"})
"""What clients send that were told no model: the node's own choice. ``default_model`` is mlx-lm's word."""


@dataclass(frozen=True, slots=True)
class ModelName:
    """``model`` of a request, taken apart.

    Attributes:
        model: name or folder; None for the node's choice, or for the model a context was computed with.
        context: ``NAME`` or ``NAME@3``; "" for none.
        private: keep, announce and tell nothing of this request.
    """

    model: str | None
    context: str = ""
    private: bool = False


def parse_model(value: object) -> ModelName:
    """Take ``model`` of a request apart.

    Raises:
        ApiError: 400: it is no text, or has more parts than that.
    """
    if value is None:
        return ModelName(None)
    if not isinstance(value, str):
        raise invalid(f"expected model to be a text, found {type(value).__name__}", param="model")
    model, *rest = value.strip().split("#")
    private = bool(rest) and rest[-1] == PRIVATE
    contexts = rest[:-1] if private else rest
    if len(contexts) > 1 or "" in contexts:
        raise invalid(f"expected MODEL, MODEL#NAME or MODEL#NAME@VERSION, found {value[:200]!r}", param="model")
    return ModelName(None if model in UNCHOSEN else model, contexts[0] if contexts else "", private=private)


def names_private(value: object) -> bool:
    """Whether ``model`` of a request asks for privacy, whatever else is wrong with it."""
    return isinstance(value, str) and PRIVATE in value.strip().split("#")[1:]


def is_of(version: NamedVersion, entry: ModelEntry) -> bool:
    """Whether a context was computed with a model of this machine."""
    return version.model in {entry.name, str(entry.path)}


def choose_version(name: str, versions: Sequence[NamedVersion], entry: ModelEntry | None) -> NamedVersion | None:
    """The version that ``NAME`` or ``NAME@3`` means beside a model: of those computed with it the newest, else of all.

    Args:
        name: as in ``ModelName.context``.
        versions: of that name, the first first.
        entry: the model asked for, or None.
    """
    _, at, number = name.partition("@")
    if at:
        return next((each for each in versions if str(each.version) == number), None)
    own = [each for each in versions if entry is not None and is_of(each, entry)]
    fitting = own or versions
    return fitting[-1] if fitting else None


def model_list(
    entries: Iterable[ModelEntry], versions: Iterable[NamedVersion], created_s: Mapping[str, int], default: str | None
) -> list[dict[str, Any]]:
    """The ``data`` of ``/v1/models``: every model here, and under it every context computed with it.

    A name with several versions is listed once by itself, meaning the newest, and once for each version.

    Args:
        entries: the models on this machine; broken ones are left out.
        versions: every version of every name.
        created_s: of each model folder, by path.
        default: name of the model that the node chooses by itself; what came from peers is listed under it.
    """
    usable = [entry for entry in entries if not entry.broken]
    found: list[dict[str, Any]] = []
    everything = list(versions)
    for entry in usable:
        found.append(_model(entry.name, created_s.get(str(entry.path), 0), entry))
        own = [
            each
            for each in everything
            if is_of(each, entry) or (entry.name == default and not any(is_of(each, other) for other in usable))
        ]
        for name in sorted({each.name for each in own}):
            of_name = [each for each in own if each.name == name]
            found.append(_model(f"{entry.name}#{name}", of_name[-1].created_s, entry))
            if len(of_name) > 1:
                found += [_model(f"{entry.name}#{each.text}", each.created_s, entry) for each in of_name]
    return found


def _model(name: str, created_s: int, entry: ModelEntry) -> dict[str, Any]:
    model: dict[str, Any] = {"id": name, "object": "model", "created": created_s, "owned_by": "kvnet"}
    if entry.window_tokens:
        # Not of OpenAI, but what several clients read to know how much they may send.
        model["max_model_len"] = model["context_window"] = entry.window_tokens
    return model


def unknown_model(text: str, known: Sequence[str]) -> UnknownModelError:
    """The error for a model that is not in the list."""
    shown = ", ".join(known[:20]) or "none: put an MLX model folder into the data directory's models folder"
    return UnknownModelError(f"expected a model of /v1/models, found {text[:200]!r}", hint=f"there are: {shown}")
