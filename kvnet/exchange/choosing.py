"""Which of the artifacts that peers offer for a prompt to try, and in which order: by codec, link and the owner's word.

A lossy codec takes a fraction of the bytes and changes the low bits of the state. Under ``slow_links`` it is tried only
where the same prefix, were it stored as it is, would be no sooner here than computing it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvnet.exchange.planning import Weigher
from kvnet.exchange.reuse import Lossy
from kvnet.format.codecs import Codec
from kvnet.protocol.lookup import Candidate
from kvnet.protocol.speeds import Link

LinkOf = Callable[[Candidate, Weigher], Link]
"""What the peers that offer an artifact may be expected to do together, its codec's decoding included."""


def choose(
    candidates: Sequence[Candidate], lossy: Lossy, weigher: Weigher | None, link_of: LinkOf
) -> tuple[list[Candidate], list[str]]:
    """The offers worth trying, the best first, and in words why others are not.

    More tokens come first; of equally many, under ``slow_links`` the lossless, and then whichever is expected to be
    here and decoded sooner. Where rates are not known yet, fewer bytes come first, as the lookup ranked them.

    Args:
        candidates: as the lookup ranked them.
        lossy: when a lossy one is taken.
        weigher: of the prompt; ``None`` when it was never measured what this machine does.
        link_of: the link to those who offer one.
    """
    chosen: list[Candidate] = []
    reasons: list[str] = []
    for candidate in candidates:
        reason = "" if candidate.codec.lossless else _against_lossy(candidate, lossy, weigher, link_of)
        if reason:
            reasons.append(reason)
        else:
            chosen.append(candidate)

    def rank(candidate: Candidate) -> tuple[int, bool, float]:
        last = lossy is Lossy.SLOW_LINKS and not candidate.codec.lossless
        return -candidate.reusable_tokens, last, _expected_s(candidate, weigher, link_of)

    return sorted(chosen, key=rank), reasons


def _against_lossy(candidate: Candidate, lossy: Lossy, weigher: Weigher | None, link_of: LinkOf) -> str:
    """Why a lossy offer is not taken; empty when it is."""
    if lossy is Lossy.ALWAYS:
        return ""
    offered = f"a peer offers {candidate.reusable_tokens:,} tokens stored with the lossy codec {candidate.codec.value}"
    if lossy is Lossy.NEVER:
        return f"{offered}, which is not used here (reuse.lossy)"
    if weigher is None:
        return f"{offered}, which is used on slow links; this machine was not measured yet (kvnet bench calibrate)"
    exact = replace(candidate, codec=Codec.RAW, size_bytes=candidate.n_tokens * weigher.raw_bytes_per_token)
    fetch = weigher.claim(link_of(exact, weigher), exact).plan.fetch
    if fetch is not None and fetch.n_tokens >= min(candidate.reusable_tokens, weigher.n_prompt - 1):
        return f"{offered}, which is used on slow links; this one is fast enough without it"
    return ""


def _expected_s(candidate: Candidate, weigher: Weigher | None, link_of: LinkOf) -> float:
    """Seconds until what the prompt shares is here and decoded; 0 when the rate is not known."""
    if weigher is None:
        return 0.0
    link = link_of(candidate, weigher)
    if not math.isfinite(link.bytes_s):
        return 0.0
    stored = candidate.size_bytes * candidate.reusable_tokens // candidate.n_tokens
    return link.seconds(stored, candidate.reusable_tokens * weigher.raw_bytes_per_token)
