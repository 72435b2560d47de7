"""What clients put into ``model``, and what they are offered."""

from pathlib import Path

import pytest

from kvnet.engine.model_folder import ModelEntry
from kvnet.format.hashes import ArtifactHash, FingerprintHash
from kvnet.store.names import NamedVersion
from kvnet_node.api.failures import ApiError
from kvnet_node.api.model_names import ModelName, choose_version, model_list, parse_model


def entry(name: str, *, broken: bool = False) -> ModelEntry:
    return ModelEntry(name, Path("/models", name), "data", 1, window_tokens=4096, broken=broken)


def version(name: str, number: int, model: str) -> NamedVersion:
    return NamedVersion(
        name, number, ArtifactHash(bytes(32)), model, FingerprintHash(bytes(32)), b"", (), 1000 + number
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, ModelName(None)),
        ("", ModelName(None)),
        ("default", ModelName(None)),
        ("org/model", ModelName("org/model")),
        ("model#docs", ModelName("model", "docs")),
        ("model#docs@3", ModelName("model", "docs@3")),
        ("#docs", ModelName(None, "docs")),
        ("model#private", ModelName("model", private=True)),
        ("model#docs#private", ModelName("model", "docs", private=True)),
        ("#private", ModelName(None, private=True)),
    ],
)
def test_a_model_is_taken_apart(text: str | None, expected: ModelName) -> None:
    assert parse_model(text) == expected


@pytest.mark.parametrize("value", [3, ["model"], "model#", "a#b#c", "a##private", "a#private#b"])
def test_what_is_no_model_is_a_400(value: object) -> None:
    with pytest.raises(ApiError) as raised:
        parse_model(value)
    assert (raised.value.failure.status, raised.value.failure.param) == (400, "model")


def test_a_name_means_the_newest_version_of_the_model_asked_for() -> None:
    versions = [version("docs", 1, "a"), version("docs", 2, "/models/b"), version("docs", 3, "a")]
    assert choose_version("docs", versions, None) == versions[2]
    assert choose_version("docs", versions, entry("b")) == versions[1]
    assert choose_version("docs", versions, entry("c")) == versions[2]
    assert choose_version("docs@1", versions, entry("b")) == versions[0]
    assert choose_version("docs@4", versions, None) is None
    assert choose_version("docs", [], None) is None


def test_every_context_is_offered_under_its_model_and_each_of_several_versions_besides() -> None:
    versions = [
        version("docs", 1, "a"),
        version("docs", 2, "a"),
        version("one", 1, "/models/b"),
        version("peer", 1, ""),
    ]
    found = model_list([entry("a"), entry("b"), entry("x", broken=True)], versions, {"/models/a": 7}, "b")
    assert [each["id"] for each in found] == ["a", "a#docs", "a#docs@1", "a#docs@2", "b", "b#one", "b#peer"]
    assert [each["created"] for each in found[:3]] == [7, 1002, 1001]
    assert {each["context_window"] for each in found} == {4096}
