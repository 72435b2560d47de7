"""What a comparison of policies found, as plots: each title says the finding, each axis its unit."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from simulations.charts import LOST_COLOUR, bars, colours, figure, line_style, policies_axis, times_axis, write
from simulations.comparing import by_policy, spread
from simulations.policies import POLICIES
from simulations.rendering import percent, seconds, size
from simulations.results import LATER_S, LATER_SHARE, Array, RunResult, Summary, later, summary
from simulations.saved import Saved

MAX_CURVES: Final = 7
"""More curves in one plot cannot be told apart; bars have them all."""
ALWAYS: Final = ("none", "own", "swarm", "central")
DAY_S: Final = 86_400.0
_MIN_TTFT_S: Final = 1e-3
_NAMES: Final = {
    "none": "no sharing at all",
    "own": "own caches alone",
    "swarm": "the swarm",
    "central": "a perfect cache for all",
}


class _Runs:
    """The runs of one scenario with its first seed, and what was found of them; `all_seeds` has the others too."""

    def __init__(self, saved: Saved) -> None:
        first = saved.runs[0].seed
        self.results = [run for run in saved.runs if run.seed == first]
        self.summaries = [summary(run) for run in self.results]
        self.names = [run.policy for run in self.results]
        self.all_seeds = by_policy([summary(run) for run in saved.runs])
        self.n_seeds = max(len(alike) for alike in self.all_seeds.values())
        self.where = f"{saved.title}; {saved.runs[0].asked:,} requests, seed {first}"

    def found(self, policy: str) -> Summary | None:
        return next((each for each in self.summaries if each.policy == policy), None)

    def result(self, policy: str) -> RunResult | None:
        return next((each for each in self.results if each.policy == policy), None)

    def compared(self) -> tuple[RunResult, RunResult] | None:
        """The swarm, or the last run, and what it is compared with: own caches, or whatever else there is."""
        run = self.result("swarm") or self.results[-1]
        other = self.result("own") or next((each for each in self.results if each is not run), None)
        return None if other is None or other is run else (run, other)

    def few(self) -> list[RunResult]:
        """The four that are always there, then others while there is room."""
        first = [each for each in self.results if each.policy in ALWAYS]
        others = [each for each in self.results if each.policy not in ALWAYS]
        chosen = {each.policy for each in [*first, *others][:MAX_CURVES]}
        return [each for each in self.results if each.policy in chosen]


def draw(saved: Saved, folder: Path) -> list[Path]:
    """All plots of a result, as PNG and SVG.

    Args:
        saved: the result.
        folder: where they are written.

    Raises:
        UsageError: the folder cannot be written.
    """
    runs = _Runs(saved)
    plots: tuple[tuple[str, Callable[[_Runs], Figure]], ...] = (
        ("hit_rate", _hit_rate),
        ("ttft", _ttft),
        ("prefill_saved", _prefill_saved),
        ("bytes_moved", _bytes_moved),
        ("ssd_writes", _ssd_writes),
        ("announcing", _announcing),
        ("load", _load),
    )
    drawn = [file for name, plot in plots for file in write(plot(runs), folder, name)]
    pair = runs.compared()
    return drawn if pair is None else [*drawn, *write(_where_it_loses(runs, *pair), folder, "where_it_loses")]


def _against(runs: _Runs, sentence: Callable[[Summary, Summary], str], otherwise: Callable[[Summary], str]) -> str:
    """A finding about the swarm against own caches, or else about the best run."""
    swarm, own = runs.found("swarm"), runs.found("own") or runs.found("none")
    if swarm is not None and own is not None:
        return sentence(swarm, own)
    return otherwise(max(runs.summaries, key=lambda each: each.hit_token_fraction))


def _name(run: Summary | RunResult) -> str:
    return _NAMES.get(run.policy, f"policy {run.policy}")


def _first(run: Summary) -> str:
    """The name at the beginning of a sentence."""
    name = _name(run)
    return name[0].upper() + name[1:]


def _hit_rate(runs: _Runs) -> Figure:
    title = _against(
        runs,
        lambda swarm, own: (
            f"The swarm reuses {percent(swarm.hit_token_fraction)} of all prompt tokens, "
            f"{_name(own)} {percent(own.hit_token_fraction)}"
        ),
        lambda best: f"{_first(best)} reuses {percent(best.hit_token_fraction)} of all prompt tokens",
    )
    made, axes = figure(title, runs.where, height=_height(runs))
    places = range(len(runs.names))
    left = np.zeros(len(runs.names))
    parts = (
        ("from the node's RAM", "#56b4e9", [each.own_ram_fraction for each in runs.summaries]),
        ("from the node's disk", "#0072b2", [each.own_disk_fraction for each in runs.summaries]),
        ("from peers", "#009e73", [each.peer_fraction for each in runs.summaries]),
    )
    for label, colour, shares in parts:
        values = 100 * np.array(shares)
        axes.barh(places, values, left=left, color=colour, label=label)
        left += values
    for place, (name, total) in enumerate(zip(runs.names, left.tolist(), strict=True)):
        found = spread([100 * each.hit_token_fraction for each in runs.all_seeds[name]])
        text = f"{total:.1f} %"
        if runs.n_seeds > 1:
            axes.plot([found.least, found.most], [place, place], color="black", linewidth=2)
            text += f"; {found.least:.1f} to {found.most:.1f} % with {runs.n_seeds} seeds"
        axes.text(max(total, found.most) + 1, place, text, va="center", fontsize=9)
    policies_axis(axes, runs.names)
    axes.set_xlim(0, 112 if runs.n_seeds == 1 else 145)
    axes.set_xticks(range(0, 101, 20))
    axes.set_xlabel("prompt tokens not computed, % of all")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize=9, frameon=False)
    return made


def _ttft(runs: _Runs) -> Figure:
    title = _against(
        runs,
        lambda swarm, own: (
            f"Half of all first tokens come within {seconds(swarm.ttft_s['p50'])} in the swarm, within "
            f"{seconds(own.ttft_s['p50'])} with {_name(own)}; nine of ten within {seconds(swarm.ttft_s['p90'])} "
            f"and {seconds(own.ttft_s['p90'])}"
        ),
        lambda _: _means(runs),
    )
    made, axes = figure(title, runs.where)
    known = colours(runs.names)
    for run in runs.few():
        times_s = np.sort(np.maximum(run.requests["ttft_s"], _MIN_TTFT_S))
        # A thousand points show all that can be seen.
        share = np.linspace(0, 100, min(1001, max(2, len(times_s))))
        _curve(axes, np.percentile(times_s, share), share, run.policy, known[run.policy], runs.names)
    shown = [np.maximum(run.requests["ttft_s"], _MIN_TTFT_S) for run in runs.few() if run.n_requests]
    if shown:
        times_axis(axes, min(float(times.min()) for times in shown), max(float(times.max()) for times in shown) * 1.05)
    axes.set_xlabel("time to first token (logarithmic)")
    axes.set_ylabel("requests answered by then, %")
    axes.set_ylim(0, 100)
    axes.legend(fontsize=9, frameon=False)
    return made


def _means(runs: _Runs) -> str:
    """The policies with the soonest and the latest first token on average."""
    ordered = sorted(runs.summaries, key=lambda each: each.ttft_s["mean"])
    best, worst = ordered[0], ordered[-1]
    told = f"First tokens come after {seconds(best.ttft_s['mean'])} on average with {_name(best)}"
    if worst is not best:
        told += f", after {seconds(worst.ttft_s['mean'])} with {_name(worst)}"
    return told


def _prefill_saved(runs: _Runs) -> Figure:
    title = _against(
        runs,
        lambda swarm, own: (
            f"The swarm spares {percent(swarm.prefill_saved_fraction)} of all prefill, "
            f"{seconds(swarm.prefill_saved_s)} of engine time; {_name(own)} {percent(own.prefill_saved_fraction)}"
        ),
        lambda best: f"{_first(best)} spares {percent(best.prefill_saved_fraction)} of all prefill",
    )
    made, axes = figure(title, runs.where, height=_height(runs))
    hours = [each.prefill_saved_s / 3600 for each in runs.summaries]
    labels = [f"{seconds(each.prefill_saved_s)} ({percent(each.prefill_saved_fraction)})" for each in runs.summaries]
    bars(axes, runs.names, [max(0.0, value) for value in hours], labels)
    axes.set_xlabel("engine time spared, hours")
    return made


def _bytes_moved(runs: _Runs) -> Figure:
    swarm = runs.found("swarm") or max(runs.summaries, key=lambda each: each.fetched_bytes)
    own = runs.found("own")
    title = f"With {_name(swarm)} {size(swarm.fetched_bytes)} move between nodes"
    if own is not None and swarm.fetched_bytes:
        more_s = (swarm.prefill_saved_s - own.prefill_saved_s) / (swarm.fetched_bytes / 1e9)
        title += f", and each GB spares {seconds(more_s)} of prefill that own caches do not"
    made, axes = figure(title, runs.where, height=_height(runs))
    moved = [each.fetched_bytes / 1e9 for each in runs.summaries]
    bars(axes, runs.names, moved, [size(each.fetched_bytes) for each in runs.summaries])
    axes.set_xlabel("bytes fetched from peers, GB")
    return made


def _ssd_writes(runs: _Runs) -> Figure:
    def daily(run: RunResult) -> float:
        days = max(run.duration_s / DAY_S, 1e-9)
        return float(run.nodes["ssd_written_bytes"].max(initial=0)) / 1e9 / days

    per_day = [daily(run) for run in runs.results]
    at = runs.names.index("swarm") if "swarm" in runs.names else int(np.argmax(per_day))
    title = f"With {_name(runs.results[at])} the node that writes most writes {per_day[at]:.1f} GB a day to its SSD"
    made, axes = figure(title, runs.where, height=_height(runs))
    bars(axes, runs.names, per_day, [f"{value:.1f} GB" for value in per_day])
    axes.set_xlabel("written to the SSD of the node that writes most, GB a day")
    return made


def _announcing(runs: _Runs) -> Figure:
    swarm = runs.found("swarm") or max(runs.summaries, key=lambda each: each.announce_messages)
    n_nodes = len(runs.results[0].nodes["requests"])
    rates = [each.announce_messages / n_nodes / max(each.duration_s / 3600, 1e-9) for each in runs.summaries]
    at = runs.summaries.index(swarm)
    title = f"With {_name(swarm)} a node sends {rates[at]:,.0f} messages an hour to announce what it holds"
    made, axes = figure(title, runs.where, height=_height(runs))
    bars(axes, runs.names, rates, [f"{rate:,.0f}" for rate in rates])
    axes.set_xlabel("messages to members and to servers of the DHT, of a node in an hour")
    return made


def _load(runs: _Runs) -> Figure:
    swarm = runs.found("swarm") or max(runs.summaries, key=lambda each: each.served_bytes)
    n_nodes = len(runs.results[0].nodes["requests"])
    title = (
        f"With {_name(swarm)} the busiest of {n_nodes:,} nodes serves {percent(swarm.busiest_share)} of all bytes; "
        f"{percent(1 / max(n_nodes, 1))} would be even"
    )
    made, axes = figure(title, runs.where)
    known = colours(runs.names)
    shown = [run for run in runs.few() if run.nodes["served_bytes"].sum()]
    for run in shown:
        served = np.sort(run.nodes["served_bytes"])[::-1].astype(np.float64)
        share = np.concatenate(([0.0], 100 * np.cumsum(served) / served.sum()))
        _curve(axes, np.linspace(0, 100, len(share)), share, run.policy, known[run.policy], runs.names)
    axes.plot([0, 100], [0, 100], color="#8c8c8c", linestyle=":", label="even")
    axes.set_xlabel("nodes, those that serve most first, %")
    axes.set_ylabel("of all bytes served, %")
    axes.set_ylim(0, 102)
    axes.legend(fontsize=9, frameon=False)
    return made


def _where_it_loses(runs: _Runs, swarm: RunResult, own: RunResult) -> Figure:
    lost, edges, counts = losses(swarm, own)
    worst = int(np.argmax(lost))
    overall = float(np.dot(lost, counts)) / max(1, sum(counts))
    title = f"No request is answered later with {_name(swarm)} than with {_name(own)}"
    if overall:
        title = (
            f"{overall:.1f} % of requests are answered later with {_name(swarm)} than with "
            f"{_name(own)}, most often prompts of {edges[worst]:,.0f} to {edges[worst + 1]:,.0f} tokens"
        )
    made, axes = figure(title, f"{runs.where}; later: by more than {percent(LATER_SHARE)} and {LATER_S * 1000:.0f} ms")
    places = np.arange(len(lost))
    drawn = axes.bar(places, lost, color=LOST_COLOUR)
    axes.bar_label(drawn, labels=[f"{share:.1f} %\nof {count:,}" for share, count in zip(lost, counts, strict=True)])
    labels = [f"{low:,.0f} to\n{high:,.0f}" for low, high in pairwise(edges)]
    axes.set_xticks(places, labels=labels, fontsize=8)
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("answered later, % of these requests")
    axes.set_ylim(0, max([*lost, 1.0]) * 1.25)
    return made


def losses(run: RunResult, other: RunResult) -> tuple[list[float], list[float], list[int]]:
    """Where a run answers later than another: by length of the prompt.

    Returns:
        Per cent of requests that are later, in each class of prompts; the classes' edges in tokens; and how many
        requests each has. Only requests that both have answered are compared.
    """
    _, ours, theirs = np.intersect1d(run.number, other.number, assume_unique=True, return_indices=True)
    n_input = run.n_input[ours]
    if not len(n_input):
        return [0.0], [0.0, 0.0], [0]
    slower = later(run.requests["ttft_s"][ours], other.requests["ttft_s"][theirs])
    edges = np.unique(np.rint(np.percentile(n_input, [0, 20, 40, 60, 80, 100])))
    if len(edges) == 1:
        edges = np.array([edges[0], edges[0] + 1])
    place = np.clip(np.searchsorted(edges, n_input, side="right") - 1, 0, len(edges) - 2)
    counts = np.bincount(place, minlength=len(edges) - 1)
    shares = 100 * np.bincount(place, weights=slower, minlength=len(edges) - 1) / np.maximum(1, counts)
    return shares.tolist(), edges.tolist(), counts.tolist()


def _curve(axes: Axes, x: Array, y: Array, policy: str, colour: str, policies: list[str]) -> None:
    """A policy's curve; the four that are always there are thicker, and lie below what may run over them."""
    always = policy in ALWAYS
    style, width = line_style(policy, policies), 2.8 if always else 1.5
    axes.plot(x, y, color=colour, label=_label(policy), linestyle=style, linewidth=width, zorder=2 if always else 3)


def _label(policy: str) -> str:
    """A policy's name, and what it means where the name does not say it."""
    return policy if policy in ALWAYS or policy not in POLICIES else f"{policy}: {POLICIES[policy].title}"


def _height(runs: _Runs) -> float:
    return 2.2 + 0.32 * len(runs.names)
