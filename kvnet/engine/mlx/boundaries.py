"""Where other prompts may part from a prompt, found with a fixed number of renderings however long the conversation is.

The conversation is rendered once and tokenized once, with the place of each token in the text; every boundary is a
place in that text. The ends of messages come from one more rendering in which each message carries a mark of its own,
the end of system text and tools from renderings of the head alone, the rest from one rendering each: the messages
without the answer's beginning, the next turn, and a breakpoint at a message without text.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from kvnet.engine.prompts import Boundary, BoundaryKind
from kvnet.errors import EngineError
from kvnet.format.prefix import common_prefix

Messages = list[dict[str, Any]]

_QUESTIONS = ("What does this say?", "7 lines, please.")
_NEXT_TURN: Messages = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
_OTHER_SYSTEM = "\u00a7 other"
_CONTINUATIONS = ("a", "\n", " ")
"""Beginnings of answers that different tokenizers join with what is before them."""

_TAIL_TOKENS = 32
_MARK_BEFORE_END = 24
"""Characters of a message after its mark: templates look at how messages begin and end."""

_FIRST_MARK = 0xF0000
_MAX_MARKS = 0xFFFD
_SYSTEM_ROLES = frozenset({"system", "developer"})


class Tokenized:
    """A text, its tokens, and which of them lie before a place in it.

    Args:
        tokenizer: mlx-lm's wrapper.
        text: all of it, special tokens included.
    """

    def __init__(self, tokenizer: Any, text: str) -> None:
        self.text = text
        self._tokenizer = tokenizer
        self._ends: list[int] | None = None
        inner = tokenizer._tokenizer
        if getattr(inner, "is_fast", False):
            encoded = inner(text, add_special_tokens=False, return_offsets_mapping=True)
            self.tokens = [int(token) for token in encoded["input_ids"]]
            self._ends = list(accumulate((end for _, end in encoded["offset_mapping"]), max))
        else:
            self.tokens = self._encoded(text)

    def _encoded(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]

    def before(self, place: int) -> int:
        """How many tokens lie wholly before a character."""
        if self._ends is None:
            return common_prefix(self._encoded(self.text[:place]), self.tokens)
        return bisect_right(self._ends, place)

    def unjoined(self, place: int) -> int:
        """How many tokens before a character stay the same whatever text follows there."""
        n_tokens = self.before(place)
        first = max(0, n_tokens - _TAIL_TOKENS)
        special = set(self._tokenizer.all_special_ids)
        # Special tokens never join with text; the last one of them is where a tokenization may begin anew.
        first = next((i for i in range(n_tokens - 1, first - 1, -1) if self.tokens[i] in special), first)
        tail, wanted = self._text_from(first, place), self.tokens[first:n_tokens]
        shared = [common_prefix(self._encoded(tail + following), wanted) for following in _CONTINUATIONS]
        return first + min(shared)

    def _text_from(self, token: int, place: int) -> str:
        if self._ends is not None:
            return self.text[self._ends[token - 1] if token else 0 : place]
        return str(self._tokenizer.decode(self.tokens[token : self.before(place)]))


@dataclass(frozen=True, slots=True)
class Conversation:
    """A rendered conversation.

    Attributes:
        messages: as the template gets them.
        merged: how many messages of the request are not among them, because their text went into others.
        marks: message counts of the request after which a boundary was asked for.
        has_tools: whether tools are rendered.
        whole: text and tokens, ready for the answer.
        render: renders messages like the whole; with or without the answer's beginning, with or without the tools.
    """

    messages: Messages
    merged: int
    marks: tuple[int, ...]
    has_tools: bool
    whole: Tokenized
    render: Callable[[Messages, bool, bool], str]

    def shared(self, messages: Messages, *, answer: bool = False, tools: bool = True) -> int | None:
        """How many characters another rendering begins with that the whole does; ``None`` if the template refuses."""
        try:
            return common_text(self.whole.text, self.render(messages, answer, tools))
        except EngineError:
            return None


def boundaries_of(talk: Conversation) -> tuple[tuple[Boundary, ...], int]:
    """The boundaries of a conversation in ascending order, and how many tokens its next turn begins with."""
    places: list[tuple[int, BoundaryKind, int]] = [*_head(talk)]
    ends = _message_ends(talk)
    places += [(place, BoundaryKind.MESSAGE, n + talk.merged) for n, place in ends.items()]
    for mark in talk.marks:
        n = mark - talk.merged
        if 0 < n <= len(talk.messages):
            place = ends.get(n) or talk.shared(talk.messages[:n])
            places += [(place, BoundaryKind.MARK, mark)] if place else []
    stable = _stable(talk, ends.get(len(talk.messages), 0))
    found = {Boundary(talk.whole.before(place), kind, n) for place, kind, n in places}
    found.add(Boundary(stable, BoundaryKind.STABLE, len(talk.messages) + talk.merged))
    order = list(BoundaryKind)
    kept = [boundary for boundary in found if 0 < boundary.n_tokens <= len(talk.whole.tokens)]
    return tuple(sorted(kept, key=lambda b: (b.n_tokens, b.n_messages, order.index(b.kind)))), stable


def _head(talk: Conversation) -> list[tuple[int, BoundaryKind, int]]:
    """The ends of system text and tools: where two questions, or two system texts, part."""
    n_system = next((i for i, m in enumerate(talk.messages) if m["role"] not in _SYSTEM_ROLES), len(talk.messages))
    if not n_system and not talk.has_tools:
        return []
    system = talk.messages[:n_system]
    questions = [talk.shared([*system, {"role": "user", "content": question}]) for question in _QUESTIONS]
    end = min((place for place in questions if place is not None), default=0)
    places = [(end, BoundaryKind.SYSTEM, n_system)] if n_system else []
    if talk.has_tools:
        places.append((_tools_end(talk, n_system) or end, BoundaryKind.TOOLS, 0))
    return places


def _tools_end(talk: Conversation, n_system: int) -> int:
    """Where tools end that come before the system text; 0 where they come after it, and end with it."""
    if not n_system:
        return 0
    other = [{"role": "system", "content": _OTHER_SYSTEM}, {"role": "user", "content": _QUESTIONS[0]}]
    with_tools, without = talk.shared(other), talk.shared(other, tools=False)
    return with_tools if with_tools and without is not None and with_tools > without else 0


def _message_ends(talk: Conversation) -> dict[int, int]:
    """Where messages end, by how many messages lie before: those with text, and the last."""
    texts = _text_ends(talk)
    last = len(talk.messages)
    end = talk.shared(talk.messages)
    if end is None:
        return texts
    text, ending = talk.whole.text, ""
    if last in texts and texts[last] <= end:
        ending = text[texts[last] : end]
    return {**{n: _after(text, place, ending) for n, place in texts.items()}, last: end}


def _after(text: str, place: int, ending: str) -> int:
    """The end of a message whose text ends at ``place``, white space aside."""
    behind = place
    while behind < len(text) and text[behind].isspace() and not text.startswith(ending, behind):
        behind += 1
    return behind + len(ending) if text.startswith(ending, behind) else place


def _text_ends(talk: Conversation) -> dict[int, int]:
    """Where the texts of messages end, from one rendering with a mark in each."""
    whole = talk.whole.text
    marked: Messages = []
    tails: dict[str, tuple[int, str]] = {}
    for i, message in enumerate(talk.messages[:_MAX_MARKS]):
        text = message.get("content")
        if not isinstance(text, str) or not (kept := text.rstrip()):
            marked.append(message)
            continue
        place = max(len(kept) - _MARK_BEFORE_END, len(kept) // 2)
        mark = chr(_FIRST_MARK + i)
        tails[mark] = (i + 1, kept[place:])
        marked.append({**message, "content": text[:place] + mark + text[place:]})
    try:
        rendered = talk.render([*marked, *talk.messages[_MAX_MARKS:]], True, True)
    except EngineError:
        return {}
    ends: dict[int, int] = {}
    places = [i for i, character in enumerate(rendered) if character in tails] if tails else []
    if rendered.translate(dict.fromkeys(map(ord, tails))) != whole:
        # The template did something else with the marks in place.
        return {}
    for seen, place in enumerate(places):
        n, tail = tails[rendered[place]]
        if whole.startswith(tail, place - seen):
            ends[n] = place - seen + len(tail)
    return ends


def _stable(talk: Conversation, messages_end: int) -> int:
    following = talk.shared([*talk.messages, *_NEXT_TURN], answer=True)
    return talk.whole.unjoined(messages_end if following is None else following)


def common_text(first: str, second: str) -> int:
    """How many characters two texts begin with alike."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        # Comparing slices runs in C; a loop over characters would cost more than a rendering.
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def plain_boundaries(tokens: Sequence[int], *, joins: bool) -> tuple[tuple[Boundary, ...], int]:
    """The boundaries of a prompt that is plain text; ``joins`` when its last token may join with what follows."""
    stable = max(1, len(tokens) - 1) if joins else len(tokens)
    return (Boundary(stable, BoundaryKind.STABLE, 0),), stable
