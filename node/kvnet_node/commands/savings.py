"""``kvnet savings``: what was computed once, and what its reuse has spared since."""

import datetime as dt
from typing import Any

import msgspec

from kvnet.errors import UsageError
from kvnet_node.invocation import Context
from kvnet_node.operations.requests import SavingsEntry, SavingsRequest, SavingsResult
from kvnet_node.output import columns, escape, format_count, format_counted, format_seconds, pairs

SHOWN_ARTIFACTS = 20
_WHERE = {"ram": "memory", "disk": "this node's disk", "peer": "peers"}


def savings(
    *,
    price_per_million_tokens: float | None = None,
    currency: str = "EUR",
    context: Context,
) -> None:
    """Show what reuse has spared: per artifact prefill paid once, uses, tokens and seconds saved.

    Args:
        price_per_million_tokens: what a million prompt tokens would have cost you; nothing is assumed without it.
        currency: of that price.
    """
    price = price_per_million_tokens
    if price is not None and not 0 <= price < float("inf"):
        raise UsageError(f"--price-per-million-tokens expects a number from 0 on, found {price}")
    result = context.run("savings", SavingsRequest(), SavingsResult)
    money = result.saved_tokens / 1e6 * price if price is not None else None
    record: dict[str, Any] = msgspec.to_builtins(result)
    if price is not None:
        record |= {"price_per_million_tokens": price, "currency": currency, "saved_money": money}

    def shown(_: dict[str, Any]) -> str:
        return render(result, f"{money:,.2f} {currency}" if money is not None else "")

    context.output.result(record, shown)
    if not result.requests and not result.artifacts:
        context.output.message("nothing noted yet: it begins with kvnet add, kvnet ask, or a request to the node")


def render(result: SavingsResult, money: str) -> str:
    """The whole, then the artifacts that saved most."""
    if not result.requests and not result.artifacts:
        return ""
    blocks = [_summary(result, money) if result.requests else _unused(result)]
    if result.artifacts:
        headers = ("NAME", "ARTIFACT", "FROM", "PAID AHEAD", "USES", "TOKENS SAVED", "TIME SAVED", "PAID OFF")
        blocks.append(columns([_row(entry) for entry in result.artifacts[:SHOWN_ARTIFACTS]], headers))
    if len(result.artifacts) > SHOWN_ARTIFACTS:
        rest = len(result.artifacts) - SHOWN_ARTIFACTS
        blocks.append(f"{format_counted(rest, 'more artifact')}: --json lists all")
    return "\n\n".join(blocks)


def _summary(result: SavingsResult, money: str) -> str:
    since = dt.datetime.fromtimestamp(result.since, tz=dt.UTC).date().isoformat() if result.since else ""
    share = 100 * result.saved_tokens / result.prompt_tokens if result.prompt_tokens else 0.0
    answers = f"{format_counted(result.requests, 'answer')}, {format_count(result.reused_requests)} of them with reuse"
    items = [
        ("answers", answers + (f", since {since}" if since else "")),
        (
            "tokens saved",
            f"{format_count(result.saved_tokens)} of {format_count(result.prompt_tokens)} in prompts ({share:.1f} %)",
        ),
        ("time saved", _saved(result.saved_s, result.saved_tokens)),
        *(
            (
                f"  from {_WHERE.get(name, name)}",
                ", ".join(
                    (
                        format_counted(source.uses, "use"),
                        format_counted(source.tokens, "token"),
                        _saved(source.saved_s, source.tokens),
                    )
                ),
            )
            for name, source in result.sources.items()
        ),
        ("paid ahead", f"{format_seconds(result.paid_s)} of prefill and fetching before the first use"),
        ("still computed", f"{format_counted(result.prefilled_tokens, 'token')} in {format_seconds(result.prefill_s)}"),
    ]
    if money:
        items.append(("money saved", f"{money} at your price"))
    return pairs(items)


def _unused(result: SavingsResult) -> str:
    """What was paid ahead while nothing was answered: there is nothing yet that could be saved."""
    since = dt.datetime.fromtimestamp(result.since, tz=dt.UTC).date().isoformat() if result.since else ""
    return pairs(
        [
            ("answers", "none yet" + (f", since {since}" if since else "") + ": nothing saved so far"),
            ("paid ahead", f"{format_seconds(result.paid_s)} of prefill and fetching before the first use"),
        ]
    )


def _row(entry: SavingsEntry) -> tuple[str, ...]:
    origin = {"ram": "memory", "add": "added", "fetch": "fetched", "peer": "peers"}.get(entry.origin, entry.origin)
    return (
        escape(entry.name) or "-",
        entry.artifact or "-",
        origin,
        format_seconds(entry.paid_s) if entry.paid_s else "-",
        format_count(entry.uses),
        format_count(entry.saved_tokens),
        _saved(entry.saved_s, entry.saved_tokens),
        paid_off(entry),
    )


def paid_off(entry: SavingsEntry) -> str:
    """Whether an artifact has won back what was paid ahead for it, and when it does."""
    if not entry.paid_s:
        return "at once"
    if entry.break_even_uses is None:
        if not entry.uses:
            return "not used yet"
        # Exactly nothing is what is noted while the prefill speed of a model is unknown.
        slower = "not like this: reuse takes longer than prefill"
        return slower if entry.saved_s else "not known: this machine's prefill had not been measured"
    uses = format_counted(entry.break_even_uses, "use")
    return f"yes, with {uses}" if entry.uses >= entry.break_even_uses else f"after about {uses}"


def _saved(seconds: float, tokens: int) -> str:
    if tokens and not seconds:
        return "not known"
    return f"{'-' if seconds < 0 else ''}{format_seconds(abs(seconds))}"
