"""What ``kvnet fetch`` is told to fetch."""

from kvnet.errors import UsageError
from kvnet.format.ticket import Ticket, parse_ticket


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
            hint="fetch takes a whole artifact hash or a ticket: kvnet show NAME prints both on a machine that has it; "
            "names and short forms are for what is held here",
        ) from error
