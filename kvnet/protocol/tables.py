"""What other members say they hold: their provider records, checked by then, as tables that a prompt is looked up in.

A record is one page of a peer's table in one namespace. What is kept is bounded for each peer and for all together, and
leaves when it expires; the sequence of a page is remembered for as long as an older record of it could still be shown.

An entry names its artifact's checkpoints only. So a key that matches says that *at least* so many tokens are shared,
and fewer than up to the next checkpoint: `PeerClaim` has both ends, and the peer says exactly when it is asked.

Pure: signatures, times and membership have been checked by whoever calls `take`.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

from kvnet.format.hashes import NamespaceId
from kvnet.format.prefix import BLOCK_TOKENS, checkpoints
from kvnet.protocol.ids import PeerId
from kvnet.protocol.lookup import LookupQuery, PeerClaim
from kvnet.protocol.messages.artifacts import MAX_MATCHES, Match
from kvnet.protocol.table_index import Held, Index, Page, Table
from kvnet.trust.statement_bodies import HeldEntry, ProviderRecord

MAX_SIGNERS = 2
"""Publishers whose records about one peer are kept until the peer itself has said which is its own."""

MAX_SAMPLED = 16
"""Artifacts of one table that are looked at for one key: thousands may begin with the same system prompt."""


@dataclass(frozen=True, slots=True)
class TableLimits:
    """How much is remembered of others.

    In RAM a record takes about four times its bytes, its index included.

    Attributes:
        peer_bytes: of one peer's records in one namespace; 10,000 artifacts of 4,000 tokens have 3 to 4 MiB.
        total_bytes: of all records; when they are more, the peer with the most loses its last pages.
        peers: tables of one peer in one namespace; the one heard of longest ago goes first.
        peers_of_signer: of those, tables that one publisher signs in one namespace: it has few machines, and hides
            nobody's by making some up. Those that speak for themselves go last.
    """

    peer_bytes: int = 8 * 1024 * 1024
    total_bytes: int = 24 * 1024 * 1024
    peers: int = 512
    peers_of_signer: int = 32


class Taken(StrEnum):
    """What became of a record."""

    NEW = "new"
    KNOWN = "known"
    OUTRANKED = "outranked"
    """A later record of that page is known: a replay, or one that took the long way."""
    NOT_ITS_SIGNER = "not_its_signer"
    """The peer signs its records with another key."""
    FULL = "full"
    """No room; what the peer holds is not known in full from now on."""


@dataclass(frozen=True, slots=True)
class KnownMember:
    """A peer that somebody has told of.

    Attributes:
        peer: who.
        signer: publisher id of who signed it.
        addresses: where it is reached.
        n_artifacts: it says it holds.
    """

    peer: PeerId
    signer: bytes
    addresses: tuple[str, ...]
    n_artifacts: int


class PeerTables:
    """The tables of all peers in all namespaces of this node.

    Args:
        limits: how much is remembered.
    """

    def __init__(self, limits: TableLimits | None = None) -> None:
        self._limits = limits or TableLimits()
        self._tables: dict[tuple[bytes, PeerId], dict[bytes, Table]] = {}
        self._own_words: dict[tuple[bytes, PeerId], bytes] = {}
        self._indices: dict[bytes, Index] = {}
        self._cost_bytes = 0

    @property
    def cost_bytes(self) -> int:
        """Bytes that count against the limits."""
        return self._cost_bytes

    # --- records come and go ------------------------------------------------------------------------------------------

    def take(
        self, record: ProviderRecord, signer: bytes, envelope: bytes, now_s: float, *, own_words: bool = False
    ) -> Taken:
        """Remember a record.

        Args:
            record: of a peer that is not this node; its times, signature and signer have been checked.
            signer: publisher id of who signed it.
            envelope: the whole of it, to hand on.
            now_s: seconds since 1970.
            own_words: the peer itself has told it: what others sign about that peer counts no more.
        """
        table = self._table(record, signer, now_s, own_words=own_words)
        if table is None:
            return Taken.NOT_ITS_SIGNER
        known = table.pages.get(record.page)
        if known is not None and record.sequence <= known.sequence:
            return Taken.KNOWN if envelope == known.envelope else Taken.OUTRANKED
        remember_s = max(record.expires, known.remember_until_s if known is not None else 0.0)
        page = Page(record.sequence, remember_s, record.expires, envelope, record.entries)
        self._remove_page(table, record.page)
        if not self._make_room(table, page.cost_bytes):
            table.cut = True
            return Taken.FULL
        self._add_page(table, record.page, page)
        if record.sequence > table.newest:
            table.newest, table.addresses = record.sequence, record.addresses
        return Taken.NEW

    def expire(self, now_s: float) -> None:
        """Let go of what has expired."""
        for table in list(self._all()):
            for number, page in list(table.pages.items()):
                if page.remember_until_s <= now_s:
                    self._remove_page(table, number)
                elif page.expires_s <= now_s and page.entries:
                    ghost = Page(page.sequence, page.remember_until_s, page.expires_s, b"", ())
                    self._remove_page(table, number)
                    self._add_page(table, number, ghost)
            if not table.pages:
                self._drop(table)

    def keep_signers(self, accepted: Callable[[bytes, bytes], bool]) -> None:
        """Drop the records of whoever is not accepted any more.

        Args:
            accepted: whether a namespace, by its id, takes records that this publisher signed.
        """
        for table in [table for table in self._all() if not accepted(table.namespace, table.signer)]:
            self._drop(table)

    def _table(self, record: ProviderRecord, signer: bytes, now_s: float, *, own_words: bool) -> Table | None:
        subject = (record.namespace, PeerId(record.peer))
        if own_words:
            self._own_words[subject] = signer
            for other in [table for table in self._tables.get(subject, {}).values() if table.signer != signer]:
                self._drop(other, forget=False)
        signers = self._tables.get(subject, {})
        known = self._own_words.get(subject, signer)
        if known != signer or (signer not in signers and len(signers) >= MAX_SIGNERS):
            return None
        if signer not in signers:
            self._forget_one(record.namespace, signer)
            self._tables.setdefault(subject, {})[signer] = Table(*subject, signer)
        table = self._tables[subject][signer]
        table.heard_s = now_s
        return table

    def _forget_one(self, namespace: bytes, signer: bytes) -> None:
        """Have room for one more table of a signer in a namespace."""
        tables = list(self._all())
        theirs = [table for table in tables if (table.namespace, table.signer) == (namespace, signer)]
        if len(theirs) >= self._limits.peers_of_signer:
            self._drop(min(theirs, key=lambda table: ((namespace, table.peer) in self._own_words, table.heard_s)))
        elif len(tables) >= self._limits.peers:
            self._drop(min(tables, key=lambda table: table.heard_s))

    def _make_room(self, table: Table, more_bytes: int) -> bool:
        """Whether so many bytes more fit; the largest table gives way to a smaller one."""
        if table.cost_bytes + more_bytes > self._limits.peer_bytes:
            return False
        while self._cost_bytes + more_bytes > self._limits.total_bytes:
            largest = max(self._all(), key=lambda each: each.cost_bytes)
            if largest.cost_bytes <= table.cost_bytes + more_bytes:
                return False
            largest.cut = True
            self._remove_page(largest, max(largest.pages))
        return True

    def _add_page(self, table: Table, number: int, page: Page) -> None:
        index = self._indices.setdefault(table.namespace, Index())
        for entry in page.entries:
            index.add((table, page, entry))
        table.pages[number] = page
        table.cost_bytes += page.cost_bytes
        table.n_artifacts += len(page.entries)
        table.expires_s = max(table.expires_s, page.expires_s)
        self._cost_bytes += page.cost_bytes

    def _remove_page(self, table: Table, number: int) -> None:
        page = table.pages.pop(number, None)
        if page is None:
            return
        index = self._indices[table.namespace]
        for entry in page.entries:
            index.discard((table, page, entry))
        table.cost_bytes -= page.cost_bytes
        table.n_artifacts -= len(page.entries)
        self._cost_bytes -= page.cost_bytes

    def _drop(self, table: Table, *, forget: bool = True) -> None:
        for number in list(table.pages):
            self._remove_page(table, number)
        subject = (table.namespace, table.peer)
        del self._tables[subject][table.signer]
        if not self._tables[subject]:
            del self._tables[subject]
            if forget:
                self._own_words.pop(subject, None)

    def _all(self) -> Iterator[Table]:
        return (table for signers in self._tables.values() for table in signers.values())

    # --- what is known ------------------------------------------------------------------------------------------------

    def complete(self, namespace: NamespaceId, peer: PeerId, now_s: float) -> bool:
        """Whether a peer's table says all that the peer holds: then it need not be asked about anything else."""
        table = self._believed(namespace, peer)
        return table is not None and table.complete(now_s)

    def _believed(self, namespace: bytes, peer: PeerId) -> Table | None:
        """The table that the peer stands by; where only one publisher speaks of it, that one's."""
        signers = self._tables.get((namespace, peer), {})
        return next(iter(signers.values())) if len(signers) == 1 else None

    def members(self, namespace: NamespaceId, now_s: float) -> list[KnownMember]:
        """The peers of a namespace that somebody has told of."""
        return [
            KnownMember(table.peer, table.signer, table.addresses, table.n_artifacts)
            for table in self._all()
            if table.namespace == namespace and table.expires_s > now_s
        ]

    def held(self, namespace: NamespaceId, now_s: float) -> list[tuple[PeerId, bytes, HeldEntry]]:
        """Every artifact of a namespace that a peer says it holds: the peer, who signed that, and the entry."""
        return [
            (table.peer, table.signer, entry)
            for table in self._all()
            if table.namespace == namespace
            for page in table.pages.values()
            if page.expires_s > now_s
            for entry in page.entries
        ]

    def envelopes(self, namespace: NamespaceId, now_s: float) -> list[bytes]:
        """Every record that counts, for whoever asks; page 0 of each peer after its others."""
        return [
            table.pages[number].envelope
            for table in self._all()
            if table.namespace == namespace
            for number in sorted(table.pages, reverse=True)
            if table.pages[number].expires_s > now_s
        ]

    def claims(
        self,
        query: LookupQuery,
        now_s: float,
        *,
        longer_than_tokens: int = 0,
        but: Collection[PeerId] = (),
    ) -> list[PeerClaim]:
        """What peers hold of a prompt, each peer's deepest, the deepest first.

        Args:
            query: with the prompt's keys.
            now_s: seconds since 1970.
            longer_than_tokens: what is here already; who cannot share more is left out.
            but: peers to leave out.
        """
        index = self._indices.get(query.namespace.id)
        if index is None:
            return []
        found: dict[int, _Found] = {}
        for key_index, key in enumerate(query.keys):
            # What shares no more than half as many blocks as the deepest is sure to have shares less in any case.
            below_tokens = 2 * query.n_blocks[key_index] * BLOCK_TOKENS
            if below_tokens <= longer_than_tokens:
                break
            for group in index.groups(key):
                table = next(iter(group))[0]
                known = found.get(id(table))
                if table.peer not in but and (known is None or known.least < below_tokens):
                    _note(found, query, key_index, group, now_s)
        claims = [each.claim() for each in found.values() if each.most > longer_than_tokens]
        return sorted(claims, key=lambda claim: (-claim.least_tokens, -claim.most_tokens))

    def still_claims(self, namespace: NamespaceId, peer: PeerId, key: bytes, now_s: float) -> bool:
        """Whether the records that a peer stands by say at this moment that it holds this key."""
        table, index = self._believed(namespace, peer), self._indices.get(namespace)
        groups = index.groups(key) if index is not None else ()
        return any(
            holder is table and page.expires_s > now_s
            for group in groups
            for holder, page, _ in islice(group, MAX_SAMPLED)
        )

    def records(
        self, namespace: NamespaceId, keys: Sequence[bytes], now_s: float, *, but: PeerId, at_most: int
    ) -> tuple[bytes, ...]:
        """Records of the peers that hold the first of these keys that anybody holds.

        Args:
            namespace: whose members they are.
            keys: the deepest first; those that are no deeper than what this node has itself are left out.
            now_s: seconds since 1970.
            but: who asks; its own records are not sent to it.
            at_most: records.
        """
        index = self._indices.get(namespace)
        if index is None:
            return ()
        for key in keys:
            found = [
                page.envelope
                for group in index.groups(key)
                for table, page, _ in islice(group, 1)
                if page.expires_s > now_s and table.peer != but
            ]
            if found:
                return tuple(found[:at_most])
        return ()


@dataclass(slots=True)
class _Found:
    table: Table
    key: bytes
    key_index: int
    least: int
    most: int = 0
    matches: list[Match] = field(default_factory=list)

    def add(self, entry: HeldEntry, covered: int, most: int) -> None:
        self.most = max(self.most, most)
        if covered == self.least and len(self.matches) < MAX_MATCHES:
            self.matches.append(
                Match(
                    key_index=self.key_index,
                    artifact=entry.artifact,
                    n_tokens=entry.n_tokens,
                    codec=entry.codec,
                    size_bytes=entry.size_bytes,
                )
            )

    def claim(self) -> PeerClaim:
        table = self.table
        return PeerClaim(
            table.peer, table.signer, table.addresses, self.least, self.most, tuple(self.matches), self.key
        )


def _note(found: dict[int, _Found], query: LookupQuery, key_index: int, group: Collection[Held], now_s: float) -> None:
    """What one table's artifacts that have a key add to what was found.

    Of very many not each is looked at: then one of them may share anything below the next power of two.
    """
    key, covered = query.keys[key_index], query.tokens_at(key_index)
    beyond = min(query.n_tokens, (2 * query.n_blocks[key_index] - 1) * BLOCK_TOKENS) if len(group) > MAX_SAMPLED else 0
    for table, page, entry in islice(group, MAX_SAMPLED):
        if page.expires_s > now_s and entry.n_tokens >= covered:
            known = found.setdefault(id(table), _Found(table, key, key_index, covered))
            known.add(entry, covered, max(_most_tokens(query, entry, key, covered), beyond))


def _most_tokens(query: LookupQuery, entry: HeldEntry, key: bytes, covered: int) -> int:
    """How many tokens an artifact may share whose deepest matching key is this one."""
    counts = checkpoints(entry.n_tokens)
    place = entry.keys.index(key)
    if len(counts) != len(entry.keys) or place + 1 == len(counts):
        return covered
    most = (counts[place + 1] - 1) * BLOCK_TOKENS
    return max(covered, min(most, query.n_tokens, entry.n_tokens))
