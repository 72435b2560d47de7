"""Reading an invitation that somebody pastes: programs break its one line into several."""

from collections.abc import Callable, Iterable

from kvnet.errors import UsageError
from kvnet.trust.invitation import MAX_TEXT_CHARACTERS, begins_invitation, parse_invitation_text


def read_invitation(
    lines: Iterable[str], more: Callable[[bool], None] = lambda _: None, *, at_terminal: bool = False
) -> str:
    """Lines until they are a whole invitation; what was read when none comes of them.

    What is left of a line that was broken would otherwise be taken for commands by the shell, and be in its history.

    Args:
        lines: as they come, without or with their ends.
        more: called once, when the first line is not all of it, with whether an invitation begins there. A line without
            one is no end: it may be the first of a mail, whose other lines the shell must not get either.
        at_terminal: somebody types: an empty line ends it.
    """
    text = ""
    for line in lines:
        if at_terminal and text and not line.strip():
            break
        first = not text.strip()
        text += line + "\n"
        if len(text) > MAX_TEXT_CHARACTERS or _is_whole(text):
            break
        if first and line.strip():
            more(begins_invitation(text))
    return text


def _is_whole(text: str) -> bool:
    try:
        parse_invitation_text(text)
    except UsageError:
        return False
    return True
