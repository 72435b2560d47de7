import errno
import os

import pytest

from kvnet.errors import (
    DataDirLockedError,
    IntegrityError,
    KvnetError,
    NotFoundError,
    PeerRefusedError,
    TrustError,
    UsageError,
)
from kvnet_node.failures import error_of, failure_of, leaf_of


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (UsageError("x"), 2),
        (IntegrityError("x"), 20),
        (TrustError("x"), 30),
        (DataDirLockedError("x"), 50),
        (NotFoundError("x"), 60),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("division by zero"), 1),
    ],
)
def test_every_failure_has_the_exit_code_of_its_kind(error: BaseException, exit_code: int) -> None:
    assert failure_of(error).exit_code == exit_code


def test_an_error_survives_the_way_through_the_control_socket() -> None:
    for error in (NotFoundError("nobody has it", hint="go on"), UsageError("bad"), KvnetError("odd")):
        again = error_of(failure_of(error))
        assert type(again) is type(error)
        assert (again.message, again.hint) == (error.message, error.hint)


def test_a_refusal_keeps_its_reason() -> None:
    again = error_of(failure_of(PeerRefusedError("no", reason="not_a_member")))
    assert isinstance(again, PeerRefusedError)
    assert again.reason == "not_a_member"


def test_a_group_is_reported_by_the_error_raised_on_purpose() -> None:
    wanted = NotFoundError("nobody has it")
    group = BaseExceptionGroup("g", [ValueError("x"), BaseExceptionGroup("h", [wanted])])
    assert leaf_of(group) is wanted


def test_an_interrupt_wins_over_what_it_broke() -> None:
    group = BaseExceptionGroup("g", [NotFoundError("x"), KeyboardInterrupt()])
    assert failure_of(group).exit_code == 130


def test_an_unexpected_error_is_one_line_with_a_hint_to_look_closer() -> None:
    failure = failure_of(ValueError("first\nsecond"))
    assert "\n" not in failure.message
    assert "--verbose" in failure.hint


@pytest.mark.parametrize(
    ("number", "path", "code", "words"),
    [
        (errno.EACCES, "/data/keys", 2, "run with sudo"),
        (errno.EISDIR, "/data/node.log", 2, "ls -ld"),
        (errno.ENOSPC, None, 50, "make room"),
        (errno.EACCES, None, 1, "--verbose"),
        (errno.EIO, "/data/keys", 1, "--verbose"),
    ],
)
def test_a_file_that_the_person_can_mend_is_named_with_what_to_do(
    number: int, path: str | None, code: int, words: str
) -> None:
    error = OSError(number, os.strerror(number), path) if path else OSError(number, os.strerror(number))
    failure = failure_of(ExceptionGroup("all", [error]))
    assert failure.exit_code == code
    assert words in failure.hint
    assert path is None or path in failure.message
