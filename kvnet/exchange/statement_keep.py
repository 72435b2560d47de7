"""Where the statements a node knows outlive it: the interface, and the one that keeps them in RAM."""

from collections.abc import Sequence
from typing import Protocol

from kvnet.trust.statement_places import PlaceKey, Row


class StatementKeep(Protocol):
    """Where statements outlive the node. Blocking: called in a lane."""

    def rows(self) -> list[Row]:
        """Everything written and not removed."""
        ...

    def write(self, rows: Sequence[Row], gone: Sequence[PlaceKey]) -> None:
        """Write and remove, all or nothing; on disk when it returns.

        Raises:
            StoreError: it cannot be written.
        """
        ...


class RamKeep:
    """Keeps statements as long as the process runs."""

    def __init__(self) -> None:
        self._rows: dict[tuple[bytes, str, bytes], Row] = {}

    def rows(self) -> list[Row]:
        """Everything written and not removed."""
        return list(self._rows.values())

    def write(self, rows: Sequence[Row], gone: Sequence[PlaceKey]) -> None:
        """Write and remove."""
        for signer, kind, subject in gone:
            self._rows.pop((signer, kind.value, subject), None)
        for row in rows:
            self._rows[row.signer, row.kind, row.subject] = row
