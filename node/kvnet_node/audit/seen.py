"""Which beginnings of prompts have been sent before, and how many tokens each is."""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from kvnet_node.audit.prompt import Place, Places, Step

MAX_PLACES = 500_000
"""Of each of the two chains, about 100 bytes each; of more text than that the newer part is compared with only."""


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a prompt had been sent before, in tokens.

    Attributes:
        sent: of the prompt as it was sent.
        mended: had nothing varied by itself; at least ``sent``.
    """

    sent: int
    mended: int


class SeenPlaces:
    """Places in the prompts that have been sent, by hash, with the tokens before each.

    Tokens are exact at the end of a prompt whose usage is known, and in between in proportion to the characters.
    """

    def __init__(self, max_places: int = MAX_PLACES) -> None:
        self._sent = _Chain(attrgetter("sent"), max_places)
        self._mended = _Chain(attrgetter("mended"), max_places)

    @property
    def forgotten(self) -> int:
        """Places let go of because there were too many."""
        return self._sent.forgotten

    def begin(self, step: Step, tokens: int, salt: int = 0) -> None:
        """What a log does not show of a prompt, such as an agent's system prompt, takes so many tokens."""
        self._sent.begin(step, tokens, salt)
        self._mended.begin(step, tokens, salt)

    def knows(self, step: Step, salt: int = 0) -> bool:
        """Whether a prompt began like this before."""
        return self._sent.knows(step, salt)

    def match(self, tip: Step, tokens: int, salt: int = 0) -> Match:
        """How much of a prompt of ``tokens`` tokens was sent before; then it counts as sent.

        Args:
            tip: the prompt.
            tokens: how many it has.
            salt: what was sent with another one was sent to another model.
        """
        sent = self._sent.match(tip, tokens, salt)
        return Match(sent, max(sent, self._mended.match(tip, tokens, salt)))


class _Chain:
    """One of the two chains of hashes."""

    def __init__(self, places_of: Callable[[Step], Places], max_places: int) -> None:
        self._places_of = places_of
        self._max_places = max_places
        self._tokens: dict[int, float] = {}
        self.forgotten = 0

    def begin(self, step: Step, tokens: int, salt: int) -> None:
        self._tokens[self._places_of(step)[-1].hash ^ salt] = float(tokens)

    def knows(self, step: Step, salt: int) -> bool:
        return self._places_of(step)[-1].hash ^ salt in self._tokens

    def match(self, tip: Step, tokens: int, salt: int) -> int:
        fresh: list[Place] = []
        at = self._last_known(tip, salt, fresh)
        matched = min(self._tokens[at.hash ^ salt], float(tokens)) if at else 0.0
        characters = at.characters if at else 0
        rest = max(1, self._places_of(tip)[-1].characters - characters)
        for place in reversed(fresh):
            self._tokens[place.hash ^ salt] = matched + (tokens - matched) * (place.characters - characters) / rest
        if len(self._tokens) > self._max_places:
            self._forget()
        return round(matched)

    def _last_known(self, tip: Step, salt: int, fresh: list[Place]) -> Place | None:
        """The last place that is known; those after it are appended to ``fresh``, the last one first."""
        for step in tip.upwards():
            for place in reversed(self._places_of(step)):
                if place.hash ^ salt in self._tokens:
                    return place
                fresh.append(place)
        return None

    def _forget(self) -> None:
        # Dictionaries keep the order in which their keys came: the older half goes.
        for key in list(self._tokens)[: len(self._tokens) // 2]:
            del self._tokens[key]
            self.forgotten += 1
