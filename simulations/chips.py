"""What machines, models and links do: the constants of every scenario, each with its source.

Nothing here was measured on a Mac by us. The figures are right within a third at best, which is why a scenario can take
a machine's own calibration (`kvnet bench calibrate`) instead, and why break-even maps vary them.

**Prefill.** Reading a prompt is bound by arithmetic: two operations for each active parameter and token, and for
attention four for each layer, token before it and element of the query. What a chip does of it a second is its
*effective rate*. Two chips are taken from public results of llama.cpp with Llama 3.1 8B in Q4_K_M, 512 tokens of prompt
(the list `brand-o/normiebench` on GitHub, 2026-03): M1 Max 499.6 tokens/s, M4 224.8 tokens/s, which at 8.03 billion
parameters are 8.0 and 3.6 TFLOP/s, in both cases 0.77 of what the GPU's cores could do (cores x 128 units x 2 x clock).
The others are that share of their own cores. M5 has matrix units in its GPU: Apple's machine learning research tells of
3.3 to 4.1 times the M4's time to first token with MLX (2025-11); four times is taken for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from kvnet.engine.sizing import (
    CODEC_PERMILLE,
    ETHERNET_1G_BYTES_PER_S,
    ETHERNET_10G_BYTES_PER_S,
    THUNDERBOLT_BYTES_PER_S,
    WIFI_BYTES_PER_S,
)
from kvnet.errors import ConfigError
from kvnet.format.codecs import Codec
from kvnet.protocol.speeds import Machine, PrefillSpeed, SpeedPoint

T = TypeVar("T")

GPU_SHARE: Final = 0.77
"""Effective rate by what the cores could do; see the module."""
FAR_TOKENS: Final = 131_072
"""Seconds a token grow evenly with the position, so that two points say all; this is the second."""


BITS_PER_PARAMETER: Final = 4.5
"""Weights in 4 bits, with their scales."""
RESTORE_FIXED_S: Final = 0.01
"""Seconds of any restore; an assumption."""


@dataclass(frozen=True, slots=True)
class Chip:
    """One kind of machine.

    Attributes:
        name: as it is written in scenarios.
        effective_flops_s: operations a second that prefill gets.
        memory_bytes_s: of memory; each answered token reads the weights once. Apple's specifications.
        restore_bytes_s: K/V bytes a second from disk, hashed, into the model's caches. An assumption: half of what
            the SSD of that class reads (about 3 GB/s without Pro or Max, 6 GB/s with).
    """

    name: str
    effective_flops_s: float
    memory_bytes_s: float
    restore_bytes_s: float


@dataclass(frozen=True, slots=True)
class Model:
    """What matters of a model; from its published configuration.

    Attributes:
        name: as it is written in scenarios.
        active_params: parameters that a token passes through.
        weights_bytes: in memory, at 4.5 bits a parameter.
        layers: with attention.
        query_width: query heads times their dimension.
        kv_bytes_per_token: K and V of all layers in half precision.
    """

    name: str
    active_params: float
    weights_bytes: float
    layers: int
    query_width: int
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class LinkKind:
    """How a machine is connected.

    Attributes:
        name: as it is written in scenarios.
        up_bytes_s, down_bytes_s: payload that leaves and reaches the machine a second.
        rtt_s: its part of a round trip: two machines have the mean of theirs, added to what lies between their sites.
    """

    name: str
    up_bytes_s: float
    down_bytes_s: float
    rtt_s: float


def _by_cores(name: str, cores: int, clock_ghz: float, memory_gb_s: float, restore_gb_s: float) -> Chip:
    flops_s = GPU_SHARE * cores * 128 * 2 * clock_ghz * 1e9
    return Chip(name, flops_s, memory_gb_s * 1e9, restore_gb_s * 1e9)


def _llama_like(name: str, active: float, total: float, layers: int, query_width: int, kv_heads: int) -> Model:
    return Model(name, active, total * BITS_PER_PARAMETER / 8, layers, query_width, layers * kv_heads * 128 * 2 * 2)


_M4 = Chip("m4", 3.61e12, 120e9, 1.5e9)

CHIPS: Final[Mapping[str, Chip]] = {
    chip.name: chip
    for chip in (
        # GPU cores and clocks: Apple's specifications and public measurements of the clock.
        _by_cores("m1", 8, 1.278, 68, 1.5),
        _by_cores("m1-pro", 16, 1.296, 200, 3.0),
        Chip("m1-max", 8.02e12, 400e9, 3.0e9),
        _by_cores("m2", 10, 1.398, 100, 1.5),
        _by_cores("m2-max", 38, 1.398, 400, 3.0),
        _by_cores("m3", 10, 1.6, 100, 1.5),
        _by_cores("m3-max", 40, 1.6, 400, 3.0),
        _M4,
        _by_cores("m4-pro", 20, 1.8, 273, 3.0),
        _by_cores("m4-max", 40, 1.8, 546, 3.0),
        Chip("m5", 4 * _M4.effective_flops_s, 153e9, 3.0e9),
        # As many times the M5 as it has GPU cores; nobody was found who measured it.
        Chip("m5-max", 16 * _M4.effective_flops_s, 614e9, 3.0e9),
    )
}

MODELS: Final[Mapping[str, Model]] = {
    model.name: model
    for model in (
        Model("smollm2-135m", 0.135e9, 0.27e9, 30, 576, 23_040),
        _llama_like("qwen3-0.6b", 0.6e9, 0.6e9, 28, 2048, 8),
        _llama_like("llama-3.2-3b", 3.21e9, 3.21e9, 28, 3072, 8),
        _llama_like("qwen2.5-coder-7b", 7.6e9, 7.6e9, 28, 3584, 4),
        _llama_like("qwen3-8b", 8.2e9, 8.2e9, 36, 4096, 8),
        _llama_like("llama-3.1-8b", 8.03e9, 8.03e9, 32, 4096, 8),
        _llama_like("qwen3-30b-a3b", 3.3e9, 30.5e9, 48, 4096, 4),
        _llama_like("llama-3.3-70b", 70.6e9, 70.6e9, 80, 8192, 8),
    )
}

# Payload rates are those of `kvnet size`. Round trips are of quiet links: an assumption for Wi-Fi and Thunderbolt, a
# few switch hops for Ethernet.
LINKS: Final[Mapping[str, LinkKind]] = {
    link.name: link
    for link in (
        LinkKind("wifi", WIFI_BYTES_PER_S, WIFI_BYTES_PER_S, 0.004),
        LinkKind("1gbe", ETHERNET_1G_BYTES_PER_S, ETHERNET_1G_BYTES_PER_S, 0.0005),
        LinkKind("2.5gbe", 2.5 * ETHERNET_1G_BYTES_PER_S, 2.5 * ETHERNET_1G_BYTES_PER_S, 0.0005),
        LinkKind("10gbe", ETHERNET_10G_BYTES_PER_S, ETHERNET_10G_BYTES_PER_S, 0.0003),
        LinkKind("thunderbolt", THUNDERBOLT_BYTES_PER_S, THUNDERBOLT_BYTES_PER_S, 0.0003),
        # A home behind a provider: 40 Mbit/s up, 250 Mbit/s down, 20 ms. An assumption.
        LinkKind("wan", 5e6, 31.25e6, 0.020),
    )
}

STORED_SHARE: Final[Mapping[Codec, float]] = {
    codec: CODEC_PERMILLE[codec.value]["float16"] / 1000 for codec in Codec if codec.value in CODEC_PERMILLE
}
"""Stored bytes by raw bytes, of K/V in half precision; measured, see `kvnet.engine.sizing`."""

DECODE_BYTES_S: Final[Mapping[Codec, float]] = {Codec.SHUFFLE_ZSTD1: 323e6, Codec.Q8: 410e6}
"""Raw bytes decoded a second by one core of an AMD EPYC, measured (docs/performance.md); a Mac's core is rather
faster."""


def chip(name: str) -> Chip:
    """A chip by its name.

    Raises:
        ConfigError: nobody knows it.
    """
    return _named("chip", CHIPS, name)


def model(name: str) -> Model:
    """A model by its name.

    Raises:
        ConfigError: nobody knows it.
    """
    return _named("model", MODELS, name)


def link(name: str) -> LinkKind:
    """A kind of link by its name.

    Raises:
        ConfigError: nobody knows it.
    """
    return _named("link", LINKS, name)


def machine(chip: Chip, model: Model) -> Machine:
    """What a chip does with a model, for planning: the same value that a node's calibration gives."""
    linear = 2 * model.active_params
    per_position = 4 * model.layers * model.query_width
    points = [
        SpeedPoint(position, chip.effective_flops_s / (linear + per_position * position))
        for position in (0, FAR_TOKENS)
    ]
    return Machine(PrefillSpeed(points), chip.restore_bytes_s, RESTORE_FIXED_S, DECODE_BYTES_S)


def answer_tokens_s(chip: Chip, model: Model) -> float:
    """Tokens answered a second: each reads the active weights once, at 0.7 of the memory's rate.

    The M4 above did more, 20.9 tokens/s of Llama 3.1 8B in Q4_K_M, 4.9 GB, or 0.85 of 120 GB/s; less is taken for
    longer contexts.
    """
    return 0.7 * chip.memory_bytes_s / (model.active_params * BITS_PER_PARAMETER / 8)


def _named(kind: str, table: Mapping[str, T], name: str) -> T:
    if name not in table:
        raise ConfigError(f"unknown {kind} {name!r}", hint=f"known are {', '.join(table)}")
    return table[name]
