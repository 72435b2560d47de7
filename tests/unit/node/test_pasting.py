"""An invitation is read from as many lines as a program made of its one."""

from collections.abc import Iterator

from kvnet.trust.invitation import MAX_TEXT_CHARACTERS
from kvnet_node.pasting import read_invitation
from tests.unit.trust.test_invitation import TEXT

WRAPPED = [TEXT[at : at + 76] for at in range(0, len(TEXT), 76)]


class Typing:
    """Lines, and how many of them were taken."""

    def __init__(self, *lines: str) -> None:
        self._lines = iter(lines)
        self.left = len(lines)
        self.asked: list[bool] = []

    def __iter__(self) -> Iterator[str]:
        for line in self._lines:
            self.left -= 1
            yield line

    def more(self, begun: bool) -> None:
        self.asked.append(begun)


def test_one_whole_line_is_enough() -> None:
    typing = Typing("", TEXT, "what comes next")
    assert read_invitation(typing, typing.more).strip() == TEXT
    assert (typing.left, typing.asked) == (1, [])


def test_a_line_that_was_broken_is_read_to_its_end_and_more_is_asked_for_once() -> None:
    typing = Typing(*WRAPPED, "yes")
    assert "".join(read_invitation(typing, typing.more, at_terminal=True).split()) == TEXT
    assert (typing.left, typing.asked) == (1, [True])


def test_a_line_without_a_beginning_is_said_to_be_none_and_what_follows_it_is_still_read() -> None:
    typing = Typing("Hi, on your Mac:", f"  kvnet join {TEXT}", "yes")
    assert TEXT in read_invitation(typing, typing.more, at_terminal=True)
    assert (typing.left, typing.asked) == (1, [False])
    for quoted in ("> KV-INV1" + TEXT[6:40], f"“{TEXT[:60]}"):
        cut = Typing(quoted, "")
        read_invitation(cut, cut.more, at_terminal=True)
        assert cut.asked == [True]


def test_at_a_terminal_an_empty_line_gives_up_and_in_a_file_it_does_not() -> None:
    typing = Typing(*WRAPPED[:3], "", *WRAPPED[3:])
    assert "".join(read_invitation(typing, at_terminal=True).split()) == "".join(WRAPPED[:3])
    assert "".join(read_invitation(Typing(*WRAPPED[:3], "\n", *WRAPPED[3:])).split()) == TEXT


def test_nothing_and_endless_text_end() -> None:
    assert read_invitation(Typing()) == ""
    endless = Typing(*["x" * 1000] * 100)
    assert MAX_TEXT_CHARACTERS < len(read_invitation(endless)) < MAX_TEXT_CHARACTERS + 1100
