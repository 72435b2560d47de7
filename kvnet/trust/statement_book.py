"""Which statements of this node and of others count, which outranks which, and where each may be told.

Of the statements of one signer, one type and one subject only that with the highest sequence counts; of two with the
same sequence, that whose envelope has the lower hash, so that all nodes end with the same one whatever came first.

Statements that name no namespace (revocations of keys, rotations) are kept with the namespaces they were told in, their
*scopes*, and are told on there and nowhere else.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from kvnet.format.hashes import NamespaceId, blake3_hash
from kvnet.trust.envelope import StatementType
from kvnet.trust.statement_places import NOTES, PlaceKey, Row, Verdict
from kvnet.trust.statement_shares import KnownSigner, Shares
from kvnet.trust.statements import SignedStatement
from kvnet.trust.withheld import Extent

MAX_EVIDENCE: Final = 64
"""Pairs of statements that contradict each other."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of a statement.

    Attributes:
        verdict: in a word.
        changed: the places to be written to disk, or removed there, before the statement is told on.
    """

    verdict: Verdict
    changed: tuple[PlaceKey, ...] = ()


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two statements of one signer with one sequence on one subject: a key that says two things at once.

    Attributes:
        kept: the one that counts.
        other: the one that does not.
    """

    kept: SignedStatement
    other: SignedStatement


@dataclass(slots=True)
class _Place:
    sequence: int
    hash: bytes
    statement: SignedStatement | None
    scopes: frozenset[NamespaceId]


class StatementBook:
    """The statements that one node knows."""

    def __init__(self) -> None:
        self._places: dict[PlaceKey, _Place] = {}
        self._by_hash: dict[bytes, _Place] = {}
        self._revocations: dict[bytes, dict[PlaceKey, _Place]] = {}
        self._shares = Shares()
        self.evidence: list[Conflict] = []

    def __len__(self) -> int:
        return sum(1 for place in self._places.values() if place.statement is not None)

    # --- in -----------------------------------------------------------------------------------------------------------

    def restore(self, row: Row, statement: SignedStatement | None) -> None:
        """Take a place back from disk.

        Args:
            row: as it was written.
            statement: opened from its envelope; None when there is none, or none that is still good.
        """
        key = PlaceKey(row.signer, StatementType(row.kind), row.subject)
        scopes = frozenset(NamespaceId(scope) for scope in row.scopes)
        if statement is None and row.envelope:
            # It may come again, and nothing before it.
            self._put(key, _Place(row.sequence - 1, bytes(32), None, scopes))
            return
        self._put(key, _Place(row.sequence, row.hash, statement, scopes))

    def take(self, statement: SignedStatement, scopes: Iterable[NamespaceId], known: KnownSigner) -> Taken:
        """Take a statement whose shape, signature and times have been checked.

        Args:
            statement: of any type that is kept.
            scopes: the namespaces it was told in, or is said in.
            known: who is no stranger.
        """
        key = PlaceKey.of(statement)
        digest = bytes(blake3_hash(statement.envelope))
        wanted = frozenset(scopes)
        place = self._places.get(key)
        if place is not None:
            if digest == place.hash:
                widened = self._widen(key, place, wanted, known)
                if place.statement is not None:
                    return widened
                # It was let go as expired by a clock that was ahead, and is timely now.
                place.statement = statement
                return Taken(Verdict.NEW, (key, *widened.changed))
            if not _outranks(statement.body.sequence, digest, place):
                self._note_conflict(statement, place)
                return Taken(Verdict.OUTRANKED)
        room, gone = self._make_room(key, wanted, known)
        allowed = room | (place.scopes if place is not None else frozenset())
        if not allowed:
            return Taken(Verdict.FULL)
        if place is not None:
            self._note_conflict(statement, place)
            self._remove(key)
        self._put(key, _Place(statement.body.sequence, digest, statement, allowed))
        return Taken(Verdict.NEW, (key, *gone))

    def expire(self, now_s: float) -> list[PlaceKey]:
        """Let go of statements that have expired; their places stay.

        Args:
            now_s: seconds since 1970.

        Returns:
            The places, to be written to disk.
        """
        expired = []
        for key, place in self._places.items():
            body = place.statement.body if place.statement is not None else None
            if body is not None and body.expires and body.expires <= now_s:
                place.statement = None
                expired.append(key)
        return expired

    def leave(self, namespace: NamespaceId) -> list[PlaceKey]:
        """Forget what was told in one namespace only, which this node has left.

        Returns:
            The places that are gone, or told in fewer namespaces; to be removed from disk or written there.
        """
        changed = []
        for key, place in list(self._places.items()):
            if namespace in place.scopes:
                self._remove(key)
                changed.append(key)
                place.scopes -= {namespace}
                if place.scopes:
                    self._put(key, place)
        return changed

    # --- out ----------------------------------------------------------------------------------------------------------

    def namespaces(self) -> frozenset[NamespaceId]:
        """The namespaces that anything here was told in."""
        return frozenset().union(*(place.scopes for place in self._places.values()))

    def all(self, kind: StatementType, *, namespace: NamespaceId | None = None) -> list[SignedStatement]:
        """The statements of a type that count, in order of their sequences; of one namespace, or of all."""
        found = [
            place.statement
            for key, place in self._places.items()
            if key.kind is kind and place.statement is not None and (namespace is None or namespace in place.scopes)
        ]
        return sorted(found, key=lambda statement: (statement.body.sequence, statement.signer))

    def latest(self, kind: StatementType, subject: bytes, signer: bytes) -> SignedStatement | None:
        """What counts of one signer about one subject."""
        place = self._places.get(PlaceKey(signer, kind, subject))
        return place.statement if place is not None else None

    def sequence(self, kind: StatementType, subject: bytes, signer: bytes) -> int:
        """The highest sequence seen, also of a statement that has expired; 0 for none."""
        place = self._places.get(PlaceKey(signer, kind, subject))
        return place.sequence if place is not None else 0

    def revocations(self, signer: bytes) -> int:
        """The sequence of a signer's latest revocation in any namespace; 0 for none."""
        return max((place.sequence for place in self._revocations.get(signer, {}).values()), default=0)

    def revoked_in(self, signer: bytes, namespace: NamespaceId, *, until: int = 2**63) -> Extent:
        """How far a signer's revocations go in one namespace.

        Args:
            signer: publisher id.
            namespace: its id.
            until: later sequences are left out.
        """
        places = self._revocations.get(signer, {}).values()
        found = [place.sequence for place in places if namespace in place.scopes and place.sequence <= until]
        return Extent(max(found, default=0), len(found))

    def held_in(self, namespace: NamespaceId) -> Iterator[tuple[bytes, SignedStatement]]:
        """Every statement that may be told in a namespace, with the hash of its envelope."""
        for place in self._places.values():
            if place.statement is not None and namespace in place.scopes:
                yield place.hash, place.statement

    def scopes_of(self, statement: SignedStatement) -> frozenset[NamespaceId]:
        """The namespaces in which it may be told."""
        place = self._places.get(PlaceKey.of(statement))
        return place.scopes if place is not None else frozenset()

    def row(self, key: PlaceKey) -> Row | None:
        """A place as it is to be written to disk; None when it is gone."""
        place = self._places.get(key)
        if place is None:
            return None
        return Row(
            signer=key.signer,
            kind=key.kind.value,
            subject=key.subject,
            sequence=place.sequence,
            hash=place.hash,
            scopes=tuple(sorted(place.scopes)),
            envelope=place.statement.envelope if place.statement is not None else b"",
        )

    def holds(self, digest: bytes, namespace: NamespaceId) -> bool:
        """Whether a statement, named by the BLAKE3 of its envelope, is known in a namespace and not let go."""
        place = self._by_hash.get(bytes(digest))
        return place is not None and place.statement is not None and namespace in place.scopes

    # --- inside -------------------------------------------------------------------------------------------------------

    def _put(self, key: PlaceKey, place: _Place) -> None:
        self._places[key] = place
        self._by_hash[place.hash] = place
        if key.kind is StatementType.REVOCATION:
            self._revocations.setdefault(key.signer, {})[key] = place
        self._shares.count(key, place.scopes, 1)

    def _remove(self, key: PlaceKey) -> None:
        place = self._places.pop(key)
        self._by_hash.pop(place.hash, None)
        if key.kind is StatementType.REVOCATION:
            self._revocations[key.signer].pop(key)
        self._shares.count(key, place.scopes, -1)

    def _widen(self, key: PlaceKey, place: _Place, wanted: frozenset[NamespaceId], known: KnownSigner) -> Taken:
        more = wanted - place.scopes
        if not more:
            return Taken(Verdict.KNOWN)
        room, gone = self._make_room(key, more, known)
        if not room:
            return Taken(Verdict.FULL)
        self._remove(key)
        place.scopes |= room
        self._put(key, place)
        return Taken(Verdict.WIDENED, (key, *gone))

    def _make_room(
        self, key: PlaceKey, scopes: Iterable[NamespaceId], known: KnownSigner
    ) -> tuple[frozenset[NamespaceId], tuple[PlaceKey, ...]]:
        """In which of the scopes there is room for one more, and what had to go for it."""
        place = self._places.get(key)
        held = place.scopes if place is not None else frozenset()
        room: set[NamespaceId] = set()
        gone: list[PlaceKey] = []
        for scope in sorted(scopes):
            if scope in held:
                room.add(scope)
            elif self._shares.allows(key, scope, known):
                if self._shares.is_full(scope):
                    gone += self._give_way(key, scope)
                if not self._shares.is_full(scope):
                    room.add(scope)
        return frozenset(room), tuple(gone)

    def _give_way(self, key: PlaceKey, scope: NamespaceId) -> list[PlaceKey]:
        """In a full namespace whoever has the most there loses one, a note if it has any, the oldest first."""
        loser = self._shares.gives_way(scope, key.signer)
        if loser is None:
            return []
        theirs = [
            (place_key.kind not in NOTES, place.sequence, place.hash, place_key)
            for place_key, place in self._places.items()
            if place_key.signer == loser and scope in place.scopes
        ]
        victim = min(theirs, key=lambda entry: entry[:3])[3]
        self._remove(victim)
        return [victim]

    def _note_conflict(self, statement: SignedStatement, place: _Place) -> None:
        kept, other = place.statement, statement
        if kept is None or kept.body.sequence != other.body.sequence or kept.body == other.body:
            return
        if blake3_hash(other.envelope) < place.hash:
            kept, other = other, kept
        if len(self.evidence) < MAX_EVIDENCE:
            self.evidence.append(Conflict(kept, other))


def _outranks(sequence: int, digest: bytes, place: _Place) -> bool:
    return (sequence, place.hash) > (place.sequence, digest)
