"""Where two prompts part: after how many tokens, in which section, and at which place of which text."""

import os.path
from dataclasses import dataclass

from kvnet.engine.prompts import PreparedPrompt
from kvnet.format.prefix import common_prefix
from kvnet_node.prompts.outline import Outline, Part, PartKind, Piece, path_text
from kvnet_node.prompts.sections import ANSWER, Section, section_at, sections

EXCERPT_BEFORE = 24
EXCERPT_AFTER = 40
"""Characters of the text shown before and after a place."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request and what became of it.

    Attributes:
        sent: the parts of the request as it was sent, or stands in a file.
        prepared: its tokens.
        run: the parts of the body it was prepared from; the same unless that was translated to another style.
    """

    sent: Outline
    prepared: PreparedPrompt
    run: Outline | None = None

    @property
    def sections(self) -> tuple[Section, ...]:
        """Its sections, in the order of its tokens."""
        return sections(self.prepared, self.run or self.sent)


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a text of a request.

    Attributes:
        part: label of the part.
        path: the text's place in the body, such as ``messages[3].content``.
        offset: characters of the text before it.
        line, column: the same, both from 1 on.
        excerpt: a little of the text around it. For the screen only: it goes into no file and no log.
    """

    part: str
    path: str
    offset: int
    line: int
    column: int
    excerpt: str

    def words(self) -> str:
        """Where it is: ``messages[0].content, line 3, column 14``."""
        return f"{self.path}, line {self.line}, column {self.column}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far two prompts agree.

    Attributes:
        common_tokens: tokens before the first that differs.
        earlier_tokens, later_tokens: of each prompt.
        section: label of the section with the first token that differs; "" when one prompt begins with the other.
        earlier, later: where the requests' own texts first differ; ``None`` where one of them has nothing there.
        in_template: the tokens part where the requests' own texts agree: the chat template makes the difference.
    """

    common_tokens: int
    earlier_tokens: int
    later_tokens: int
    section: str
    earlier: Place | None
    later: Place | None
    in_template: bool

    @property
    def share(self) -> float:
        """How much of the earlier prompt the later one can use: 0 to 1."""
        return self.common_tokens / self.earlier_tokens if self.earlier_tokens else 1.0

    @property
    def parts(self) -> bool:
        """Whether they differ before one of them ends."""
        return bool(self.section)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first pieces of two outlines that are not the same text; ``None`` where one has no such piece."""

    earlier: tuple[Part, Piece] | None
    later: tuple[Part, Piece] | None

    @property
    def kind(self) -> PartKind:
        """Of the part it is in."""
        found = self.earlier or self.later
        assert found is not None  # noqa: S101 - one of the two is there
        return found[0].kind

    @property
    def index(self) -> int:
        """Of the message it is in."""
        return min(side[0].index for side in (self.earlier, self.later) if side is not None)


def compare(earlier: Prompt, later: Prompt) -> Comparison:
    """Compare two prompts of the same model."""
    mine, theirs = earlier.prepared.tokens, later.prepared.tokens
    common = common_prefix(mine, theirs)
    if common in (len(mine), len(theirs)):
        return Comparison(common, len(mine), len(theirs), "", None, None, in_template=False)
    section = section_at(earlier.sections, common)
    other = section_at(later.sections, common)
    run = first_difference(earlier.run or earlier.sent, later.run or later.sent, prefer=section)
    found = first_difference(earlier.sent, later.sent, prefer=section)
    told = bool(earlier.prepared.boundaries)
    in_template = run is None or found is None or (told and _lies_after(run, section, other))
    ends = _places(found) if found is not None and not in_template else (None, None)
    label = section.label if section is not None else ANSWER
    if not told and (side := ends[1] or ends[0]) is not None:
        label = side.part  # the prompt's tokens do not say which section they are of
    return Comparison(common, len(mine), len(theirs), label, *ends, in_template=in_template)


def first_difference(earlier: Outline, later: Outline, prefer: Section | None = None) -> Difference | None:
    """Where the texts of two requests first differ; ``None`` when they are the same, or one continues the other.

    Args:
        earlier: the one outline.
        later: the other.
        prefer: a section whose difference is taken even when another part differs too, because its tokens come first.
    """
    found = [
        difference
        for kind in (PartKind.TOOLS, PartKind.SYSTEM, PartKind.PROMPT, PartKind.MESSAGE)
        if (difference := _difference(earlier.of(kind), later.of(kind), open_end=kind is PartKind.MESSAGE))
    ]
    for label in prefer.label.split(" and ") if prefer is not None else ():
        for difference in found:
            if difference.kind.value == label:
                return difference
    return found[0] if found else None


def place(part: Part, piece: Piece, offset: int) -> Place:
    """The place after ``offset`` characters of a piece."""
    before = piece.text[:offset]
    start = max(0, offset - EXCERPT_BEFORE)
    return Place(
        part=part.label,
        path=path_text(piece.path),
        offset=offset,
        line=before.count("\n") + 1,
        column=offset - (before.rfind("\n") + 1) + 1,
        excerpt=piece.text[start : offset + EXCERPT_AFTER],
    )


def common_characters(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    return len(os.path.commonprefix([one, other]))  # noqa: RUF071 - characters are what is asked for


def _difference(mine: tuple[Part, ...], theirs: tuple[Part, ...], *, open_end: bool) -> Difference | None:
    left = [(part, piece) for part in mine for piece in part.pieces]
    right = [(part, piece) for part in theirs for piece in part.pieces]
    for one, other in zip(left, right, strict=False):
        if one[0].role != other[0].role or one[1].text != other[1].text:
            return Difference(one, other)
    if open_end or len(left) == len(right):
        return None
    index = min(len(left), len(right))
    return Difference(left[index] if index < len(left) else None, right[index] if index < len(right) else None)


def _lies_after(found: Difference, section: Section | None, other: Section | None) -> bool:
    """Whether the texts agree in all that the section with the first differing token is made of."""
    if found.kind is not PartKind.MESSAGE or section is None or other is None:
        return False
    return found.index >= max(section.end_message, other.end_message) and section.label != ANSWER


def _places(found: Difference) -> tuple[Place | None, Place | None]:
    if found.earlier is None or found.later is None:
        return (
            place(*found.earlier, 0) if found.earlier else None,
            place(*found.later, 0) if found.later else None,
        )
    offset = common_characters(found.earlier[1].text, found.later[1].text)
    return place(*found.earlier, offset), place(*found.later, offset)
