"""How many bytes of K/V a model needs, computed from its ``config.json`` alone.

The rules follow what mlx-lm's own model code puts into its caches (0.32), not what papers say a cache could hold:
DeepSeek V3 caches the latent, DeepSeek V2 the expanded heads, Gemma 2 keeps whole-length caches in every layer.
A model type that is not listed here is refused, never guessed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvnet.errors import CompatibilityError, MalformedError, UsageError

Config = Mapping[str, Any]

# --- assumed payload rates ------------------------------------------------------------------------------------

# 802.11ax, two streams of 80 MHz: 1,201 Mbit/s on the air (IEEE 802.11ax rate table); about half of it arrives as
# TCP payload in a quiet room. An assumption: real rooms vary by a factor of ten.
WIFI_BYTES_PER_S = 75_000_000
# A 1,500-byte MTU carries 1,448 bytes of TCP payload (with timestamps) in 1,538 bytes on the wire (IEEE 802.3).
ETHERNET_1G_BYTES_PER_S = 125_000_000 * 1448 // 1538
ETHERNET_10G_BYTES_PER_S = 1_250_000_000 * 1448 // 1538
# IP over Thunderbolt 3 and 4 runs on the 22 Gbit/s left for PCIe; about 18 Gbit/s arrive as payload. An assumption.
THUNDERBOLT_BYTES_PER_S = 2_250_000_000

LINKS: tuple[tuple[str, int], ...] = (
    ("Wi-Fi", WIFI_BYTES_PER_S),
    ("1 GbE", ETHERNET_1G_BYTES_PER_S),
    ("10 GbE", ETHERNET_10G_BYTES_PER_S),
    ("Thunderbolt", THUNDERBOLT_BYTES_PER_S),
)

# --- sizes ----------------------------------------------------------------------------------------------------

TOKEN_ID_SIZE_BYTES = 4
DEFAULT_TOKEN_COUNTS = (8_000, 32_000, 128_000)
_MAX_TOKENS = 1 << 32
_MAX_USERS = 1 << 20
_MAX_FIELD = 1 << 31

DTYPE_SIZE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# What mlx-lm's published conversions use when the config does not say.
DEFAULT_DTYPE = "bfloat16"

# Stored size per 1,000 bytes of K/V, measured on 1,024 tokens of English prose through SmolLM2-135M: the byte-shuffled
# planes of bfloat16 compress to 68 %, of float16 to 85 %, of float32 to 84 %. An estimate for any other text.
CODEC_PERMILLE: dict[str, dict[str, int]] = {
    "raw": {"float32": 1000, "float16": 1000, "bfloat16": 1000},
    "shuffle+zstd-1": {"float32": 840, "float16": 851, "bfloat16": 682},
}


@dataclass(frozen=True, slots=True)
class LayerSize:
    """Layers that cache alike.

    Attributes:
        kind: ``full`` (every token) or ``window`` (the last ``window_tokens`` tokens).
        n_layers: how many layers of this kind.
        heads: cached heads a layer.
        k_dim: values a token and head in the keys.
        v_dim: values a token and head in the values; for latent attention the rotary part, not a value at all.
        window_tokens: 0 for ``full``.
        latent: whether ``k_dim`` is a compressed latent that all heads share.
    """

    kind: str
    n_layers: int
    heads: int
    k_dim: int
    v_dim: int
    window_tokens: int = 0
    latent: bool = False

    @property
    def values_per_token(self) -> int:
        """Numbers all these layers add for one token."""
        return self.n_layers * self.heads * (self.k_dim + self.v_dim)

    def cached_tokens(self, n_tokens: int) -> int:
        """How many of ``n_tokens`` tokens these layers hold."""
        return min(n_tokens, self.window_tokens) if self.kind == "window" else n_tokens

    def text(self) -> str:
        """The kind in words, such as ``36 layers x 8 K/V heads x (128 + 128)``."""
        heads = "latent" if self.latent else "K/V head" if self.heads == 1 else "K/V heads"
        window = f", window of {self.window_tokens:,} tokens" if self.kind == "window" else ""
        return f"{self.n_layers} layers × {self.heads} {heads} × ({self.k_dim} + {self.v_dim}){window}"


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
        codec: ``raw`` or ``shuffle+zstd-1``.

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


def kv_bytes_per_token(config: Config, *, dtype: str | None = None) -> int:
    """Bytes of K/V one token adds while no window is full yet.

    Args:
        config: the decoded ``config.json``.
        dtype: of the activations, when it is known better than the config says.

    Raises:
        CompatibilityError: a model type whose caches are not known here.
        MalformedError: a config without the fields its type needs.
    """
    itemsize = DTYPE_SIZE_BYTES[dtype or kv_dtype(config)[0]]
    return itemsize * sum(layer.values_per_token for layer in layer_sizes(config))


def model_type(config: Config) -> str:
    """The model type, in the name mlx-lm files its code under.

    Raises:
        MalformedError: no ``model_type``.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or not name:
        raise MalformedError("expected a model_type in config.json, found none")
    return _RENAMED.get(name, name)


def kv_dtype(config: Config) -> tuple[str, bool]:
    """The dtype K/V are computed in, and whether it had to be assumed.

    A quantised model computes in the dtype of its scales, which is the one the config names: the bits of the
    weights play no part in the size of K/V.
    """
    for place in (config, _text_config(config)):
        for key in ("torch_dtype", "dtype"):
            name = place.get(key)
            if isinstance(name, str) and name.removeprefix("torch.") in DTYPE_SIZE_BYTES:
                return name.removeprefix("torch."), False
    return DEFAULT_DTYPE, True


def window_tokens(config: Config) -> int | None:
    """The longest prompt the model was made for, in tokens; None when the config does not say."""
    for place in (_text_config(config), config):
        for key in ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "seq_length"):
            value = place.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _MAX_FIELD:
                return value
    return None


def layer_sizes(config: Config) -> tuple[LayerSize, ...]:
    """What every layer caches, layers of one kind together.

    Raises:
        CompatibilityError: a model type whose caches are not known here, with the reason.
        MalformedError: a config without the fields its type needs.
    """
    name = model_type(config)
    if (reason := _other_reason(name)) is not None:
        raise CompatibilityError(f"{name} keeps {reason}: its size is not a number of bytes per token")
    rule = _RULES.get(name)
    if rule is None:
        raise CompatibilityError(
            f"expected a model type whose caches are known, found {name!r}",
            hint="load the model once: the engine reports what its layers cache",
        )
    return rule(_text_config(config))


def shareable(config: Config) -> tuple[bool | None, str]:
    """Whether K/V of this model can be an artifact: True, or False or None (decided when loaded) with the reason."""
    name = model_type(config)
    if (reason := _other_reason(name)) is not None:
        return False, f"{name} keeps {reason}"
    if name not in _RULES:
        return None, f"model type {name!r} is decided when loaded"
    layers = layer_sizes(config)
    if windows := [layer for layer in layers if layer.kind == "window"]:
        n_window, n_all = sum(layer.n_layers for layer in windows), sum(layer.n_layers for layer in layers)
        return False, f"{n_window} of {n_all} layers keep a sliding window of {windows[0].window_tokens:,} tokens"
    return True, ""


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


# --- the rules ------------------------------------------------------------------------------------------------


def _text_config(config: Config) -> Config:
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def _field(config: Config, *names: str, default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _MAX_FIELD:
            raise MalformedError(f"expected {name} in config.json to be a positive integer, found {value!r}")
        return value
    if default is None:
        raise MalformedError(f"expected {names[0]} in config.json, found none")
    return default


def _grouped(config: Config) -> tuple[int, int, int]:
    """Layers, K/V heads and head width of grouped-query attention; older names of the same fields included."""
    n_layers = _field(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    heads = _field(config, "num_attention_heads", "n_head", "n_heads")
    kv_heads = _field(config, "num_key_value_heads", "n_kv_heads", default=heads)
    head_dim = config.get("head_dim")
    if head_dim is None:
        hidden = _field(config, "hidden_size", "n_embd", "d_model", "dim")
        if hidden % heads:
            raise MalformedError(f"expected hidden_size to be a multiple of {heads} heads, found {hidden}")
        return n_layers, kv_heads, hidden // heads
    return n_layers, kv_heads, _field(config, "head_dim")


def _full(config: Config) -> tuple[LayerSize, ...]:
    n_layers, heads, dim = _grouped(config)
    return (LayerSize("full", n_layers, heads, dim, dim),)


def _every_head(config: Config) -> tuple[LayerSize, ...]:
    """Older code without grouped queries: every head is cached, whatever the config says of K/V heads."""
    return _full({**config, "num_key_value_heads": None})


def _multi_query(config: Config) -> tuple[LayerSize, ...]:
    n_layers, heads, dim = _grouped(config)
    heads = 1 if config.get("multi_query", True) else heads
    return (LayerSize("full", n_layers, heads, dim, dim),)


def _latent(config: Config) -> tuple[LayerSize, ...]:
    """Multi-head latent attention as mlx-lm caches it: one latent and one rotary part that all heads share."""
    return (
        LayerSize(
            "full", _field(config, "num_hidden_layers"), 1, _field(config, "kv_lora_rank", default=512),
            _field(config, "qk_rope_head_dim", default=64), latent=True,
        ),
    )  # fmt: skip


def _expanded(config: Config) -> tuple[LayerSize, ...]:
    """Latent attention whose code caches the expanded heads: keys and values of different width."""
    heads = _field(config, "num_attention_heads")
    k_dim = _field(config, "qk_nope_head_dim", default=128) + _field(config, "qk_rope_head_dim", default=64)
    v_dim = _field(config, "v_head_dim", default=128)
    return (LayerSize("full", _field(config, "num_hidden_layers"), heads, k_dim, v_dim),)


def _mixed(config: Config, kinds: list[bool], window: int) -> tuple[LayerSize, ...]:
    """Layers of one shape, ``kinds`` saying of each whether it keeps a window only."""
    _, heads, dim = _grouped(config)
    n_window, n_full = sum(kinds), len(kinds) - sum(kinds)
    full = LayerSize("full", n_full, heads, dim, dim)
    windowed = LayerSize("window", n_window, heads, dim, dim, window_tokens=window)
    return tuple(layer for layer in (full, windowed) if layer.n_layers)


def _every_nth_full(period: int, defaults: Mapping[str, int]) -> "_Rule":
    """Layer i keeps the whole length when it ends a run of ``sliding_window_pattern`` layers."""

    def rule(config: Config) -> tuple[LayerSize, ...]:
        config = {**defaults, **{key: value for key, value in config.items() if value is not None}}
        every = _field(config, "sliding_window_pattern", default=period)
        kinds = [i % every != every - 1 for i in range(_field(config, "num_hidden_layers"))]
        return _mixed(config, kinds, _field(config, "sliding_window"))

    return rule


def _by_layer_types(default_kinds: Callable[[int], list[bool]]) -> "_Rule":
    """Every layer named in ``layer_types``; ``default_kinds`` where the config leaves it out."""

    def rule(config: Config) -> tuple[LayerSize, ...]:
        n_layers = _grouped(config)[0]
        types = config.get("layer_types")
        if types is None:
            kinds = default_kinds(n_layers)
        elif isinstance(types, list) and len(types) == n_layers:
            kinds = [_is_window(name) for name in types]
        else:
            raise MalformedError(f"expected layer_types in config.json to list {n_layers} layers, found {types!r:.80}")
        return _mixed(config, kinds, _field(config, "sliding_window") if any(kinds) else 0)

    return rule


def _is_window(name: object) -> bool:
    if name not in ("full_attention", "sliding_attention"):
        raise CompatibilityError(f"expected layers of full_attention or sliding_attention, found {name!r}")
    return name == "sliding_attention"


def _nested_mistral(config: Config) -> tuple[LayerSize, ...]:
    name = config.get("model_type", "llama")
    rules: dict[object, _Rule] = {"ministral3": _all_full_by_default, "mistral4": _latent}
    return rules.get(name, _all_full_by_default)(config)


_Rule = Callable[[Config], tuple[LayerSize, ...]]

_all_full_by_default = _by_layer_types(lambda n: [False] * n)

# Names that mlx-lm loads with the code of another model type.
_RENAMED = {
    "mistral": "llama",
    "iquestcoder": "llama",
    "xverse": "llama",
    "kimi_k2": "deepseek_v3",
    "joyai_llm_flash": "deepseek_v3",
    "qwen2_5_vl": "qwen2_vl",
    "minimax_m2": "minimax",
    "llava": "mistral3",
    "falcon_mamba": "mamba",
}

# The code of `gemma3` fills in what the configs of its releases leave out.
_GEMMA3 = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_size": 1152, "num_hidden_layers": 26,
    "sliding_window": 512,
}  # fmt: skip
_GEMMA3_TEXT = {**_GEMMA3, "num_attention_heads": 4, "num_key_value_heads": 1}
_COHERE2 = {
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 32,
    "sliding_window": 4096,
}  # fmt: skip

_GROUPED_TYPES = (
    "apertus", "bitnet", "cohere", "deepseek", "dots1", "ernie4_5", "ernie4_5_moe", "exaone", "gemma", "gemma2", "glm",
    "glm4", "glm4_moe", "granite", "granitemoe", "helium", "hunyuan_v1_dense", "internlm2",
    "internlm3", "minicpm", "minimax", "mixtral", "nemotron", "olmo2", "olmoe", "phi", "phi3", "phimoe", "qwen2",
    "qwen2_moe", "qwen2_vl", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe", "seed_oss", "smollm3", "stablelm",
    "starcoder2",
)  # fmt: skip

_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_GROUPED_TYPES, _full),
    **dict.fromkeys(("gpt2", "gpt_neox", "gptj"), _every_head),
    "gpt_bigcode": _multi_query,
    "deepseek_v3": _latent,
    "glm4_moe_lite": _latent,
    "kimi_k25": _latent,
    "kimi_vl": _latent,
    "mistral4": _latent,
    "deepseek_v2": _expanded,
    "youtu_llm": _expanded,
    "llama": _all_full_by_default,
    "ministral3": _all_full_by_default,
    "mistral3": _nested_mistral,
    "pixtral": _all_full_by_default,
    "gemma3": _every_nth_full(6, _GEMMA3),
    "gemma3_text": _every_nth_full(6, _GEMMA3_TEXT),
    "cohere2": _every_nth_full(4, _COHERE2),
    "gpt_oss": _by_layer_types(lambda n: [i % 2 == 0 for i in range(n)]),
    "olmo3": _by_layer_types(lambda n: [i % 4 != 3 for i in range(n)]),
}

_OTHER_CACHES = {
    "recurrent state, which fits one exact token count only": (
        "mamba", "mamba2", "rwkv7", "qwen3_next", "qwen3_5", "qwen3_5_moe", "jamba", "lfm2", "lfm2_moe", "lfm2-vl",
        "granitemoehybrid", "nemotron_h", "kimi_linear", "kimi_k3", "bailing_hybrid", "bailing_moe_linear",
        "bailing_moe_v3", "olmo_hybrid", "plamo2", "falcon_h1", "baichuan_m1", "longcat_flash_ngram",
        "recurrent_gemma", "gear",
    ),
    "chunked attention, whose caches cannot be cut": ("llama4",),
    "two caches a layer, which this version does not share": (
        "deepseek_v32", "glm_moe_dsa", "longcat_flash", "minimax_m3_vl",
    ),
    "caches of a class of its own": ("deepseek_v41", "deepseek_v41_text"),
}  # fmt: skip


def _other_reason(name: str) -> str | None:
    for reason, names in _OTHER_CACHES.items():
        if name in names:
            return reason
    return None
