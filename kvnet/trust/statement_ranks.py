"""Which statements that are not kept outrank which."""

from collections import OrderedDict
from typing import Final

from kvnet.format.hashes import blake3_hash
from kvnet.trust.envelope import StatementType
from kvnet.trust.statement_places import PlaceKey, Verdict
from kvnet.trust.statements import SignedStatement

MAX_RANKS: Final = 16_384
"""Places of statements that are not kept."""


class Ranks:
    """The places of statements that are not kept, as many as memory is given for; the longest unused go first.

    Args:
        limit: places that are remembered.
    """

    def __init__(self, limit: int = MAX_RANKS) -> None:
        self._limit = limit
        self._places: OrderedDict[PlaceKey, tuple[int, bytes]] = OrderedDict()
        self._hashes: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._places)

    def take(self, statement: SignedStatement) -> Verdict:
        """Whether a statement is new, known, or outranked by one that was here before."""
        key = PlaceKey.of(statement)
        digest = bytes(blake3_hash(statement.envelope))
        before = self._places.get(key)
        if before is not None:
            self._places.move_to_end(key)
            if before[1] == digest:
                return Verdict.KNOWN
            if (statement.body.sequence, before[1]) <= (before[0], digest):
                return Verdict.OUTRANKED
            self._hashes.discard(before[1])
        self._places[key] = (statement.body.sequence, digest)
        self._hashes.add(digest)
        if len(self._places) > self._limit:
            self._hashes.discard(self._places.popitem(last=False)[1][1])
        return Verdict.NEW

    def holds(self, digest: bytes) -> bool:
        """Whether a statement, named by the BLAKE3 of its envelope, has the place of its subject."""
        return digest in self._hashes

    def sequence(self, kind: StatementType, subject: bytes, signer: bytes) -> int:
        """The highest sequence seen; 0 for none."""
        return self._places.get(PlaceKey(signer, kind, subject), (0, b""))[0]
