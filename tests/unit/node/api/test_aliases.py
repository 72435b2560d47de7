"""Names that clients insist on stand for models of this node."""

import pytest

from kvnet_node.api.aliases import parse_alias, with_alias
from kvnet_node.api.model_names import ModelName, parse_model

ALIASES = [parse_alias(text) for text in ("gpt-4o = qwen#docs", "claude-haiku-*=small", "Claude-*=default")]


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("claude-opus-5", ModelName(None)),
        ("CLAUDE-opus-5", ModelName(None)),
        ("claude-haiku-5", ModelName("small")),
        ("claude-opus-5#notes", ModelName(None, "notes")),
        ("claude-opus-5#private", ModelName(None, private=True)),
        ("gpt-4o", ModelName("qwen", "docs")),
        ("gpt-4o#notes#private", ModelName("qwen", "notes", private=True)),
    ],
)
def test_the_first_alias_that_fits_says_what_is_meant(asked: str, meant: ModelName) -> None:
    assert with_alias(parse_model(asked), ALIASES) == meant


@pytest.mark.parametrize("asked", ["gpt-4o-mini", "claude", "qwen", "default"])
def test_other_names_stay_unknown(asked: str) -> None:
    assert with_alias(parse_model(asked), ALIASES) is None


@pytest.mark.parametrize("text", ["", "claude-*", "=default", "claude-*=", "c*-x=default", "a#b=default", "a=b#c#d"])
def test_a_malformed_alias_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="FROM=TO"):
        parse_alias(text)
