"""From which link on fetching pays: maps over links, chips and models, from the node's own arithmetic of costs.

Each cell compares two ways to the first token of a prompt whose beginning somebody else has: to fetch and restore that
beginning from one peer at the link's payload rate, or to compute it. Nothing is simulated.
"""

import math
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from kvnet.format.codecs import Codec
from kvnet.protocol.cost import break_even_bytes_s
from kvnet.protocol.ids import PeerId
from kvnet.protocol.speeds import Link, Machine
from simulations.charts import head, write
from simulations.chips import CHIPS, DECODE_BYTES_S, LINKS, MODELS, STORED_SHARE, LinkKind, Model, machine
from simulations.rendering import size

PREFIX_TOKENS: Final = 8192
"""Of the beginning that is fetched or computed."""
LINKS_SHOWN: Final = ("wan", "wifi", "1gbe", "2.5gbe", "10gbe", "thunderbolt")
CHIPS_SHOWN: Final = ("m1", "m2", "m4", "m4-pro", "m4-max", "m5", "m5-max")
MODELS_SHOWN: Final = ("qwen3-0.6b", "llama-3.2-3b", "qwen2.5-coder-7b", "qwen3-8b", "qwen3-30b-a3b", "llama-3.3-70b")
_PEER: Final = PeerId(b"peer")
_MOST: Final = 4.0
"""The colours end at so many doublings."""


def gain(computing: Machine, model: Model, kind: LinkKind, codec: Codec, n_tokens: int = PREFIX_TOKENS) -> float:
    """How many times sooner a beginning is there when it is fetched; below 1, computing is sooner.

    Args:
        computing: what the machine does with the model.
        model: whose K/V it is.
        kind: the link of both machines.
        codec: in which it travels.
        n_tokens: of the beginning.
    """
    raw_bytes = n_tokens * model.kv_bytes_per_token
    decode_bytes_s = math.inf if codec is Codec.RAW else DECODE_BYTES_S[codec]
    rate = min(kind.up_bytes_s, kind.down_bytes_s)
    link = Link(_PEER, kind.rtt_s, rate, decode_bytes_s)
    fetched_s = link.seconds(round(raw_bytes * STORED_SHARE[codec]), raw_bytes) + computing.restore_s(raw_bytes)
    return computing.prefill.seconds(0, n_tokens) / fetched_s


def draw(folder: Path) -> list[Path]:
    """All maps, as PNG and SVG.

    Raises:
        UsageError: the folder cannot be written.
    """
    files = [file for codec in (Codec.RAW, Codec.Q8) for file in write(_gains(codec), folder, f"gain_{codec.value}")]
    return files + write(_rates(), folder, "break_even")


def _gains(codec: Codec) -> Figure:
    made = Figure(figsize=(12, 7.5), layout="constrained")
    grid = made.subplots(2, 3, sharex=True, sharey=True)
    wins = total = 0
    for axes, name in zip(grid.flat, MODELS_SHOWN, strict=True):
        model = MODELS[name]
        gains = np.array(
            [
                [gain(machine(CHIPS[chip], model), model, LINKS[link], codec) for link in LINKS_SHOWN]
                for chip in CHIPS_SHOWN
            ]
        )
        wins, total = wins + int((gains > 1).sum()), total + gains.size
        axes.imshow(np.log2(gains), cmap="PuOr", norm=TwoSlopeNorm(0, -_MOST, _MOST), aspect="auto")
        for (row, column), value in np.ndenumerate(gains):
            colour = "white" if abs(math.log2(value)) > _MOST * 0.55 else "black"
            axes.text(column, row, _times(value), ha="center", va="center", fontsize=8, color=colour)
        axes.set_title(f"{name}, {model.kv_bytes_per_token / 1000:.0f} kB a token", fontsize=10, loc="left")
        axes.set_xticks(range(len(LINKS_SHOWN)), labels=LINKS_SHOWN, rotation=30, ha="right", fontsize=8)
        axes.set_yticks(range(len(CHIPS_SHOWN)), labels=CHIPS_SHOWN, fontsize=8)
    for axes in grid[-1]:
        axes.set_xlabel("link of both machines")
    for axes in grid[:, 0]:
        axes.set_ylabel("chip that asks")
    head(
        made,
        f"Fetching {PREFIX_TOKENS:,} tokens is sooner than computing them in {wins} of {total} cases",
        f"How many times sooner; purple: fetch, orange: compute. Codec {codec.value}, one peer at the link's full "
        "payload rate, nothing else to do; chips, models and links as in simulations/chips.py.",
    )
    return made


def _times(value: float) -> str:
    if value < 0.1:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def _rates() -> Figure:
    made = Figure(figsize=(10, 5.5), layout="constrained")
    axes = made.subplots()
    needed = {}
    # Light to dark as chips get faster; told apart without red and green.
    shades = colormaps["viridis_r"](np.linspace(0, 1, len(CHIPS_SHOWN)))
    for place, chip in enumerate(CHIPS_SHOWN):
        rates = []
        for name in MODELS_SHOWN:
            model = MODELS[name]
            computing = machine(CHIPS[chip], model)
            raw = model.kv_bytes_per_token
            rates.append(break_even_bytes_s(computing, raw, 0, raw_bytes_per_token=raw) / 1e6)
        needed[chip] = rates
        heights = [rate if math.isfinite(rate) else np.nan for rate in rates]
        offset = (place - (len(CHIPS_SHOWN) - 1) / 2) * 0.11
        axes.bar(np.arange(len(rates)) + offset, heights, width=0.1, label=chip, color=shades[place])
    for name in LINKS_SHOWN:
        kind = LINKS[name]
        rate = min(kind.up_bytes_s, kind.down_bytes_s) / 1e6
        axes.axhline(rate, color="#555555", linewidth=0.8, linestyle="--")
        axes.text(len(MODELS_SHOWN) - 0.45, rate, f"{name}, {size(rate * 1e6)}/s", va="center", fontsize=8)
    axes.set_yscale("log")
    axes.set_yticks([1, 10, 100, 1_000, 10_000], labels=["1 MB/s", "10 MB/s", "100 MB/s", "1 GB/s", "10 GB/s"])
    axes.set_xlim(-0.5, len(MODELS_SHOWN) - 0.45)
    axes.set_xticks(range(len(MODELS_SHOWN)), labels=MODELS_SHOWN)
    axes.set_ylabel("link from which fetching pays (logarithmic)")
    axes.set_xlabel("model")
    axes.legend(title="chip that asks", fontsize=8, ncols=len(CHIPS_SHOWN), loc="upper left", frameon=False)
    axes.set_ylim(1, 1e5)
    wifi = LINKS["wifi"].down_bytes_s / 1e6
    pays = sum(rate <= wifi for rates in needed.values() for rate in rates)
    total = sum(len(rates) for rates in needed.values())
    head(
        made,
        f"A quiet Wi-Fi is fast enough for {pays} of {total} pairs of chip and model; the faster the chip and the "
        "larger the K/V of a token, the faster the link must be",
        "Codec raw, first tokens of a prompt; restoring is counted, round trips are not. No bar: restoring alone takes "
        "longer than computing. From kvnet.protocol.cost.break_even_bytes_s.",
    )
    return made
