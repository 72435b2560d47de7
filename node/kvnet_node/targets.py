"""What ``kvnet fetch`` is told to fetch."""

import re
from typing import Final

from kvnet.errors import UsageError, elsewhere
from kvnet.format.hashes import ARTIFACT_PREFIX
from kvnet.format.ticket import Ticket, parse_ticket

HASH_CHARACTERS: Final = 52
"""Of a hash without its prefix; nothing so long is taken for a name."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}(?:@[1-9][0-9]{0,8})?")


def is_name(text: str) -> bool:
    """Whether a text is a name, or a version of one, as members tell each other; what begins as a hash does is none."""
    return bool(_NAME.fullmatch(text)) and not text.startswith(ARTIFACT_PREFIX[:-1]) and len(text) < HASH_CHARACTERS


def parse_target(text: str) -> Ticket:
    """A whole artifact hash, or a ticket.

    Raises:
        UsageError: it is neither.
    """
    try:
        return parse_ticket(text)
    except UsageError as error:
        raise UsageError(
            str(error),
            hint="fetch takes a name that a member shares (kvnet list --peers), a whole artifact hash or a ticket: "
            f"{elsewhere('kvnet show NAME')} prints both on a machine that has it; short forms are for what is held "
            "here",
        ) from error
