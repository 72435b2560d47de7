"""Errors as they leave the program: one exit code, one message, one hint, whatever was raised inside."""

from dataclasses import dataclass

from kvnet import errors
from kvnet.errors import InterruptedByUserError, KvnetError, PeerRefusedError


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure in plain values, as it is printed or sent over the control socket."""

    code: str
    exit_code: int
    message: str
    hint: str = ""
    reason: str = ""


def leaf_of(error: BaseException) -> BaseException:
    """The error that matters inside exception groups: a Ctrl-C, else one raised on purpose, else the first."""
    leaves = list(_leaves(error))
    for kind in (KeyboardInterrupt, KvnetError):
        for leaf in leaves:
            if isinstance(leaf, kind):
                return leaf
    return leaves[0]


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


def failure_of(error: BaseException) -> Failure:
    """What to say about an error, and the exit code."""
    leaf = leaf_of(error)
    if isinstance(leaf, KeyboardInterrupt):
        return Failure(InterruptedByUserError.code, InterruptedByUserError.exit_code, "interrupted")
    if isinstance(leaf, KvnetError):
        reason = leaf.reason if isinstance(leaf, PeerRefusedError) else ""
        return Failure(leaf.code, leaf.exit_code, leaf.message, leaf.hint, reason)
    text = str(leaf).strip().splitlines()
    summary = f"{type(leaf).__name__}: {text[0]}" if text else type(leaf).__name__
    return Failure(
        KvnetError.code, KvnetError.exit_code, f"unexpected {summary}", "run it again with --verbose to see where"
    )


def error_of(failure: Failure) -> KvnetError:
    """An error of the class that a failure came from, so that it ends here as it would have there."""
    kind = _class_of_code(failure.code) or KvnetError
    if issubclass(kind, PeerRefusedError):
        return kind(failure.message, reason=failure.reason, hint=failure.hint)
    return kind(failure.message, hint=failure.hint)


def _class_of_code(code: str) -> type[KvnetError] | None:
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, KvnetError) and value.code == code:
            return value
    return None
