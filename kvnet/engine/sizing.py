"""How many bytes of K/V a model needs: the arithmetic behind ``kvnet size``, from ``config.json`` alone."""

from dataclasses import dataclass
from typing import Any

from kvnet.engine.layer_sizes import (
    DTYPE_SIZE_BYTES,
    Config,
    LayerSize,
    kv_dtype,
    layer_sizes,
    model_type,
    window_tokens,
)
from kvnet.errors import UsageError

# --- assumed payload rates ------------------------------------------------------------------------------------

# 802.11ax, two streams of 80 MHz: 1,201 Mbit/s on the air (IEEE 802.11ax rate table); about half of it arrives as
# TCP payload in a quiet room. An assumption: real rooms vary by a factor of ten.
WIFI_BYTES_PER_S = 75_000_000
# A 1,500-byte MTU carries 1,448 bytes of TCP payload (with timestamps) in 1,538 bytes on the wire (IEEE 802.3).
ETHERNET_1G_BYTES_PER_S = 125_000_000 * 1448 // 1538
ETHERNET_10G_BYTES_PER_S = 1_250_000_000 * 1448 // 1538
# IP over Thunderbolt 3 and 4 runs on the 22 Gbit/s left for PCIe; about 18 Gbit/s arrive as payload. An assumption.
THUNDERBOLT_BYTES_PER_S = 2_250_000_000

# As a table shows them.
LINKS: tuple[tuple[str, int], ...] = (
    ("Wi-Fi", WIFI_BYTES_PER_S),
    ("1 GbE", ETHERNET_1G_BYTES_PER_S),
    ("10 GbE", ETHERNET_10G_BYTES_PER_S),
    ("Thunderbolt", THUNDERBOLT_BYTES_PER_S),
)

# --- sizes ----------------------------------------------------------------------------------------------------

# As in kvnet.format.prefix.
TOKEN_ID_SIZE_BYTES = 4
# Shown where no number is asked for.
DEFAULT_TOKEN_COUNTS = (8_000, 32_000, 128_000)
_MAX_TOKENS = 1 << 32
_MAX_USERS = 1 << 20

# Stored size per 1,000 bytes of K/V, measured on 1,024 tokens of English prose through SmolLM2-135M: the byte-shuffled
# planes of bfloat16 compress to 68 %, of float16 to 85 %, of float32 to 84 %. An estimate for any other text.
# q8 makes 68 bytes of 64 elements, whatever they are, where 64 divides the rows.
CODEC_PERMILLE: dict[str, dict[str, int]] = {
    "raw": {"float32": 1000, "float16": 1000, "bfloat16": 1000},
    "shuffle+zstd-1": {"float32": 840, "float16": 851, "bfloat16": 682},
    "q8": {"float32": 266, "float16": 532, "bfloat16": 532},
}


@dataclass(frozen=True, slots=True)
class LinkTime:
    """How long ``disk_bytes`` take over one kind of link, in whole milliseconds, rounded up."""

    link: str
    rate_bytes_per_s: int
    milliseconds: int


@dataclass(frozen=True, slots=True)
class SizeRow:
    """Sizes for one token count, all users together, in bytes."""

    n_tokens: int
    kv_bytes: int
    ram_bytes: int
    disk_bytes: int
    links: tuple[LinkTime, ...]


@dataclass(frozen=True, slots=True)
class SizeReport:
    """What ``kvnet size`` prints: the formula spelled out, and one row a token count.

    ``bytes_per_token`` counts every layer, which is what a token costs until the smallest window is full;
    ``bytes_per_token_beyond_window`` counts only the layers that keep growing.
    """

    model: str
    model_type: str
    dtype: str
    dtype_assumed: bool
    layers: tuple[LayerSize, ...]
    bytes_per_token: int
    bytes_per_token_beyond_window: int
    window_tokens: int | None
    users: int
    codec: str
    codec_permille: int
    formula: str
    rows: tuple[SizeRow, ...]

    def as_json(self) -> dict[str, Any]:
        """The report as one JSON object of exact integers and texts."""
        return {
            "type": "size",
            "model": self.model,
            "model_type": self.model_type,
            "dtype": self.dtype,
            "dtype_assumed": self.dtype_assumed,
            "bytes_per_token": self.bytes_per_token,
            "bytes_per_token_beyond_window": self.bytes_per_token_beyond_window,
            "window_tokens": self.window_tokens,
            "users": self.users,
            "codec": self.codec,
            "codec_permille": self.codec_permille,
            "formula": self.formula,
            "layers": [
                {
                    "kind": layer.kind, "n_layers": layer.n_layers, "heads": layer.heads, "k_dim": layer.k_dim,
                    "v_dim": layer.v_dim, "window_tokens": layer.window_tokens, "latent": layer.latent,
                }
                for layer in self.layers
            ],
            "rows": [
                {
                    "n_tokens": row.n_tokens, "kv_bytes": row.kv_bytes, "ram_bytes": row.ram_bytes,
                    "disk_bytes": row.disk_bytes,
                    "links": [
                        {"link": t.link, "rate_bytes_per_s": t.rate_bytes_per_s, "milliseconds": t.milliseconds}
                        for t in row.links
                    ],
                }
                for row in self.rows
            ],
        }  # fmt: skip

    def lines(self) -> list[str]:
        """The report for people, one line each."""
        source = " (assumed: the config names none)" if self.dtype_assumed else ""
        users = f" for {self.users:,} users" if self.users > 1 else ""
        estimate = "" if self.codec_permille == 1000 else f", about {self.codec_permille / 10:.1f} % of the K/V"
        lines = [
            f"{self.model} ({self.model_type}): {self.bytes_per_token:,} bytes of K/V per token, {self.dtype}{source}",
            f"  {self.formula}",
            f"  stored with {self.codec}{estimate}, and {TOKEN_ID_SIZE_BYTES} bytes a token id",
        ]
        for row in self.rows:
            times = ", ".join(f"{t.link} {_seconds(t.milliseconds)}" for t in row.links)
            lines.append(
                f"  {row.n_tokens:,} tokens{users}: RAM {_size(row.ram_bytes)}, disk {_size(row.disk_bytes)}; {times}"
            )
        links = ", ".join(f"{name} {rate / 1e6:,.0f} MB/s" for name, rate in LINKS)
        lines.append(f"  payload rates assumed: {links}")
        if self.window_tokens is not None and (over := [r for r in self.rows if r.n_tokens > self.window_tokens]):
            lines.append(f"  {over[0].n_tokens:,} tokens are more than the model's window of {self.window_tokens:,}")
        return lines


def size_report(
    config: Config, *, model: str, n_tokens: int | None = None, users: int = 1, codec: str = "raw"
) -> SizeReport:
    """Compute the sizes of a model's K/V.

    Args:
        config: the decoded ``config.json``.
        model: the name to print.
        n_tokens: tokens of one user; None gives 8,000, 32,000 and 128,000.
        users: users with a context of their own each; multiplies RAM, disk and seconds.
        codec: ``raw``, ``shuffle+zstd-1`` or ``q8``.

    Raises:
        UsageError: a count out of range, or an unknown codec.
        CompatibilityError: a model type whose caches are not known here.
        MalformedError: a config without the fields its type needs.
    """
    _check_count("--tokens", n_tokens if n_tokens is not None else 1, _MAX_TOKENS)
    _check_count("--users", users, _MAX_USERS)
    if codec not in CODEC_PERMILLE:
        raise UsageError(f"expected a codec of {', '.join(CODEC_PERMILLE)}, found {codec!r}")
    layers = layer_sizes(config)
    dtype, assumed = kv_dtype(config)
    itemsize = DTYPE_SIZE_BYTES[dtype]
    permille = CODEC_PERMILLE[codec][dtype]
    counts = DEFAULT_TOKEN_COUNTS if n_tokens is None else (n_tokens,)
    return SizeReport(
        model=model,
        model_type=model_type(config),
        dtype=dtype,
        dtype_assumed=assumed,
        layers=layers,
        bytes_per_token=itemsize * sum(layer.values_per_token for layer in layers),
        bytes_per_token_beyond_window=itemsize * sum(x.values_per_token for x in layers if x.kind == "full"),
        window_tokens=window_tokens(config),
        users=users,
        codec=codec,
        codec_permille=permille,
        formula=_formula(layers, dtype, itemsize),
        rows=tuple(_row(layers, itemsize, count, users, permille) for count in counts),
    )


# --- the arithmetic -------------------------------------------------------------------------------------------


def _check_count(flag: str, value: int, maximum: int) -> None:
    if not 1 <= value <= maximum:
        raise UsageError(f"expected {flag} from 1 to {maximum:,}, found {value:,}")


def _row(layers: tuple[LayerSize, ...], itemsize: int, n_tokens: int, users: int, permille: int) -> SizeRow:
    one = itemsize * sum(layer.values_per_token * layer.cached_tokens(n_tokens) for layer in layers)
    stored = -(-one * permille // 1000) + TOKEN_ID_SIZE_BYTES * n_tokens
    disk = users * stored
    links = tuple(LinkTime(name, rate, -(-disk * 1000 // rate)) for name, rate in LINKS)
    return SizeRow(n_tokens=n_tokens, kv_bytes=users * one, ram_bytes=users * one, disk_bytes=disk, links=links)


def _formula(layers: tuple[LayerSize, ...], dtype: str, itemsize: int) -> str:
    parts = []
    for layer in layers:
        # The familiar form where keys and values have one width.
        dims = f"{layer.k_dim} × 2 (K and V)" if layer.k_dim == layer.v_dim else f"({layer.k_dim} + {layer.v_dim})"
        heads = f"{layer.heads} K/V head{'' if layer.heads == 1 else 's'}" if not layer.latent else "1 latent"
        kind = f" window layers (last {layer.window_tokens:,} tokens)" if layer.kind == "window" else " layers"
        value = layer.values_per_token * itemsize
        parts.append(
            f"{layer.n_layers}{kind} × {heads} × {dims} × {itemsize} bytes ({dtype}) = {value:,} bytes per token"
        )
    return "; ".join(parts)


def _size(n_bytes: int) -> str:
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.3g} {unit}" if n_bytes < 1000 * factor else f"{n_bytes / factor:,.0f} {unit}"
    return f"{n_bytes} B"


def _seconds(milliseconds: int) -> str:
    seconds = milliseconds / 1000
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:,.0f} s"
