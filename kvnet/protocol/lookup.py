"""Lookup: from a prompt's prefix keys to the artifacts worth fetching, the best first.

What members have told of themselves (`kvnet.protocol.tables`) says whom to ask: as a rule one peer. Keys go out under
the lookup secret, the deepest first, to peers that have proved the namespace. What comes back are claims;
`check_manifest` says whether the signed manifest bears a claim out as far as a manifest can. The token ids, fetched
first and compared, decide in the end.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvnet.format.codecs import Codec
from kvnet.format.hashes import FingerprintHash, LookupKey, PrefixKey
from kvnet.format.prefix import BLOCK_TOKENS, checkpoints
from kvnet.protocol.ids import PeerId
from kvnet.protocol.messages.artifacts import MAX_LOOKUP_KEYS, Lookup, LookupReply, Match
from kvnet.trust.envelope import SignedManifest
from kvnet.trust.namespace import Namespace


@dataclass(frozen=True, slots=True)
class LookupQuery:
    """What one namespace is asked for.

    Attributes:
        namespace: whose secrets key it.
        n_tokens: of the prompt.
        prefix_keys: the keys asked for, the deepest first.
        keys: the same under the lookup secret.
        n_blocks: blocks up to each key.
        ends: tokens up to each key.
    """

    namespace: Namespace
    n_tokens: int
    prefix_keys: tuple[PrefixKey, ...]
    keys: tuple[LookupKey, ...]
    n_blocks: tuple[int, ...]
    ends: tuple[int, ...]

    def message(self, slot: int) -> Lookup:
        """The request for a session in which the namespace has this slot."""
        return Lookup(request_id=0, slot=slot, keys=tuple(bytes(key) for key in self.keys))

    def tokens_at(self, key_index: int) -> int:
        """Tokens of the prompt that a match of this key covers; the last block may be short."""
        return self.ends[key_index]


def build_query(
    namespace: Namespace,
    block_keys: Sequence[PrefixKey],
    n_tokens: int,
    short_keys: Sequence[tuple[int, PrefixKey]] = (),
) -> LookupQuery:
    """The query for a prompt.

    Args:
        namespace: to look in.
        block_keys: the prompt's key of each block, the first block first; the last block may be short.
        n_tokens: of the prompt.
        short_keys: ends in the first block where other prompts may part from this one, ascending, each with its key: an
            artifact that ends there has no key in common with a longer prompt otherwise.

    A message takes 4,096 keys. Of a longer prompt the deepest are asked for, and the powers of two below them.
    """
    depths = list(range(len(block_keys), 0, -1))
    if len(depths) > MAX_LOOKUP_KEYS:
        powers = [1 << bit for bit in reversed(range(len(block_keys).bit_length()))]
        deepest = depths[: MAX_LOOKUP_KEYS - len(powers)]
        depths = deepest + [power for power in powers if power < deepest[-1]]
    found = [(depth, min(depth * BLOCK_TOKENS, n_tokens), block_keys[depth - 1]) for depth in depths]
    shorter = [(1, end, key) for end, key in reversed(short_keys) if end < min(BLOCK_TOKENS, n_tokens)]
    found += shorter[: MAX_LOOKUP_KEYS - len(found)]
    return LookupQuery(
        namespace,
        n_tokens,
        prefix_keys=tuple(key for _, _, key in found),
        keys=tuple(namespace.lookup_key(key) for _, _, key in found),
        n_blocks=tuple(depth for depth, _, _ in found),
        ends=tuple(end for _, end, _ in found),
    )


@dataclass(frozen=True, slots=True)
class Candidate:
    """An artifact that peers claim continues the prompt.

    Attributes:
        artifact: its hash under the lookup secret.
        key_index: the deepest key of the query it is claimed for.
        n_blocks: blocks up to that key.
        reusable_tokens: tokens of the prompt that this would spare.
        n_tokens: of the whole artifact.
        codec: how its tiles are stored.
        size_bytes: of all its chunks.
        providers: who claims it for that key, in the order of their answers.
        holders: who else says it has the artifact.
    """

    artifact: LookupKey
    key_index: int
    n_blocks: int
    reusable_tokens: int
    n_tokens: int
    codec: Codec
    size_bytes: int
    providers: tuple[PeerId, ...]
    holders: tuple[PeerId, ...] = ()

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """Everybody it may be fetched from."""
        return (*self.providers, *self.holders)


_CODECS: Mapping[str, Codec] = {codec.value: codec for codec in Codec}


def rank(
    query: LookupQuery, replies: Iterable[tuple[PeerId, LookupReply]], *, longer_than_tokens: int = 0
) -> list[Candidate]:
    """The artifacts worth fetching, the best first.

    More tokens spared come first, then fewer bytes to fetch, then the artifact with more providers. Claims that
    contradict themselves, and codecs this build does not read, are passed over.

    Args:
        query: what was asked.
        replies: the answers, each with its sender; their shape has been checked by the session.
        longer_than_tokens: what the local store offers already; candidates with no more are left out.
    """
    found: dict[tuple[LookupKey, int, int, str, int], list[PeerId]] = {}
    holders: dict[LookupKey, dict[PeerId, None]] = {}
    for peer, reply in replies:
        for match in reply.matches:
            claim = (LookupKey(match.artifact), match.key_index, match.n_tokens, match.codec, match.size_bytes)
            providers = found.setdefault(claim, [])
            if peer not in providers:
                providers.append(peer)
            holders.setdefault(LookupKey(match.artifact), {})[peer] = None
    candidates = []
    for (artifact, key_index, n_tokens, codec, size_bytes), peers in found.items():
        n_blocks, covered = query.n_blocks[key_index], query.tokens_at(key_index)
        if codec not in _CODECS or covered <= longer_than_tokens or n_tokens < covered:
            continue
        others = tuple(peer for peer in holders[artifact] if peer not in peers)
        candidates.append(
            Candidate(
                artifact, key_index, n_blocks, covered, n_tokens, _CODECS[codec], size_bytes, tuple(peers), others
            )
        )
    return sorted(candidates, key=_rank_key)


def _rank_key(candidate: Candidate) -> tuple[int, int, int, bytes]:
    # Only the tiles of the shared blocks are fetched, so sizes are compared a token.
    bytes_to_fetch = candidate.size_bytes * candidate.reusable_tokens // candidate.n_tokens
    return (-candidate.reusable_tokens, bytes_to_fetch, -len(candidate.providers), candidate.artifact)


def check_manifest(
    query: LookupQuery, candidate: Candidate, fingerprint: FingerprintHash, signed: SignedManifest
) -> str | None:
    """Why a signed manifest does not bear out what was claimed for it; None when it does.

    Args:
        query: what was asked.
        candidate: the claim.
        fingerprint: of the model that asked.
        signed: what the provider sent as its manifest; its signature has been checked.
    """
    manifest = signed.manifest
    if query.namespace.keyed_artifact(signed.artifact_hash) != candidate.artifact:
        return "it is the manifest of another artifact"
    if manifest.namespace != query.namespace.id:
        return "it belongs to another namespace"
    if manifest.fingerprint.hash != fingerprint:
        return "it is of another model"
    if manifest.n_tokens != candidate.n_tokens or manifest.codec is not candidate.codec:
        return "its token count or codec is not the one claimed"
    n_blocks = -(-manifest.n_tokens // BLOCK_TOKENS)
    # An artifact that ends at the matched key must have that very key; a longer one shows it by its token ids.
    if n_blocks == candidate.n_blocks and manifest.n_tokens == candidate.reusable_tokens:
        expected = query.prefix_keys[candidate.key_index]
        if manifest.last_prefix_key != expected:
            return "its last prefix key is not the one claimed"
    return None


# --- whom to ask ----------------------------------------------------------------------------------------------------

MAX_ASKED = 8
"""Peers that are asked at once because their tables say so: the best, and those that could have more than it."""

MAX_DHT_QUERIES = 14
"""Keys of one prompt that are looked for in the DHT: of more checkpoints than that, the deepest."""


@dataclass(frozen=True, slots=True)
class PeerClaim:
    """What a peer's table says about a prompt.

    Attributes:
        peer: who holds it.
        signer: publisher id of who says so.
        addresses: where the peer is reached.
        least_tokens: of the prompt, that an artifact of the peer's shares at the least.
        most_tokens: that one of them may share at the most.
        matches: the artifacts that share the least, as the peer would name them in a reply.
        key: the lookup key that matched.
    """

    peer: PeerId
    signer: bytes
    addresses: tuple[str, ...]
    least_tokens: int
    most_tokens: int
    matches: tuple[Match, ...]
    key: bytes

    def as_reply(self) -> LookupReply:
        """What the peer would answer to a lookup, as far as its table says."""
        return LookupReply(request_id=0, matches=self.matches)


@dataclass(frozen=True, slots=True)
class Repute:
    """What is known of a peer when somebody is to be asked.

    Attributes:
        connected: a session with it is open.
        liar: it claimed more than it had, more than once of late.
        worth: its standing times its rate; only compared.
        rtt_s: seconds of a round trip; 0 when unknown.
    """

    connected: bool
    liar: bool
    worth: float
    rtt_s: float


def whom_to_ask(claims: Iterable[PeerClaim], repute: Callable[[PeerId], Repute]) -> list[PeerClaim]:
    """The peers to ask, the best first: as a rule one.

    Whoever lied comes last; then the deepest, connected ones, the most trusted and fastest, the nearest. Besides the
    best are asked those that could share more than it is sure to, and the best connected one when the best is not.

    Args:
        claims: of all peers.
        repute: what is known of each.
    """

    def rank(claim: PeerClaim) -> tuple[bool, int, bool, float, float, bytes]:
        known = repute(claim.peer)
        return known.liar, -claim.least_tokens, not known.connected, -known.worth, known.rtt_s, claim.peer

    ordered = sorted(claims, key=rank)
    if not ordered:
        return []
    best = ordered[0]
    asked = [claim for claim in ordered[1:] if claim.most_tokens > best.least_tokens]
    if not repute(best.peer).connected:
        # Nobody knows whether it is still there: those that are as good, and one that is sure to be, are asked too.
        asked += [claim for claim in ordered[1:] if claim not in asked and claim.least_tokens == best.least_tokens]
        connected = [claim for claim in ordered[1:] if repute(claim.peer).connected]
        asked = [*connected[:1], *(claim for claim in asked if claim not in connected[:1])]
        return [best, *asked]
    return [best, *asked][:MAX_ASKED]


def dht_depths(query: LookupQuery) -> list[tuple[int, LookupKey]]:
    """The prompt's checkpoints that are looked for in the DHT, the deepest first: blocks and key of each."""
    # The first key of a depth is that of the whole block.
    key_of = dict(zip(reversed(query.n_blocks), reversed(query.keys), strict=True))
    depths = [depth for depth in reversed(checkpoints(query.n_tokens)) if depth in key_of]
    return [(depth, key_of[depth]) for depth in depths[:MAX_DHT_QUERIES]]


@dataclass(slots=True)
class LookupMachine:
    """Collects the answers of several peers to one query, until nothing better can come or it is too late.

    Args:
        query: what is asked.
        deadline: when to stop waiting; it follows from the time local prefill would take.
    """

    query: LookupQuery
    deadline: float
    _waiting: dict[PeerId, float] = field(init=False, default_factory=dict)
    _replies: dict[PeerId, LookupReply] = field(init=False, default_factory=dict)
    _supposed: dict[PeerId, LookupReply] = field(init=False, default_factory=dict)

    def suppose(self, claim: PeerClaim) -> None:
        """What a connected peer's table says; its own answer takes the place of that."""
        self._supposed[claim.peer] = claim.as_reply()

    def expect(self, peer: PeerId, most_tokens: float = math.inf) -> None:
        """A peer is being asked, or dialled to be asked.

        Args:
            peer: who.
            most_tokens: what it may share at the most; infinite when that is not known.
        """
        self._waiting[peer] = most_tokens

    def answered(self, peer: PeerId, reply: LookupReply) -> None:
        """A peer has answered; later or repeated answers do not count."""
        if self._waiting.pop(peer, None) is not None:
            self._replies[peer] = reply

    def failed(self, peer: PeerId) -> None:
        """A peer has refused, timed out or gone; what its table says is worth nothing now."""
        self._waiting.pop(peer, None)
        self._supposed.pop(peer, None)

    def finished(self, now: float) -> bool:
        """Whether there is nothing more to wait for."""
        best_tokens = max((each.reusable_tokens for each in self._answers()), default=0)
        return now >= self.deadline or all(most <= best_tokens for most in self._waiting.values())

    def waiting(self) -> list[PeerId]:
        """Those that have not answered."""
        return list(self._waiting)

    def records(self) -> list[tuple[PeerId, bytes]]:
        """Signed provider records of others that came with the answers, each with who sent it; not checked."""
        return [(peer, record) for peer, reply in self._replies.items() for record in reply.records]

    def candidates(self, *, longer_than_tokens: int = 0) -> list[Candidate]:
        """What was found so far, the best first; see `rank`."""
        supposed = {peer: reply for peer, reply in self._supposed.items() if peer not in self._replies}
        return rank(self.query, [*self._replies.items(), *supposed.items()], longer_than_tokens=longer_than_tokens)

    def _answers(self) -> list[Candidate]:
        return rank(self.query, self._replies.items())


def covered_tokens(query: LookupQuery, reply: LookupReply) -> int:
    """Tokens of the prompt that the best match of a reply covers; 0 without one."""
    return max((query.tokens_at(match.key_index) for match in reply.matches), default=0)
