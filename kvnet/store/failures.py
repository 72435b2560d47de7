"""Errors of the operating system as errors of the store."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvnet.errors import StoreError, StoreFullError

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Translate ``OSError`` inside.

    Args:
        what: what was being done, for the message.

    Raises:
        StoreFullError: the disk, or the user's share of it, is full.
        StoreError: anything else.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            raise StoreFullError(
                f"{what} failed: {reason}", hint="Make room on the disk, or remove artifacts: `kvnet rm`."
            ) from error
        raise StoreError(f"{what} failed: {reason}", hint="Check the disk: `kvnet verify` re-hashes it.") from error
