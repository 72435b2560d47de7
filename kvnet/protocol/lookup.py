"""Lookup: from a prompt's prefix keys to the artifacts worth fetching, the best first.

Keys go out under the lookup secret, the deepest first, to each peer that has proved the namespace. What comes back are
claims; `check_manifest` says whether the signed manifest bears a claim out as far as a manifest can. The token ids,
fetched first and compared, decide in the end.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvnet.format.codecs import Codec
from kvnet.format.hashes import FingerprintHash, LookupKey, PrefixKey
from kvnet.format.prefix import BLOCK_TOKENS
from kvnet.protocol.ids import PeerId
from kvnet.protocol.messages import MAX_LOOKUP_KEYS, Lookup, LookupReply
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
        providers: who says it has it, in the order of their answers.
    """

    artifact: LookupKey
    key_index: int
    n_blocks: int
    reusable_tokens: int
    n_tokens: int
    codec: Codec
    size_bytes: int
    providers: tuple[PeerId, ...]


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
    for peer, reply in replies:
        for match in reply.matches:
            claim = (LookupKey(match.artifact), match.key_index, match.n_tokens, match.codec, match.size_bytes)
            providers = found.setdefault(claim, [])
            if peer not in providers:
                providers.append(peer)
    candidates = []
    for (artifact, key_index, n_tokens, codec, size_bytes), peers in found.items():
        n_blocks, covered = query.n_blocks[key_index], query.tokens_at(key_index)
        if codec not in _CODECS or covered <= longer_than_tokens or n_tokens < covered:
            continue
        candidates.append(
            Candidate(artifact, key_index, n_blocks, covered, n_tokens, _CODECS[codec], size_bytes, tuple(peers))
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


@dataclass(slots=True)
class LookupMachine:
    """Collects the answers of several peers to one query, until all have answered or it is too late.

    Args:
        query: what is asked.
        slots: the peers to ask, each with the namespace's slot in its session.
        deadline: when to stop waiting; it follows from the time local prefill would take.
    """

    query: LookupQuery
    slots: Mapping[PeerId, int]
    deadline: float
    _waiting: set[PeerId] = field(init=False)
    _replies: list[tuple[PeerId, LookupReply]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._waiting = set(self.slots)

    def requests(self) -> list[tuple[PeerId, Lookup]]:
        """What to send, all at once."""
        return [(peer, self.query.message(slot)) for peer, slot in self.slots.items()]

    def answered(self, peer: PeerId, reply: LookupReply) -> None:
        """A peer has answered; later or repeated answers do not count."""
        if peer in self._waiting:
            self._waiting.discard(peer)
            self._replies.append((peer, reply))

    def failed(self, peer: PeerId) -> None:
        """A peer has refused, timed out or gone."""
        self._waiting.discard(peer)

    def finished(self, now: float) -> bool:
        """Whether there is nothing more to wait for."""
        return not self._waiting or now >= self.deadline

    def candidates(self, *, longer_than_tokens: int = 0) -> list[Candidate]:
        """What was found so far, the best first; see `rank`."""
        return rank(self.query, self._replies, longer_than_tokens=longer_than_tokens)
