"""The order of a prompt's sections as the chat template has put them, with tokens each, from its boundaries."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvnet.engine.prompts import Boundary, BoundaryKind, PreparedPrompt
from kvnet_node.prompts.outline import Outline, PartKind

ANSWER = "answer"
"""Label of what the template adds after the last message: the beginning of the answer."""
_SECTION_ENDS = (BoundaryKind.SYSTEM, BoundaryKind.TOOLS, BoundaryKind.MESSAGE)
MAX_TOKEN_CHARACTERS = 8
"""Tokens of schemas are rarely longer; fewer tokens than the text of tools needs are no tools."""


@dataclass(frozen=True, slots=True)
class Section:
    """Some tokens of a prompt, one after the other.

    Attributes:
        label: as the parts of a request are called, several joined by "and" where the tokens do not tell them apart;
            ``answer`` for what follows the last message.
        start: tokens before it.
        n_tokens: of it.
        end_message: how many of the prompt's messages lie before its end.
    """

    label: str
    start: int
    n_tokens: int
    end_message: int = 0

    @property
    def end(self) -> int:
        """Tokens up to its end."""
        return self.start + self.n_tokens

    def stable_tokens(self, limit: int) -> int:
        """How many of its tokens lie within the prompt's first ``limit`` ones."""
        return max(0, min(self.end, limit) - self.start)


def sections(prompt: PreparedPrompt, of: Outline) -> tuple[Section, ...]:
    """A prompt's sections, in the order of its tokens; together they are all of it.

    Args:
        prompt: prepared.
        of: outline of the body it was prepared from.
    """
    ends = _ends(prompt, of)
    found: list[Section] = []
    names: list[str] = []
    start = first = 0
    for index, end in enumerate(ends):
        names += _names(end, first, of)
        last_here = index + 1 == len(ends) or ends[index + 1].n_tokens > end.n_tokens
        if last_here and end.n_tokens > start:
            label = " and ".join(dict.fromkeys(names)) or end.kind.value
            found.append(Section(label, start, end.n_tokens - start, max(first, end.n_messages)))
            start, names = end.n_tokens, []
        first = max(first, end.n_messages)
    if start < len(prompt.tokens):
        label = ANSWER if found else _whole(of)
        found.append(Section(label, start, len(prompt.tokens) - start, first))
    return tuple(found)


def section_at(found: Sequence[Section], token: int) -> Section | None:
    """The section with the prompt's token of this index; ``None`` past its end."""
    return next((section for section in found if section.start <= token < section.end), None)


def as_characters(of: Outline) -> PreparedPrompt:
    """A request as a prompt whose tokens are its characters, for where no model is at hand: no template, only parts."""
    text = ""
    boundaries = []
    n_messages = 0
    for part in of.parts:
        n_messages += part.in_messages
        text += f"{part.role}:\n{part.text}\n"
        boundaries.append(Boundary(len(text), _KINDS[part.kind], n_messages))
    tokens = tuple(map(ord, text))
    return PreparedPrompt(tokens, tuple(boundaries), stable_tokens=len(tokens), live_tokens=0)


_KINDS = {
    PartKind.TOOLS: BoundaryKind.TOOLS,
    PartKind.SYSTEM: BoundaryKind.SYSTEM,
    PartKind.MESSAGE: BoundaryKind.MESSAGE,
    PartKind.PROMPT: BoundaryKind.MESSAGE,
}


def _ends(prompt: PreparedPrompt, of: Outline) -> list[Boundary]:
    """The boundaries that end a section.

    The head of a conversation ends where the first question begins, after the words the template puts before that.
    Where the system messages have an end of their own, these few tokens are the first message's; unless what lies
    between are tools.
    """
    messages = {mark.n_messages: mark for mark in prompt.boundaries if mark.kind is BoundaryKind.MESSAGE}
    found = list(messages.values())
    head = next((mark for mark in prompt.boundaries if mark.kind is BoundaryKind.SYSTEM), None)
    before = messages.get(head.n_messages) if head is not None else None
    if head is not None and before is None:
        found.append(head)
    for mark in prompt.boundaries:
        if mark.kind is BoundaryKind.TOOLS:
            room = mark.n_tokens - (before.n_tokens if before is not None else 0)
            if room < 0 or room * MAX_TOKEN_CHARACTERS >= sum(len(part.text) for part in of.of(PartKind.TOOLS)):
                found.append(mark)
    return sorted(found, key=_by_end)


def _by_end(mark: Boundary) -> tuple[int, int]:
    return mark.n_tokens, _SECTION_ENDS.index(mark.kind)


def _names(end: Boundary, first: int, of: Outline) -> list[str]:
    if end.kind is BoundaryKind.TOOLS:
        return [PartKind.TOOLS.value]
    if end.kind is BoundaryKind.SYSTEM:
        return [PartKind.SYSTEM.value]
    inside = [part.label for part in of.parts if part.in_messages and first <= part.index < end.n_messages]
    return inside or [_whole(of)]


def _whole(of: Outline) -> str:
    return PartKind.PROMPT.value if of.of(PartKind.PROMPT) else PartKind.MESSAGE.value
