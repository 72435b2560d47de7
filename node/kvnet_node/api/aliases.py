"""Model names that clients insist on, and what they mean on this node.

Agents in the style of Claude Code ask for ``claude-…`` whatever they are told, at least for side jobs such as titles.
An alias says which model answers them: ``api.model_aliases`` holds texts such as ``claude-*=default`` or
``gpt-4o=qwen#docs``. A model that is really here by that name is never replaced.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvnet_node.api.model_names import ModelName, parse_model


@dataclass(frozen=True, slots=True)
class Alias:
    """One rule.

    Attributes:
        pattern: a model's name, in lower case; a ``*`` at its end stands for anything.
        target: ``MODEL``, ``MODEL#NAME`` or ``default``.
    """

    pattern: str
    target: str

    def matches(self, model: str) -> bool:
        """Whether a client that asks for this model is meant."""
        name = model.lower()
        return name.startswith(self.pattern[:-1]) if self.pattern.endswith("*") else name == self.pattern


def parse_alias(text: str) -> Alias:
    """An alias as it is written in the settings.

    Raises:
        ValueError: it is not ``FROM=TO``, or has a ``*`` elsewhere than at the end of FROM.
    """
    pattern, equals, target = (part.strip() for part in text.partition("="))
    if not equals or not pattern or not target or "*" in pattern[:-1] or "#" in pattern or target.count("#") > 1:
        raise ValueError("expected FROM=TO each, such as claude-*=default")
    return Alias(pattern.lower(), target)


def with_alias(name: ModelName, aliases: Sequence[Alias]) -> ModelName | None:
    """What a name that is no model here means by the first alias that fits; None when none does.

    A context named by the client wins over the alias's own.
    """
    if name.model is None:
        return None
    for alias in aliases:
        if alias.matches(name.model):
            target = parse_model(alias.target)
            return replace(name, model=target.model, context=name.context or target.context)
    return None
