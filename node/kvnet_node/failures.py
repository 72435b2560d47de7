"""Errors as they leave the program: one exit code, one message, one hint, whatever was raised inside."""

import errno
from dataclasses import dataclass

from kvnet import errors
from kvnet.errors import ConfigError, InterruptedByUserError, KvnetError, PeerRefusedError, StoreError

_RIGHTS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR})
_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


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
    if isinstance(leaf, OSError) and (of_a_file := _failure_of_a_file(leaf)) is not None:
        return of_a_file
    text = str(leaf).strip().splitlines()
    summary = f"{type(leaf).__name__}: {text[0]}" if text else type(leaf).__name__
    return Failure(
        KvnetError.code, KvnetError.exit_code, f"unexpected {summary}", "run it again with --verbose to see where"
    )


def _failure_of_a_file(error: OSError) -> Failure | None:
    """What to say where the person can mend it, and no place in the code knows better; None for other errors."""
    if error.errno in _ROOM:
        where = f" for {error.filename}" if error.filename else ""
        message = f"expected room on the disk{where}, found: {error.strerror}"
        return Failure(StoreError.code, StoreError.exit_code, message, "make room, or lower store.quota_bytes")
    if error.errno not in _RIGHTS or not error.filename:
        return None
    return Failure(
        ConfigError.code,
        ConfigError.exit_code,
        f"expected to be let at {error.filename}, found: {error.strerror}",
        "ls -ld shows whose it is; what kvnet made when it was run with sudo is root's, until chown gives it back",
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
