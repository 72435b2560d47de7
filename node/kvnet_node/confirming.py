"""Ask before something that others notice, or that has no way back: at a terminal; otherwise ``--yes`` says it."""

import sys
from typing import TYPE_CHECKING

from kvnet.errors import UsageError

if TYPE_CHECKING:
    from kvnet_node.invocation import Invocation


def require_terminal(what: str, command: str) -> None:
    """Somebody must be there to be asked.

    Args:
        what: to be confirmed, as in "expected somebody at a terminal to confirm WHAT, found none".
        command: that says yes beforehand.

    Raises:
        UsageError: standard input is no terminal.
    """
    if not sys.stdin.isatty():
        raise UsageError(
            f"expected somebody at a terminal to confirm {what}, found none", hint=f"{command} says it beforehand"
        )


def confirm(context: "Invocation", question: str, unsaid: str) -> None:
    """Ask, and go on only after a whole yes.

    Args:
        context: of the command.
        question: what will happen, and the question.
        unsaid: what did not happen, as in "not removed".

    Raises:
        UsageError: the answer was another one.
    """
    context.output.question(f"{question} Type yes:")
    if sys.stdin.readline().strip() != "yes":
        raise UsageError(f"{unsaid}: the answer was not yes")
