"""What reuse has spared: requests and results."""

import msgspec

from kvnet_node.operations.requests.base import Request, Result


class SavingsRequest(Request, frozen=True):
    """What reuse has spared."""


class SavingsSource(msgspec.Struct, frozen=True):
    """Reuse from one source: uses, tokens not computed, seconds saved net, stored bytes read or fetched."""

    uses: int
    tokens: int
    saved_s: float
    bytes: int


class SavingsEntry(msgspec.Struct, frozen=True):
    """One artifact's account; it stays when the artifact is removed.

    Attributes:
        artifact: artifact hash text; "" for caches that were still in memory, "older" for rows added up.
        name: the name it was given, or "".
        model: the model's name, or "".
        origin: "add", "conversation", "fetch", "peer" or "ram".
        tokens: tokens of the artifact; 0 when not known.
        paid_s: seconds of prefill and fetching paid ahead of its first use.
        uses: answers that continued from it.
        saved_tokens: prompt tokens not computed.
        saved_s: seconds saved, what reuse took subtracted.
        break_even_uses: after how many uses what was paid ahead is won back; None when not known.
        sources: the same by source.
        last_used: seconds since 1970, or 0.
    """

    artifact: str
    name: str
    model: str
    origin: str
    tokens: int
    paid_s: float
    uses: int
    saved_tokens: int
    saved_s: float
    break_even_uses: int | None
    sources: dict[str, SavingsSource]
    last_used: int


class SavingsResult(Result, frozen=True, tag="savings"):
    """What reuse has spared.

    Attributes:
        artifacts: the one that saved most time first.
        sources: by source.
        requests: answers noted.
        reused_requests: those that reused anything.
        prompt_tokens: tokens of all their prompts.
        saved_tokens: of these, not computed.
        saved_s: seconds saved, what reuse took subtracted.
        prefilled_tokens, prefill_s: what was still computed for answers.
        paid_s: seconds paid ahead.
        since: seconds since 1970 of the first note, or 0.
    """

    artifacts: list[SavingsEntry]
    sources: dict[str, SavingsSource]
    requests: int
    reused_requests: int
    prompt_tokens: int
    saved_tokens: int
    saved_s: float
    prefilled_tokens: int
    prefill_s: float
    paid_s: float
    since: int
