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

KNOWN_COLOURS: Final = {"none": "#8c8c8c", "own": "#3b75af", "swarm": "#2f8f4e", "central": "#c9a227"}
OTHER_COLOURS: Final = ("#8a4fa3", "#c8553d", "#3aa6a6", "#7a5c3e", "#d17ab0", "#5b6abf", "#98a23b", "#444444")
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
