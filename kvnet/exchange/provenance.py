"""Whom the state of an artifact comes from: the spans of blocks that its manifest names, and what may not be mixed."""

from collections.abc import Sequence

from kvnet.engine.kv_state import Origin
from kvnet.errors import TrustError
from kvnet.exchange.reuse import PrefixHit
from kvnet.format.codecs import Codec
from kvnet.format.limits import MAX_DERIVED_SPANS
from kvnet.format.manifest import DerivedSpan, Manifest, artifact_of, decode_manifest
from kvnet.format.prefix import BLOCK_TOKENS


class LossyOriginError(TrustError):
    """State to be stored with a lossless codec came out of a lossy one."""


def require_lossless_origins(codec: Codec, origins: Sequence[Origin]) -> None:
    """Refuses to store with a lossless codec what a live cache took from an artifact of a lossy one.

    A manifest names the codec of its own tiles and not that of what they were derived from.

    Raises:
        TrustError: it would.
    """
    for origin in origins if codec.lossless else ():
        manifest = decode_manifest(origin.manifest)
        if not manifest.codec.lossless:
            raise LossyOriginError(
                f"expected state to store as {codec.value} that is exact; what is in RAM continued from an artifact "
                f"stored with the lossy codec {manifest.codec.value}",
                hint=f"Store it as {manifest.codec.value}, or compute it anew.",
            )


def all_spans(source: PrefixHit | None, origins: Sequence[Origin], publisher: bytes) -> tuple[DerivedSpan, ...]:
    """Every span that ``publisher`` did not compute itself: of the stored source, and of what a live cache came from.

    Raises:
        TrustError: more of them than a manifest can name; without its provenance nothing is published.
    """
    spans = list(derived_spans(source, publisher))
    for origin in origins:
        spans += spans_from(decode_manifest(origin.manifest), origin.n_tokens, publisher)
    unique = tuple(dict.fromkeys(spans))
    if len(unique) > MAX_DERIVED_SPANS:
        raise TrustError(
            f"expected state from at most {MAX_DERIVED_SPANS} artifacts of others, found {len(unique)}",
            hint="`kvnet add` without reuse computes it anew.",
        )
    return unique


def derived_spans(source: PrefixHit | None, publisher: bytes) -> tuple[DerivedSpan, ...]:
    """Every span of blocks that ``publisher`` did not compute itself, when it extends ``source``."""
    return spans_from(source.manifest, source.n_tokens, publisher) if source is not None else ()


def spans_from(manifest: Manifest, n_tokens: int, publisher: bytes) -> tuple[DerivedSpan, ...]:
    """Every span of blocks that ``publisher`` did not compute itself, in the first ``n_tokens`` of an artifact.

    What the artifact took from others stays named, cut to the blocks in use (spans that it took back from
    ``publisher`` are dropped: a key need not name itself); it is named itself when somebody else signed it.
    """
    if n_tokens == 0:
        return ()
    last_block = (n_tokens - 1) // BLOCK_TOKENS
    inherited = [
        DerivedSpan(span.artifact, span.publisher, span.first_block, min(span.last_block, last_block))
        for span in manifest.derived_from
        if span.first_block <= last_block and span.publisher != publisher
    ]
    if manifest.publisher != publisher:
        inherited.append(DerivedSpan(artifact_of(manifest), manifest.publisher, 0, last_block))
    return tuple(inherited)
