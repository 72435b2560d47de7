"""Which model answers over a context: the one it was computed with, under whatever name that is here."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import trio

from kvnet.engine.model_folder import ModelEntry
from kvnet.engine.models import choose_model
from kvnet.errors import UnknownModelError
from kvnet.format.hashes import ArtifactHash, FingerprintHash
from kvnet.store.names import NamedVersion
from kvnet_node.events import Event, Note
from kvnet_node.operations import generation
from kvnet_node.operations.context import OperationContext
from kvnet_node.services import Services

Chosen = Callable[..., tuple[str | None, list[str]]]

FINGERPRINT = FingerprintHash(bytes([7]) * 32)


class Models:
    """Models of a machine, chosen among as its engines do."""

    def __init__(self, names: tuple[str, ...], default: str | None) -> None:
        self._entries = [ModelEntry(name, Path("/models") / name, "configured", 1, shareable=True) for name in names]
        self._default = default

    async def choose(self, model: str | None) -> ModelEntry:
        return choose_model(model, self._default, self._entries)


class Lane:
    async def run(self, work: Callable[..., object], *arguments: object) -> object:
        return work(*arguments)


@pytest.fixture
def chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chosen:
    """The model of a context and the warnings, given what is here and what is known of its fingerprint."""

    def choose(
        *here: str, made_with: str = "", known_here: str = "", told: str = "", default: str | None = None
    ) -> tuple[str | None, list[str]]:
        known: Mapping[bytes, str] = {FINGERPRINT: known_here} if known_here else {}
        monkeypatch.setattr(generation, "model_names", lambda _: known)
        services = SimpleNamespace(
            engines=Models(here, default),
            lane=Lane(),
            paths=SimpleNamespace(samples_dir=tmp_path),
            matching=SimpleNamespace(exchange=SimpleNamespace(told_names=lambda: {FINGERPRINT: told} if told else {})),
        )
        events: list[Event] = []
        ctx = OperationContext(cast("Services", services), events.append)
        version = NamedVersion("n", 1, ArtifactHash(bytes(32)), made_with, FINGERPRINT, b"", (), 0)
        model = trio.run(generation._model_of, ctx, version)
        return model, [event.text for event in events if isinstance(event, Note)]

    return choose


def test_a_context_from_a_peer_is_asked_of_the_model_that_has_its_fingerprint(chosen: Chosen) -> None:
    assert chosen("a", "b", known_here="b", told="a", default="a") == ("b", [])


def test_what_a_peer_calls_a_model_chooses_none_here(chosen: Chosen) -> None:
    assert chosen("a", "b", told="b", default="a") == (None, [])


def test_a_model_that_is_gone_is_replaced_by_the_default_one_and_said_so(chosen: Chosen) -> None:
    model, warnings = chosen("a", made_with="gone")
    assert model is None
    assert "gone of this context is not on this machine" in warnings[0]


def test_where_no_model_is_here_the_missing_one_is_named(chosen: Chosen) -> None:
    with pytest.raises(UnknownModelError, match="expected the model Big-8B, with which"):
        chosen(told="Big-8B")
    with pytest.raises(UnknownModelError, match="expected --model"):
        chosen()
