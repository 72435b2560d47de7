"""The statements of a book are brought to disk, and read from there."""

import logging
from collections import Counter
from collections.abc import Iterable

import trio

from kvnet.errors import KvnetError
from kvnet.exchange.lane import Lane
from kvnet.exchange.statement_keep import StatementKeep
from kvnet.trust.statement_book import StatementBook
from kvnet.trust.statement_places import PlaceKey, Row
from kvnet.trust.statements import SignedStatement, open_statement

_log = logging.getLogger(__name__)


class StatementWriter:
    """Writes what has changed, one write at a time.

    Args:
        book: whose places are written.
        keep: where they outlive the node.
        lane: where that blocks.
        counters: counts places that could not be written.
    """

    def __init__(self, book: StatementBook, keep: StatementKeep, lane: Lane, counters: Counter[str]) -> None:
        self._book = book
        self._keep = keep
        self._lane = lane
        self._counters = counters
        self._unwritten: set[PlaceKey] = set()
        self._writing = trio.Lock()

    def changed(self, places: Iterable[PlaceKey]) -> None:
        """These are written, or removed, at the next `write`."""
        self._unwritten.update(places)

    async def write(self) -> None:
        """Have what has changed on disk. What cannot be written counts all the same, and is tried again later."""
        async with self._writing:
            changed = list(self._unwritten)
            if not changed:
                return
            rows = [row for key in changed if (row := self._book.row(key)) is not None]
            gone = [key for key in changed if self._book.row(key) is None]
            try:
                await self._lane.run(self._keep.write, rows, gone)
            except KvnetError as error:
                self._counters["statements_not_written"] += len(changed)
                _log.warning("statements not written: %s", error)
            else:
                self._unwritten.difference_update(changed)

    async def rows(self) -> list[Row]:
        """What is on disk."""
        return await self._lane.run(self._keep.rows)


def reopened(row: Row) -> SignedStatement | None:
    """The statement of a row; a damaged one, or one of another place, is asked for again."""
    if not row.envelope:
        return None
    try:
        statement = open_statement(row.envelope)
    except KvnetError:
        return None
    says = (statement.signer, statement.kind.value, statement.body.subject, statement.body.sequence)
    return statement if says == (row.signer, row.kind, row.subject, row.sequence) else None
