"""Results as a person reads them in a terminal."""

from collections.abc import Callable, Iterable, Sequence

from simulations.comparing import by_policy, spread
from simulations.replay import ReplayResult
from simulations.results import Summary

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def size(n_bytes: float) -> str:
    """A size in decimal units."""
    value, unit = float(n_bytes), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 or value >= 100 else f"{value:.1f} {_UNITS[unit]}"


def seconds(value: float) -> str:
    """A duration."""
    if value == 0:
        return "0 s"
    if value < 120:
        return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def percent(share: float) -> str:
    """A share in per cent."""
    return f"{100 * share:.1f} %"


def columns(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table: the first column to the left, the others to the right."""
    table = [tuple(headers), *(tuple(row) for row in rows)]
    widths = [max(len(row[at]) for row in table) for at in range(len(headers))]
    lines = []
    for row in table:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def comparison(title: str, runs: Sequence[Summary]) -> str:
    """Policies of one scenario side by side; means where there is more than one seed, and half of the range."""
    headers = (
        "POLICY", "ANSWERED", "TOKENS HIT", "FROM PEERS", "TTFT p50", "p95", "PREFILL SAVED", "MOVED", "SSD WRITTEN",
        "ANNOUNCED", "SLOWER",
    )  # fmt: skip
    rows = []
    for policy, alike in by_policy(runs).items():
        saved_s = _mean([run.prefill_saved_s for run in alike])
        rows.append(
            (
                policy,
                f"{_mean([run.requests for run in alike]):,.0f}",
                _shown([run.hit_token_fraction for run in alike], percent),
                _shown([run.peer_fraction for run in alike], percent),
                _shown([run.ttft_s["p50"] for run in alike], seconds),
                _shown([run.ttft_s["p95"] for run in alike], seconds),
                f"{_shown([run.prefill_saved_fraction for run in alike], percent)}, {seconds(saved_s)}",
                size(_mean([run.fetched_bytes for run in alike])),
                size(_mean([run.ssd_written_bytes for run in alike])),
                f"{_mean([run.announce_messages for run in alike]):,.0f}",
                percent(_mean([run.slower_fraction for run in alike])),
            )
        )
    asked = runs[0].requests + runs[0].unanswered
    seeds = sorted({run.seed for run in runs})
    named = f"seed {seeds[0]}" if len(seeds) == 1 else f"means of seeds {seeds[0]} to {seeds[-1]}, ± half of the range"
    head = f"{title}\n{asked:,} requests in {seconds(runs[0].duration_s)} of simulated time, {named}"
    return f"{head}\n\n{columns(headers, rows)}"


def _mean(values: Sequence[float]) -> float:
    return spread(values).mean


def _shown(values: Sequence[float], text: Callable[[float], str]) -> str:
    found = spread(values)
    return text(found.mean) + (f" ±{text(found.half)}" if len(values) > 1 else "")


def one_run(title: str, run: Summary) -> str:
    """All of one run."""
    times = ", ".join(f"{name} {seconds(value)}" for name, value in run.ttft_s.items())
    origins = (
        f"own RAM {percent(run.own_ram_fraction)}, own disk {percent(run.own_disk_fraction)}, "
        f"peers {percent(run.peer_fraction)}"
    )
    pairs = [
        ("policy", f"{run.policy}, seed {run.seed}"),
        ("answered", f"{run.requests:,} in {seconds(run.duration_s)} of simulated time"),
        ("not answered", f"{run.unanswered:,}, since their node went away"),
        ("tokens hit", f"{percent(run.hit_token_fraction)}: {origins}"),
        ("first token", times),
        ("prefill saved", f"{percent(run.prefill_saved_fraction)}, {seconds(run.prefill_saved_s)} of engine time"),
        ("slower than computing", percent(run.slower_fraction)),
        ("fetched", size(run.fetched_bytes)),
        ("written to SSDs", size(run.ssd_written_bytes)),
        ("announcing", f"{run.announce_messages:,} messages, {run.lookup_messages:,} of looking up"),
        ("load", f"the busiest node served {percent(run.busiest_share)}; fairness {run.load_fairness:.2f} of 1"),
        ("checked", ", ".join(f"{name} {count:,} times" for name, count in sorted(run.checks.items())) or "nothing"),
        ("counted", ", ".join(f"{name} {count:,}" for name, count in sorted(run.counts.items())) or "nothing more"),
        ("took", f"{run.seconds:.1f} s"),
        ("digest", run.digest),
    ]
    width = max(len(name) for name, _ in pairs)
    return "\n".join([title, "", *(f"{name.ljust(width)}  {value}" for name, value in pairs)])


def replayed(name: str, result: ReplayResult) -> str:
    """What an infinite store would have saved."""
    return (
        f"{name}: {result.requests:,} requests, {result.tokens:,} tokens in {result.blocks:,} blocks of "
        f"{result.block_tokens}\n"
        f"an infinite store at one node hits {percent(result.hit_token_fraction)} of the tokens, "
        f"{percent(result.hit_block_fraction)} of the blocks\n"
        f"digest {result.digest}, {result.seconds:.2f} s"
    )
