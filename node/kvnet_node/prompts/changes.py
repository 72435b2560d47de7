"""What became of one request in the next: which kind of change made their texts differ, for each kind one function.

Each function takes the outlines of two requests, the earlier first, and gives the place in the later one where this
kind of change shows, with a few words; or ``None``. Of a conversation only what the two have in common is looked at:
that the later one goes on is no change.
"""

import json
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvnet_node.prompts.compare import Difference, Place, common_characters, first_difference, place
from kvnet_node.prompts.normalise import BILLING_NAME
from kvnet_node.prompts.outline import Outline, Part, PartKind, Piece
from kvnet_node.prompts.spans import SpanKind, volatile_spans

MIN_PARAGRAPHS = 3
"""Fewer paragraphs in another order say nothing about how a prompt is put together."""
EXPLICIT_CHARACTERS = 20
"""A single message of more characters than this is not the same in two places by chance."""
BILLING_CHARACTERS = 200
"""The line stands at the very beginning of a text, and is shorter."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one kind: where it shows in the later request, and what it is in words."""

    place: Place
    words: str


def tools_reordered(earlier: Outline, later: Outline) -> Change | None:
    """The same tools in another order."""
    mine, theirs = _tools(earlier), _tools(later)
    if [_sorted(piece) for _, piece in mine] == [_sorted(piece) for _, piece in theirs]:
        return None
    if Counter(_sorted(piece) for _, piece in mine) != Counter(_sorted(piece) for _, piece in theirs):
        return None
    index = next(i for i, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0][1].text != pair[1][1].text)
    return Change(place(*theirs[index], 0), f"the same {len(mine)} tools, in another order from tool {index + 1} on")


def tools_changed(earlier: Outline, later: Outline) -> Change | None:
    """Tools that came or went."""
    mine, theirs = _tools(earlier), _tools(later)
    came = Counter(_name(piece) for _, piece in theirs) - Counter(_name(piece) for _, piece in mine)
    went = Counter(_name(piece) for _, piece in mine) - Counter(_name(piece) for _, piece in theirs)
    if not came and not went:
        return None
    shown = next(((part, piece) for part, piece in theirs if _name(piece) in came), None) or (theirs or mine)[-1]
    return Change(place(*shown, 0), f"{came.total()} more, {went.total()} fewer than in the request before")


def keys_reordered(earlier: Outline, later: Outline) -> Change | None:
    """JSON that says the same with its keys in another order, in tools, schemas, calls or their arguments."""
    for one, other in _pairs(earlier, later):
        if one[1].text != other[1].text and (meaning := _meaning(one[1])) and meaning == _meaning(other[1]):
            return Change(_where(one, other), "the same JSON with its keys in another order, or spaced otherwise")
    return None


def history_rewritten(earlier: Outline, later: Outline) -> Change | None:
    """An earlier message that says something else now."""
    if history_truncated(earlier, later) is not None:
        return None
    found = first_difference(Outline(earlier.messages), Outline(later.messages))
    if found is None or found.earlier is None or found.later is None:
        return None
    part = found.earlier[0]
    if part.index == earlier.messages[-1].index and found.later[0].index == later.messages[-1].index:
        return None  # another question at the end: nothing was rewritten
    if part.index == earlier.messages[0].index and _foreign(found, earlier, later):
        return None  # another conversation
    return Change(_where(found.earlier, found.later), f"{part.label} says something else than in the request before")


def history_truncated(earlier: Outline, later: Outline) -> Change | None:
    """The oldest messages are gone, and what follows them has moved up."""
    mine = [(part.role, part.text) for part in earlier.messages]
    theirs = [(part.role, part.text) for part in later.messages]
    start = next((i for i, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), None)
    if start is None:
        return None
    for dropped in range(1, len(mine) - start):
        # One message that is the same by chance ("continue") is no history that moved up, unless it is all there is.
        kept = mine[start + dropped :]
        moved = theirs[start : start + len(kept)]
        if moved == kept and (len(kept) > 1 or len(kept[0][1]) > EXPLICIT_CHARACTERS):
            shown = next(((part, piece) for part in later.messages[start:] for piece in part.pieces), None)
            return shown and Change(place(*shown, 0), f"{dropped} of {len(mine)} messages are gone")
    return None


def whitespace_changed(earlier: Outline, later: Outline) -> Change | None:
    """Text that differs in white space, line ends or the Unicode form of its letters alone."""
    for one, other in _pairs(earlier, later):
        if one[1].text != other[1].text:
            same = _folded(one[1].text) == _folded(other[1].text)
            return Change(_where(one, other), "the same words, spaced or encoded otherwise") if same else None
    return None


def paragraphs_reordered(earlier: Outline, later: Outline) -> Change | None:
    """The same paragraphs or documents in another order."""
    for one, other in _pairs(earlier, later):
        mine, theirs = _paragraphs(one[1].text), _paragraphs(other[1].text)
        if one[1].text == other[1].text or len(mine) < MIN_PARAGRAPHS:
            continue
        common = Counter(mine) & Counter(theirs)
        kept = [text for text in mine if text in common], [text for text in theirs if text in common]
        if kept[0] != kept[1] and common.total() * 2 > max(len(mine), len(theirs)):
            return Change(
                _where(one, other), f"{common.total()} of {len(mine)} paragraphs are the same, in another order"
            )
    return None


def paragraphs_sampled(earlier: Outline, later: Outline) -> Change | None:
    """A system prompt of which some paragraphs are others, in the same order."""
    for one, other in _pairs(Outline(earlier.head), Outline(later.head)):
        mine, theirs = _paragraphs(one[1].text), _paragraphs(other[1].text)
        if one[1].is_json or one[1].text == other[1].text or len(mine) < MIN_PARAGRAPHS:
            continue
        common = Counter(mine) & Counter(theirs)
        kept = [text for text in mine if text in common], [text for text in theirs if text in common]
        if common.total() * 2 > max(len(mine), len(theirs)) and kept[0] == kept[1]:
            changed = max(len(mine), len(theirs)) - common.total()
            return Change(_where(one, other), f"{changed} of {len(mine)} paragraphs are others")
    return None


def span_changed(kind: SpanKind, earlier: Outline, later: Outline) -> Change | None:
    """The first difference lies in a date, a name, an id or a counter."""
    found = first_difference(earlier, later)
    if found is None or found.earlier is None or found.later is None:
        return None
    offset = common_characters(found.earlier[1].text, found.later[1].text)
    for _, piece in (found.earlier, found.later):
        for span in volatile_spans(piece.text):
            if span.kind is kind and span.start <= offset <= span.end:
                return Change(place(*found.later, offset), "another one than in the request before")
    return None


def billing_changed(earlier: Outline, later: Outline) -> Change | None:
    """The line for accounting is another one."""
    for one, other in _pairs(Outline(earlier.head), Outline(later.head)):
        if one[1].text != other[1].text:
            where = _where(one, other)
            both = all(BILLING_NAME in piece.text[:BILLING_CHARACTERS].lower() for _, piece in (one, other))
            return (
                Change(where, "another one with every request") if both and where.offset < BILLING_CHARACTERS else None
            )
    return None


Located = tuple[Part, Piece]


def _tools(of: Outline) -> list[Located]:
    return [(part, piece) for part in of.of(PartKind.TOOLS) for piece in part.pieces]


def _pairs(earlier: Outline, later: Outline) -> list[tuple[Located, Located]]:
    """Pieces at the same place of both requests."""
    theirs = {(part.kind, part.index): part for part in later.parts}
    return [
        ((part, piece), (other, other_piece))
        for part in earlier.parts
        if (other := theirs.get((part.kind, part.index))) is not None
        for piece, other_piece in zip(part.pieces, other.pieces, strict=False)
    ]


def _where(one: Located, other: Located) -> Place:
    return place(*other, common_characters(one[1].text, other[1].text))


def _foreign(found: Difference, earlier: Outline, later: Outline) -> bool:
    """Whether the first messages have hardly anything in common, and none of the others is the same."""
    if {part.text for part in earlier.messages[1:]} & {part.text for part in later.messages[1:]}:
        return False
    assert found.earlier is not None  # noqa: S101 - the caller has looked
    assert found.later is not None  # noqa: S101
    mine, theirs = found.earlier[1].text, found.later[1].text
    return common_characters(mine, theirs) * 2 < min(len(mine), len(theirs))


def _sorted(piece: Piece) -> str:
    return _meaning(piece) or piece.text


def _meaning(piece: Piece) -> str:
    """JSON with its keys sorted, also that inside texts such as a call's arguments; "" for what is no JSON."""
    try:
        value = json.loads(piece.text)
    except ValueError:
        return ""
    return json.dumps(_opened(value), sort_keys=True) if isinstance(value, dict | list) else ""


def _opened(value: object) -> object:
    if isinstance(value, dict):
        return {key: _opened(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_opened(inner) for inner in value]
    if isinstance(value, str) and value[:1] in "{[" and value:
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _name(piece: Piece) -> str:
    """The name of a tool, OpenAI or Anthropic style; its whole text when it has none."""
    try:
        tool = json.loads(piece.text)
    except ValueError:
        return piece.text
    inner = tool.get("function", tool) if isinstance(tool, dict) else None
    return str(inner.get("name", piece.text)) if isinstance(inner, dict) else piece.text


def _folded(text: str) -> Sequence[str]:
    return unicodedata.normalize("NFC", text).split()


def _paragraphs(text: str) -> list[str]:
    """Paragraphs, or single lines where there are none; retrieved documents are such paragraphs."""
    found = [part.strip() for part in text.replace("\r\n", "\n").split("\n\n") if part.strip()]
    return found if len(found) >= MIN_PARAGRAPHS else [line.strip() for line in text.splitlines() if line.strip()]
