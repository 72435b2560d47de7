"""The operation that reads the ledger of savings."""

import math
from collections import defaultdict

from kvnet_node.operations import requests as r
from kvnet_node.operations.context import OperationContext
from kvnet_node.savings import LIVE, Made, Use


async def savings(ctx: OperationContext, request: r.SavingsRequest) -> r.SavingsResult:  # noqa: ARG001
    """What reuse has spared, per artifact and in all."""
    ledger = ctx.services.savings
    made = {each.artifact: each for each in ledger.artifacts()}
    uses: dict[str, list[Use]] = defaultdict(list)
    for use in ledger.uses():
        uses[use.artifact].append(use)
    entries = [entry(made.get(artifact), artifact, uses.get(artifact, [])) for artifact in {*made, *uses}]
    entries.sort(key=lambda each: (-each.saved_s, -each.uses, -each.tokens, each.artifact))
    totals = ledger.totals()
    return r.SavingsResult(
        artifacts=entries,
        sources=_by_source([use for each in uses.values() for use in each]),
        requests=totals.requests,
        reused_requests=totals.reused_requests,
        prompt_tokens=totals.prompt_tokens,
        saved_tokens=sum(each.saved_tokens for each in entries),
        saved_s=sum((each.saved_s for each in entries), 0.0),
        prefilled_tokens=totals.prefilled_tokens,
        prefill_s=totals.prefill_s,
        paid_s=sum((each.paid_s for each in entries), 0.0),
        since=totals.since_s,
    )


def entry(made: Made | None, artifact: str, uses: list[Use]) -> r.SavingsEntry:
    """One artifact's account."""
    paid_s = (made.prefill_s + made.fetch_s) if made is not None else 0.0
    n_uses = sum(use.uses for use in uses)
    saved_s = sum((use.saved_s for use in uses), 0.0)
    return r.SavingsEntry(
        artifact=artifact,
        name=made.name if made is not None else "",
        model=made.model if made is not None else "",
        origin="ram" if artifact == LIVE else made.origin if made is not None else "peer",
        tokens=made.tokens if made is not None else 0,
        paid_s=paid_s,
        uses=n_uses,
        saved_tokens=sum(use.tokens for use in uses),
        saved_s=saved_s,
        break_even_uses=break_even_uses(paid_s, saved_s, n_uses),
        sources=_by_source(uses),
        last_used=max((use.last_s for use in uses), default=0),
    )


def break_even_uses(paid_s: float, saved_s: float, uses: int) -> int | None:
    """After how many uses what was paid ahead is won back, at what a use has saved so far.

    Returns:
        0 when nothing was paid ahead; None when it is not known yet, or uses save nothing.
    """
    if paid_s <= 0:
        return 0
    if not uses or saved_s <= 0:
        return None
    return math.ceil(paid_s / (saved_s / uses))


def _by_source(uses: list[Use]) -> dict[str, r.SavingsSource]:
    found: dict[str, r.SavingsSource] = {}
    for use in sorted(uses, key=lambda each: each.source):
        before = found.get(use.source, r.SavingsSource(0, 0, 0.0, 0))
        found[use.source] = r.SavingsSource(
            before.uses + use.uses,
            before.tokens + use.tokens,
            before.saved_s + use.saved_s,
            before.bytes + use.n_bytes,
        )
    return found
