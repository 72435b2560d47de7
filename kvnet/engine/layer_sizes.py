"""What the layers of a model cache, read from its ``config.json`` alone.

The rules follow what mlx-lm's own model code puts into its caches (0.32), not what papers say a cache could hold:
DeepSeek V3 caches the latent, DeepSeek V2 the expanded heads, Gemma 2 keeps whole-length caches in every layer.
A model type that is not listed here is refused, never guessed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvnet.errors import CompatibilityError, MalformedError

Config = Mapping[str, Any]

# By the names that a config's ``torch_dtype`` has.
DTYPE_SIZE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# What mlx-lm's published conversions use when the config does not say.
DEFAULT_DTYPE = "bfloat16"

# No field of a config means anything above this; no model comes near this depth (the deepest published have 126).
_MAX_FIELD = 1 << 31
_MAX_LAYERS = 10_000


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
    try:
        layers = layer_sizes(config)
    except CompatibilityError as error:
        return None, f"{error}: decided when loaded"
    if windows := [layer for layer in layers if layer.kind == "window"]:
        n_window, n_all = sum(layer.n_layers for layer in windows), sum(layer.n_layers for layer in layers)
        return False, f"{n_window} of {n_all} layers keep a sliding window of {windows[0].window_tokens:,} tokens"
    return True, ""


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


def _n_layers(config: Config) -> int:
    n_layers = _field(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    if n_layers > _MAX_LAYERS:
        raise MalformedError(f"expected at most {_MAX_LAYERS:,} layers in config.json, found {n_layers:,}")
    return n_layers


def _grouped(config: Config) -> tuple[int, int, int]:
    """Layers, K/V heads and head width of grouped-query attention; older names of the same fields included."""
    n_layers = _n_layers(config)
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
            "full", _n_layers(config), 1, _field(config, "kv_lora_rank", default=512),
            _field(config, "qk_rope_head_dim", default=64), latent=True,
        ),
    )  # fmt: skip


def _expanded(config: Config) -> tuple[LayerSize, ...]:
    """Latent attention whose code caches the expanded heads: keys and values of different width."""
    heads = _field(config, "num_attention_heads")
    k_dim = _field(config, "qk_nope_head_dim", default=128) + _field(config, "qk_rope_head_dim", default=64)
    v_dim = _field(config, "v_head_dim", default=128)
    return (LayerSize("full", _n_layers(config), heads, k_dim, v_dim),)


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
        kinds = [i % every != every - 1 for i in range(_n_layers(config))]
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
