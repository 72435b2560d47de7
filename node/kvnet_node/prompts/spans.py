"""Texts that are probably another one with the next request: dates, names of a machine, ids, counters.

Every pattern asks for words around it that say so: a date in a licence text or a version of an API stays what it is. A
group named ``it`` marks what varies, where that is less than the whole match. Repetitions have an end, so that no
text takes longer than in proportion to its length.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class SpanKind(StrEnum):
    """What varies, by the id of the killer it makes."""

    DATE = "date-at-top"
    NAME = "names-at-top"
    ID = "request-id"
    STATE = "machine-state"
    COUNTER = "running-counter"


@dataclass(frozen=True, slots=True)
class Span:
    """Characters ``start`` to ``end`` of a text that probably vary."""

    kind: SpanKind
    start: int
    end: int


def _any(*alternatives: str) -> str:
    return f"(?:{'|'.join(alternatives)})"


_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_WEEKDAY = _any(*_DAYS, *(day[:3] for day in _DAYS))
_MONTHS: tuple[str, ...] = (
    *("january", "february", "march", "april", "may", "june"),
    *("july", "august", "september", "october", "november", "december"),
)
_MONTH = _any(*_MONTHS, *(month[:3] for month in _MONTHS), "sept") + r"\.?"
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:\s?[ap]\.?m\.?)?"
_YEAR = r"(?:19|20)\d\d"
_ISO_DAY = rf"{_YEAR}-\d\d-\d\d"
_ORDINAL = r"\d\d?(?:st|nd|rd|th)?"
_DAY = _any(
    _ISO_DAY,
    rf"{_YEAR}/\d\d?/\d\d?",
    r"\d\d?[/.]\d\d?[/.](?:19|20)?\d\d",
    rf"{_ORDINAL} (?:of )?{_MONTH},? {_YEAR}",
    rf"{_MONTH} {_ORDINAL},? {_YEAR}",
)
_MOMENT = _any(rf"(?:{_WEEKDAY},? )?{_DAY}(?:,? (?:at )?{_CLOCK})?", _CLOCK, _WEEKDAY)
_NOW = _any(
    "today(?:'s)?", "current(?:ly)?", "now", "date", "time", "timestamp", "as of", r"generated(?: at| on)?", "it is"
)
_FILLER = r"(?:(?:is|date|time|and|the|day|it's|in utc)\b[^\n\w]{0,6}){0,4}"
# What stands between a name and its value, in prose, in YAML or in JSON.
_IS = r"\b[\"']?\s{0,4}(?:is\b|:|=|#)\s{0,4}[\"'`]?"
_FOLDER = _any(
    r"(?:current |primary )?working dir(?:ectory)?",
    r"workspace(?: (?:path|root|folder))?",
    r"project (?:root|path|directory)",
    r"home dir(?:ectory)?",
    "cwd",
    "pwd",
)
_OWNER = _any("host ?name", "user ?name", "user's name", "logged in as", "machine(?: name)?", "computer name")
_ACCOUNT = _any("e-?mail", "user", "account", "login", "signed in")
_PLACEHOLDER = _any("users?", "username", "you", r"your\w*", "me", "name", "shared", "runner")
_THING = _any(
    *("request", "req", "session", "conversation", "thread", "trace", "span", "run", "correlation", "message"),
    *("chat", "task", "user", "instance"),
)
_HEX = "[0-9a-f]"

_PATTERNS: tuple[tuple[SpanKind, str], ...] = (
    # ISO 8601 with a time, HTTP and ctime dates: nobody writes seconds of a moment that stays.
    (SpanKind.DATE, rf"\b{_ISO_DAY}[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z| ?[+-]\d\d:?\d\d)?"),
    (
        SpanKind.DATE,
        (
            rf"\b{_WEEKDAY},? (?:\d\d? {_MONTH}|{_MONTH} +\d\d?),?(?: {_YEAR})?,? \d\d:\d\d:\d\d"
            rf"(?: (?:[A-Z]{{2,5}}|[+-]\d{{4}}))?(?: {_YEAR})?"
        ),
    ),
    (SpanKind.DATE, rf"\b{_NOW}\b[^\n\w]{{0,12}}{_FILLER}(?P<it>{_MOMENT})\b"),
    (
        SpanKind.DATE,
        (
            r"\b(?:unix(?: ?time)?|epoch|timestamp|time|now|ts)\b\W{0,6}(?:is\W{1,3})?"
            r"(?P<it>1[5-9]\d{8}(?:\d{3})?(?:\.\d{1,9})?)\b"
        ),
    ),
    # Folders of a person, and what names a person, a machine or a place of work.
    (SpanKind.NAME, rf"(?:/Users|/home)/(?!{_PLACEHOLDER}\b)(?P<it>[\w-][\w.-]{{0,63}})"),
    (SpanKind.NAME, rf"\b[A-Z]:\\{{1,2}}Users\\{{1,2}}(?!{_PLACEHOLDER}\b)(?P<it>[\w. -]{{1,64}}?)(?=\\|$)"),
    (SpanKind.NAME, rf"\b{_FOLDER}{_IS}(?P<it>(?:[~/.]|[A-Z]:\\)[^\s\"'`]{{1,512}})"),
    (SpanKind.NAME, rf"\b{_OWNER}{_IS}(?P<it>[^\s\"'`,;.][^\s\"'`,;]{{0,127}})"),
    (SpanKind.NAME, r"\b[\w-]{1,63}\.(?:local|lan|localdomain)\b(?!\.?\w)"),
    (
        SpanKind.NAME,
        (
            rf"\b{_ACCOUNT}\b[^\n@]{{0,24}}?"
            r"(?P<it>(?<![\w.+-])(?!no-?reply)[\w.+-]{1,64}@[\w-]{1,63}\.[\w.-]{0,63}\w)"
        ),
    ),
    (SpanKind.ID, rf"\b{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}\b"),
    (
        SpanKind.ID,
        (
            rf"\b(?:{_THING}[ _-]?(?:id|identifier|uuid|key)|nonce|cache[ _-]?buster|salt){_IS}"
            r"(?P<it>(?=[\w-]{0,127}\d)[\w-]{6,128})"
        ),
    ),
    (
        SpanKind.ID,
        r"\b(?:req|sess|run|thread|trace|msg|conv|chatcmpl|resp|toolu|call)[_-](?=\w{0,127}\d)[A-Za-z0-9]{8,128}\b",
    ),
    (SpanKind.STATE, r"\bcurrent branch\b\s{0,4}(?:is|:|=)\s{0,4}(?P<it>[\w./-]{1,255})"),
    (
        SpanKind.STATE,
        (
            r"\b(?:recent commits?|git status|status|head)\s{0,4}:\s{0,4}"
            rf"(?P<it>(?:{_HEX}{{7,40}}\b|(?:\?\?|[MADRU]) \S)[^\n]{{0,255}})"
        ),
    ),
    (
        SpanKind.COUNTER,
        (
            r"\b(?:tokens?|turns?|steps?|messages?|budget|context)(?: window)? "
            r"(?:left|remaining|used|usage|number)\b\W{0,4}(?P<it>\d[\d,.]{0,15})"
        ),
    ),
    (SpanKind.COUNTER, r"\b(?:turn|step|attempt|iteration|try|message)\s{0,4}#?\s{0,4}(?P<it>\d{1,9}) ?(?:of|/) ?\d"),
    (SpanKind.COUNTER, r"(?<![\d,.])(?P<it>\d[\d,.]{0,15})\s{0,4}(?:tokens?|turns?|steps?) (?:left|remaining)\b"),
)
_COMPILED = tuple((kind, re.compile(pattern, re.IGNORECASE | re.MULTILINE)) for kind, pattern in _PATTERNS)


def volatile_spans(text: str) -> list[Span]:
    """What in a text probably varies from request to request, in order and without overlaps."""
    found = sorted(_all_spans(text), key=lambda span: (span.start, -span.end))
    kept: list[Span] = []
    for span in found:
        if not kept or span.start >= kept[-1].end:
            kept.append(span)
    return kept


def varied(text: str) -> str:
    """The text as the next request may have it: each span with another value of the same form and length.

    Of a moment only the last digits change, as from one minute or day to the next; of everything else all of it does.
    """
    parts: list[str] = []
    end = 0
    for span in volatile_spans(text):
        parts += (text[end : span.start], _other(span.kind, text[span.start : span.end]))
        end = span.end
    return "".join((*parts, text[end:]))


def _all_spans(text: str) -> Iterator[Span]:
    for kind, pattern in _COMPILED:
        for match in pattern.finditer(text):
            group = "it" if "it" in pattern.groupindex else 0
            yield Span(kind, match.start(group), match.end(group))


def _other(kind: SpanKind, text: str) -> str:
    if kind not in (SpanKind.DATE, SpanKind.COUNTER):
        return "".join(_next_character(character) for character in text)
    numbers = list(re.finditer(r"\d+", text))
    # The year of a date is the last thing of it that changes.
    changing = [number for number in numbers if not re.fullmatch(r"(?:19|20)\d\d", number[0])] or numbers
    if not changing:
        return _next_weekday(text)
    last = changing[-1].end() - 1
    return text[:last] + _next_character(text[last]) + text[last + 1 :]


def _next_weekday(text: str) -> str:
    for number, day in enumerate(_DAYS):
        if text.lower() in (day, day[:3]):
            following = _DAYS[(number + 1) % len(_DAYS)][: len(text) if len(text) == 3 else None]
            return following.capitalize() if text[:1].isupper() else following
    return text


def _next_character(character: str) -> str:
    """Another digit for a digit, another letter for a letter, so that ids, paths and JSON keep their form."""
    for alphabet in ("0123456789", "abcdef", "ghijklmnopqrstuvwxyz", "ABCDEF", "GHIJKLMNOPQRSTUVWXYZ"):
        if (place := alphabet.find(character)) >= 0:
            return alphabet[(place + 1) % len(alphabet)]
    return character
