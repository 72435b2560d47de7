"""Find the longest stored prefix of a prompt, and say how to restore it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvnet.engine.interface import ModelInfo
from kvnet.engine.kv_state import ChunkRef, RestorePlan
from kvnet.errors import IntegrityError, NotInStoreError
from kvnet.exchange.identity import Identity
from kvnet.format.chunks import ChunkKind
from kvnet.format.fingerprint import Comparison, Fingerprint, Verdict, compare
from kvnet.format.hashes import ArtifactHash
from kvnet.format.manifest import Manifest, encode_manifest
from kvnet.format.prefix import BLOCK_TOKENS, block_keys, common_prefix
from kvnet.store.interface import ArtifactRecord, Store
from kvnet.trust.policy import Refusal

MAX_CANDIDATES = 64
"""Artifacts whose token ids are compared for one prompt; a bound on work, far above what one prefix has in practice."""


class Lossy(Enum):
    """When state of a lossy codec may be used; the value is the name in the settings.

    Such state gives other low bits than the model computes, and now and then another word. Whoever has not asked for
    that does not get it.
    """

    NEVER = "never"
    SLOW_LINKS = "slow_links"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A stored artifact whose first ``n_tokens`` tokens are those of the prompt, and whose use is allowed."""

    record: ArtifactRecord
    n_tokens: int
    comparison: Comparison

    @property
    def artifact(self) -> ArtifactHash:
        """Its artifact hash."""
        return self.record.hash

    @property
    def manifest(self) -> Manifest:
        """Its manifest."""
        return self.record.manifest


@dataclass(frozen=True, slots=True)
class Rejected:
    """An artifact that fits the prompt and is not used, with the reason in words."""

    artifact: ArtifactHash
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Found:
    """What the store has for a prompt: the best usable hit, and what was turned down."""

    hit: PrefixHit | None
    rejected: tuple[Rejected, ...] = ()


def judge(
    manifest: Manifest,
    artifact: ArtifactHash,
    info: ModelInfo,
    identity: Identity,
    *,
    exact_only: bool,
    lossy: Lossy = Lossy.NEVER,
) -> Comparison | Rejected:
    """May this model continue from this artifact, under the policy in force?

    What was measured of the kind of machine that made it lowers the verdict, except for what this node signed and this
    very machine computes: whoever claims to be another such machine takes nothing of its own from it.

    Args:
        manifest: of the artifact; its signature has been checked.
        artifact: its hash, for the reason.
        info: the model that would continue.
        identity: whose policy counts.
        exact_only: take only the verdict ``EXACT``.
        lossy: whether state of a lossy codec is taken at all; whether it is fetched is decided with the link.
    """
    verdict = identity.policy().judge(manifest)
    if isinstance(verdict, Refusal):
        return Rejected(artifact, verdict.code, verdict.text)
    if info.fingerprint is None:
        return Rejected(artifact, "not_shareable", info.refusal)
    comparison = compare(info.fingerprint, manifest.fingerprint, info.producer, manifest.producer, codec=manifest.codec)
    if comparison.verdict is Verdict.INCOMPATIBLE:
        return Rejected(artifact, "incompatible", "; ".join(comparison.differences))
    own = verdict.own and manifest.producer == info.producer
    measured = None if own else identity.numerics.worst(info.fingerprint.hash, info.producer, manifest.producer)
    if measured is not None and not measured.tolerated:
        return Rejected(artifact, "measured", f"made by {manifest.producer.device}, where {measured.words}")
    if measured is not None and measured.difference and comparison.verdict is Verdict.EXACT:
        comparison = Comparison(Verdict.TOLERANT, (measured.words,))
    if exact_only and comparison.verdict is not Verdict.EXACT:
        return Rejected(artifact, "not_exact", "; ".join(comparison.differences))
    if lossy is Lossy.NEVER and not manifest.codec.lossless:
        return Rejected(artifact, "lossy", f"it is stored with the lossy codec {manifest.codec.value}, not used here")
    return comparison


def find_local(
    store: Store,
    info: ModelInfo,
    identity: Identity,
    tokens: Sequence[int],
    *,
    limit_tokens: int,
    exact_only: bool = False,
    lossy: Lossy = Lossy.NEVER,
) -> Found:
    """The usable stored artifact that shares the longest run of tokens with ``tokens``; of two, the lossless one.

    Token ids are compared, never keys alone: a forced key collision is a miss.

    Args:
        store: where to look; read in the calling thread.
        info: the model that would continue.
        identity: namespaces to look in and the policy.
        tokens: the prompt's token ids.
        limit_tokens: reuse at most this many (a generation leaves one token to feed).
        exact_only: take only artifacts whose verdict is ``EXACT``.
        lossy: whether artifacts of a lossy codec are taken.
    """
    best: PrefixHit | None = None
    rejected: list[Rejected] = []
    if info.fingerprint is None or limit_tokens <= 0:
        return Found(None)
    for artifact in _candidates(store, info.fingerprint, identity, tokens):
        record = store.get(artifact)
        if record is None:
            continue
        verdict = judge(record.manifest, artifact, info, identity, exact_only=exact_only, lossy=lossy)
        if isinstance(verdict, Rejected):
            rejected.append(verdict)
            continue
        try:
            own_tokens = store.tokens_of(artifact)
        except (NotInStoreError, IntegrityError) as error:
            # Damage to one artifact hides no other; the chunk counts as not held from now on.
            rejected.append(Rejected(artifact, "damaged", str(error)))
            continue
        shared = min(common_prefix(own_tokens, tokens), limit_tokens)
        held = held_tokens(store, record, shared)
        hit = PrefixHit(record, held, verdict)
        if held > 0 and (best is None or _rank(hit) > _rank(best)):
            best = hit
    return Found(best, tuple(rejected))


def _rank(hit: PrefixHit) -> tuple[int, bool]:
    return hit.n_tokens, hit.manifest.codec.lossless


def _candidates(
    store: Store, fingerprint: Fingerprint, identity: Identity, tokens: Sequence[int]
) -> list[ArtifactHash]:
    """Artifacts worth comparing, those with the deepest equal key first.

    An artifact that agrees with the prompt in a whole block has an equal key there. One that agrees in less has none,
    so that those of the same model are compared too, as long as nothing deeper was found.
    """
    found: list[ArtifactHash] = []
    for namespace in identity.namespaces():
        keys = block_keys(namespace.prefix_root(fingerprint.hash), tokens)
        matches = store.find_prefix(namespace.id, list(reversed(keys)))
        deepest = max((n_blocks for _, n_blocks in matches), default=0)
        found += [artifact for artifact, _ in sorted(matches, key=lambda match: -match[1])]
        if deepest == 0:
            found += store.artifacts_of(fingerprint.hash, namespace.id)
    return list(dict.fromkeys(found))[:MAX_CANDIDATES]


def held_tokens(store: Store, record: ArtifactRecord, n_tokens: int) -> int:
    """How many of the first ``n_tokens`` tokens have every tile in the store.

    A partly fetched artifact counts as far as its tiles reach without a gap.
    """
    if record.complete:
        return n_tokens
    plan = record.manifest.plan()
    for block in range((n_tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS):
        if not all(store.has_chunk(record.entries[index].hash) for index in plan.tiles_of_block(block)):
            return min(n_tokens, block * BLOCK_TOKENS)
    return n_tokens


def restore_plan(store: Store, record: ArtifactRecord, n_tokens: int) -> RestorePlan | None:
    """Where the tiles of the first ``n_tokens`` tokens lie; ``None`` when one of them has gone meanwhile."""
    plan = record.manifest.plan()
    tiles = [index for index in plan.needed_for(n_tokens) if plan[index].kind is ChunkKind.TILE]
    located = store.locate_all([record.entries[index].hash for index in tiles])
    refs: list[ChunkRef] = []
    for index, location in zip(tiles, located, strict=True):
        if location is None:
            return None
        refs.append(ChunkRef(index, location.path, location.offset, location.length_bytes, location.hash))
    return RestorePlan(encode_manifest(record.manifest), n_tokens, tuple(refs))
