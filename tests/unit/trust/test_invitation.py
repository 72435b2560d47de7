"""The text of an invitation."""

import base64
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnet.errors import UsageError
from kvnet.trust.invitation import (
    MAX_TEXT_CHARACTERS,
    MAX_WORDS_AFTER,
    TEXT_PREFIX,
    _checksum,
    begins_invitation,
    invitation_text,
    parse_invitation_text,
)
from kvnet.trust.statement_bodies import Invitation, Membership
from kvnet.trust.statements import sign_statement
from tests.unit.trust.members import key, lets_in
from tests.unit.trust.samples import MINE

BODY = Invitation(
    sequence=1_000,
    issued=1,
    expires=1 + 3600,
    id=b"i" * 16,
    secret=b"s" * 32,
    role="colleague",
    swarm="team",
    namespace=MINE.id,
    founder=key("a").public,
    peer=b"\x00\x24\x08\x01\x12\x20" + b"a" * 32,
    addresses=("/ip4/192.0.2.1/tcp/5864", "/ip6/2001:db8::1/tcp/5864"),
    uses=1,
)
SIGNED = sign_statement(BODY, key("b"))
TEXT = invitation_text(SIGNED)


def text_of(envelope: bytes) -> str:
    return TEXT_PREFIX + base64.b32encode(envelope + _checksum(envelope)).decode().rstrip("=").lower()


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        (TEXT, True),
        (TEXT.upper(), True),
        (f"> here it is: {TEXT[:3]}\n> {TEXT[3:40]}", True),
        ("kvinv", False),
        ("garbage", False),
        ("", False),
    ],
)
def test_the_beginning_of_an_invitation_is_told_from_other_text(text: str, *, begins: bool) -> None:
    assert begins_invitation(text) is begins


def test_text_reads_back() -> None:
    signed, body = parse_invitation_text(TEXT)
    assert signed == SIGNED
    assert body == BODY
    assert TEXT.startswith(TEXT_PREFIX)
    assert TEXT.isalnum()
    assert len(TEXT) < 1000


def in_lines(text: str) -> str:
    return "\n".join(text[start : start + 70] for start in range(0, len(text), 70))


@pytest.mark.parametrize(
    "change",
    [
        str.upper,
        lambda text: f"  {text}\n",
        in_lines,
        lambda text: f"\u201c{text}\u201d.",  # curly quotes and the end of a sentence
        lambda text: f"`{text}`,",
        lambda text: "\u200b".join(text[at : at + 40] for at in range(0, len(text), 40)),  # zero-width spaces
        lambda text: "\n".join("> " + line for line in in_lines(text).splitlines()),  # quoted in mail
        lambda text: f"Hi! On your Mac: kvnet join {text}",
        lambda text: f"{in_lines(text)}\n\nSee you on Monday\n-- \nSent from my phone",
    ],
)
def test_what_mail_and_chat_programs_do_to_it_does_not_matter(change: Callable[[str], str]) -> None:
    assert parse_invitation_text(change(TEXT))[1] == BODY


@pytest.mark.parametrize(
    "text", ["", "kvinv1", "kvpub1aaaa", TEXT[6:], "kvinv2" + TEXT[6:], "kvinv1!!!", "kvinv11", "kvinv1é"]
)
def test_what_is_no_invitation_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        parse_invitation_text(text)


def test_endless_text_is_refused_before_it_is_read() -> None:
    with pytest.raises(UsageError, match="at most"):
        parse_invitation_text("a" * (MAX_TEXT_CHARACTERS + 1))


def test_words_behind_it_are_tried_without_as_far_as_a_short_message_goes() -> None:
    assert parse_invitation_text(f"{TEXT} {'word ' * MAX_WORDS_AFTER}")[1] == BODY
    with pytest.raises(UsageError, match="cut or changed"):
        parse_invitation_text(f"{TEXT} {'word ' * (MAX_WORDS_AFTER + 1)}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "found nothing"),
        ("kvpub1aaaa", "'kvpub1aa…'"),
        ("kvinv2" + TEXT[6:], "kvinv2: another version of kvnet"),
        (TEXT[:400], "cut or changed: 400 characters"),
    ],
)
def test_what_is_wrong_with_it_is_said(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        parse_invitation_text(text)


@given(st.integers(6, len(TEXT) - 1), st.sampled_from("abcdefghijklmnopqrstuvwxyz234567"))
def test_one_wrong_character_is_noticed(place: int, character: str) -> None:
    changed = TEXT[:place] + character + TEXT[place + 1 :]
    try:
        signed, _ = parse_invitation_text(changed)
    except UsageError:
        return
    # The last character carries spare bits that mean nothing.
    assert signed == SIGNED


@given(st.integers(0, len(TEXT) - 1))
def test_text_that_was_cut_is_refused(length: int) -> None:
    with pytest.raises(UsageError):
        parse_invitation_text(TEXT[:length])


def test_another_statement_in_the_text_is_no_invitation() -> None:
    other = lets_in("a", "b", 1)
    assert isinstance(other.body, Membership)
    with pytest.raises(UsageError, match="no kvnet writes"):
        parse_invitation_text(text_of(other.envelope))


def test_invitation_with_a_broken_signature_is_refused() -> None:
    broken = SIGNED.envelope[:-1] + bytes([SIGNED.envelope[-1] ^ 1])
    with pytest.raises(UsageError, match="no kvnet writes"):
        parse_invitation_text(text_of(broken))


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    for candidate in (text, TEXT_PREFIX + text):
        with pytest.raises(UsageError):
            parse_invitation_text(candidate)
