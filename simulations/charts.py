"""How every plot looks: one style, policies in the same colours everywhere, a finding as the title."""

import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvnet.errors import UsageError

KNOWN_COLOURS: Final = {"none": "#8c8c8c", "own": "#0072b2", "swarm": "#009e73", "central": "#e69f00"}
OTHER_COLOURS: Final = ("#cc79a7", "#d55e00", "#56b4e9", "#7a5c3e", "#5b3f8c", "#b8a500", "#444444", "#8c564b")
"""Those of Okabe and Ito first, which people who do not see red and green as others do can tell apart."""
LOST_COLOUR: Final = "#d55e00"
LINE_STYLES: Final = ("-", "--", ":", "-.")
TIMES: Final = (
    (0.001, "1 ms"), (0.01, "10 ms"), (0.1, "0.1 s"), (1, "1 s"), (10, "10 s"), (60, "1 min"), (600, "10 min"),
    (3600, "1 h"), (36_000, "10 h"),
)  # fmt: skip
"""Where an axis of times has its marks."""
TITLE_CHARACTERS: Final = 9.0
CAPTION_CHARACTERS: Final = 15.0
"""Of a line, in an inch of its figure."""


def _styled() -> AbstractContextManager[None]:
    """The style while something is drawn; nothing of it stays."""
    return mpl.rc_context(
        {
            "svg.hashsalt": "kvnet",
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.3,
            "axes.axisbelow": True,
        }
    )


def colours(policies: Sequence[str]) -> dict[str, str]:
    """A colour for each policy; the four that are always there keep theirs."""
    others = [name for name in policies if name not in KNOWN_COLOURS]
    more = {name: OTHER_COLOURS[at % len(OTHER_COLOURS)] for at, name in enumerate(others)}
    return {**KNOWN_COLOURS, **more}


def figure(title: str, subtitle: str, *, height: float = 4.5, width: float = 8.5) -> tuple[Figure, Axes]:
    """An empty figure with one plot.

    Args:
        title: the finding.
        subtitle: what was run.
        height: inches.
        width: inches.
    """
    with _styled():
        made = Figure(figsize=(width, height), layout="constrained")
        axes = made.subplots()
    head(made, title, subtitle)
    return made, axes


def head(made: Figure, title: str, subtitle: str) -> None:
    """Put the finding above a figure, and what was run below it."""
    width = float(made.get_figwidth())
    made.suptitle(textwrap.fill(title, round(width * TITLE_CHARACTERS)), x=0.01, ha="left", fontsize=12, weight="bold")
    caption = textwrap.fill(subtitle, round(width * CAPTION_CHARACTERS))
    made.supxlabel(caption, x=0.01, ha="left", fontsize=8, color="#555555")


def bars(axes: Axes, names: Sequence[str], values: Sequence[float], labels: Sequence[str]) -> None:
    """A horizontal bar for each policy, the first at the top, each with its figure."""
    known = colours(names)
    drawn = axes.barh(range(len(names)), values, color=[known[name] for name in names])
    axes.bar_label(drawn, labels=list(labels), padding=3, fontsize=9)
    policies_axis(axes, names)
    axes.set_xlim(0, max([*values, 1e-9]) * 1.18)


def line_style(policy: str, policies: Sequence[str]) -> str:
    """How a policy's curve is drawn, told without colour too: the four that are always there solid, others in turn."""
    others = [name for name in policies if name not in KNOWN_COLOURS]
    return LINE_STYLES[(1 + others.index(policy)) % len(LINE_STYLES)] if policy in others else LINE_STYLES[0]


def times_axis(axes: Axes, least_s: float, most_s: float) -> None:
    """A logarithmic axis of times from left to right, marked in the units people use."""
    axes.set_xscale("log")
    least_s, most_s = max(least_s, 1e-3), max(most_s, 2 * least_s)
    shown = [(at_s, text) for at_s, text in TIMES if least_s <= at_s <= most_s]
    axes.set_xlim(least_s, most_s)
    axes.set_xticks([at_s for at_s, _ in shown], labels=[text for _, text in shown])
    axes.minorticks_off()


def policies_axis(axes: Axes, names: Sequence[str]) -> None:
    """Policies from top to bottom."""
    axes.set_yticks(range(len(names)), labels=list(names))
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def write(made: Figure, folder: Path, name: str) -> list[Path]:
    """The figure as PNG and SVG, the same bytes for the same figure.

    Raises:
        UsageError: the folder cannot be written.
    """
    files = [folder / f"{name}.png", folder / f"{name}.svg"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _styled():
            made.savefig(files[0], dpi=100, metadata={"Software": "kvnet simulations"})
            made.savefig(files[1], metadata={"Date": None, "Creator": "kvnet simulations"})
    except OSError as error:
        raise UsageError(f"{folder}: expected a folder that can be written, found: {error}") from error
    return files
