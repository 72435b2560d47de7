"""What probably varies is found by the words around it, and what stays is left alone."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnet_node.prompts.spans import SpanKind, varied, volatile_spans

VARYING = [
    (SpanKind.DATE, "Today is Sunday, 29 November 2026.", "Sunday, 29 November 2026"),
    (SpanKind.DATE, "Today's date: 2026-11-29", "2026-11-29"),
    (SpanKind.DATE, "The current date and time is 2026-11-29T17:54:02Z", "2026-11-29T17:54:02Z"),
    (SpanKind.DATE, "Current date: November 29th, 2026", "November 29th, 2026"),
    (SpanKind.DATE, "It is 5:54 PM", "5:54 PM"),
    (SpanKind.DATE, "It's now Monday", "Monday"),
    (SpanKind.DATE, "timestamp: 1764438842", "1764438842"),
    (SpanKind.DATE, "now=1764438842.25", "1764438842.25"),
    (SpanKind.DATE, "Sun Nov 29 17:54:02 UTC 2026", "Sun Nov 29 17:54:02 UTC 2026"),
    (SpanKind.DATE, "Date: Sun, 29 Nov 2026 17:54:02 GMT", "Sun, 29 Nov 2026 17:54:02 GMT"),
    (SpanKind.NAME, "Working directory: /opt/tools/kv", "/opt/tools/kv"),
    (SpanKind.NAME, '{"cwd": "/opt/tools"}', "/opt/tools"),
    (SpanKind.NAME, "see /Users/ann/notes", "ann"),
    (SpanKind.NAME, r"see C:\Users\Ann Lee\notes", "Ann Lee"),
    (SpanKind.NAME, "hostname: bigbox", "bigbox"),
    (SpanKind.NAME, "runs on anns-mac.local", "anns-mac.local"),
    (SpanKind.NAME, "The user's email is ann@work.example", "ann@work.example"),
    (SpanKind.ID, "x 550e8400-e29b-41d4-a716-446655440000", "550e8400-e29b-41d4-a716-446655440000"),
    (SpanKind.ID, "Session id: 8f3a2b91cc", "8f3a2b91cc"),
    (SpanKind.ID, "nonce=0a1b2c3d", "0a1b2c3d"),
    (SpanKind.ID, "for req_011CSHoEeqs5", "req_011CSHoEeqs5"),
    (SpanKind.STATE, "Current branch: fix/lanes", "fix/lanes"),
    (SpanKind.STATE, "Recent commits:\n0cf6181 Say what", "0cf6181 Say what"),
    (SpanKind.STATE, "Status: M kvnet/errors.py", "M kvnet/errors.py"),
    (SpanKind.COUNTER, "Tokens left: 12,000", "12,000"),
    (SpanKind.COUNTER, "This is turn 5 of 20.", "5"),
]

STAYING = [
    "Knowledge cutoff: 2024-06",
    "API version 2023-06-01 is required",
    "Copyright 2026-01-01, all rights reserved.",
    "Use date -u to print the time in UTC.",
    "The meeting takes 10 minutes; every day is another day.",
    "Files are under /home/user/project or /Users/you.",
    "Read .claude/settings.local.json first.",
    "User: Hello\nAssistant: Hi",
    "Sign with noreply@project.example in the user field.",
    "The request id is part of the header.",
    "Commit 3d60854 broke it; see branch protection.",
    "A step of 5 tokens, or 20 turns.",
    "Set the working directory: it must exist.",
    "colour #aabbccdd, hash 9f86d081884c7d659a2feaa0c55ad015",
]


@pytest.mark.parametrize(("kind", "text", "wanted"), VARYING)
def test_what_varies_is_found(kind: SpanKind, text: str, wanted: str) -> None:
    assert [(span.kind, text[span.start : span.end]) for span in volatile_spans(text)] == [(kind, wanted)]


@pytest.mark.parametrize("text", STAYING)
def test_what_stays_is_left_alone(text: str) -> None:
    assert volatile_spans(text) == []
    assert varied(text) == text


@pytest.mark.parametrize(("kind", "text", "wanted"), VARYING)
def test_a_varied_text_differs_only_inside_the_span_and_keeps_its_form(kind: SpanKind, text: str, wanted: str) -> None:
    other = varied(text)
    start = text.index(wanted)
    rest = len(text) - start - len(wanted)
    assert other != text
    assert other[:start] == text[:start]
    assert other[len(other) - rest :] == text[len(text) - rest :]
    if "Monday" not in text:
        assert re.sub(r"\d", "0", re.sub("[a-z]", "a", re.sub("[A-Z]", "A", other))) == re.sub(
            r"\d", "0", re.sub("[a-z]", "a", re.sub("[A-Z]", "A", text))
        )


def test_of_a_date_the_year_is_kept() -> None:
    assert varied("Today is 29 November 2026") == "Today is 20 November 2026"
    assert varied("Today is Sunday") == "Today is Monday"


@pytest.mark.parametrize("piece", ["1", "a.", "x@", "2026-", "-", "8f3a2b91-", "user x ", "current ", "turn 1 "])
def test_a_long_text_takes_time_in_proportion_to_its_length(piece: str) -> None:
    # A pattern that tries again from every place would take hours.
    assert volatile_spans(piece * (300_000 // len(piece))) == []


@given(st.text(alphabet="ab 0:-./@\n\\\"'TZdate is"))
def test_spans_never_overlap_and_lie_inside_the_text(text: str) -> None:
    end = 0
    for span in volatile_spans(text):
        assert end <= span.start < span.end <= len(text)
        end = span.end
