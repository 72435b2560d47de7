"""The sizes computed from a config are those of the caches mlx-lm really fills."""

from typing import Any

import pytest

from kvnet.engine.layer_sizes import shareable
from kvnet.engine.sizing import size_report

pytestmark = pytest.mark.mlx

N_TOKENS = 40
GROUPED: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 64, "max_position_embeddings": 256,
    "rope_theta": 10000.0, "tie_word_embeddings": True, "torch_dtype": "float32", "rope_scaling": None,
}  # fmt: skip
WINDOWED: dict[str, Any] = {**GROUPED, "head_dim": 16, "sliding_window": 32}
LATENT: dict[str, Any] = {
    **GROUPED, "moe_intermediate_size": 32, "kv_lora_rank": 24, "q_lora_rank": None, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12, "v_head_dim": 10, "first_k_dense_replace": 4, "n_routed_experts": None,
    "n_shared_experts": None, "moe_layer_freq": 1, "attention_bias": False,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "llama with windows": {
        **WINDOWED, "model_type": "llama",
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
    "mistral": {**GROUPED, "sliding_window": 32},
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 32},
    "qwen2_vl": {"text_config": {**GROUPED, "model_type": "qwen2"}, "vocab_size": 64, "torch_dtype": "float32"},
    "gemma2": {**WINDOWED},
    "mixtral": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {
        "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256, "n_ctx": 256, "vocab_size": 64,
        "layer_norm_epsilon": 1e-5, "torch_dtype": "float32", "num_key_value_heads": 2,
    },
    "deepseek_v3": LATENT,
    "deepseek_v2": {
        **LATENT, "rope_scaling": {"type": "yarn", "factor": 1.0, "original_max_position_embeddings": 64},
    },
    "gemma3_text": {**WINDOWED, "num_hidden_layers": 7},
    "gemma3": {
        "text_config": {
            "model_type": "gemma3_text", "num_hidden_layers": 7, "hidden_size": 64, "intermediate_size": 96,
            "sliding_window": 32,
        },
        "vocab_size": 64, "torch_dtype": "float32",
    },
    "cohere2": {**WINDOWED, "layer_norm_eps": 1e-5, "layer_norm_bias": False, "logit_scale": 1.0},
    "gpt_oss": {
        **WINDOWED, "head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2,
        "rope_scaling": {"rope_type": "default"},
    },
    "olmo3": WINDOWED,
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_computed_bytes_equal_the_bytes_in_the_caches(name: str) -> None:
    import mlx.core as mx
    from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
    from mlx_lm.utils import _get_classes

    config = {"model_type": name, **CONFIGS[name]}
    model_class, arguments_class = _get_classes(config)
    model = model_class(arguments_class.from_dict({**config}))
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[token % 64 for token in range(N_TOKENS)]]), cache=caches))
    found = 0
    for cache in caches:
        assert type(cache) in (KVCache, RotatingKVCache)
        rows = min(cache.offset, cache.max_size) if type(cache) is RotatingKVCache else cache.offset
        found += 4 * rows * sum(array.shape[1] * array.shape[3] for array in (cache.keys, cache.values))
    (row,) = size_report(config, model=name, n_tokens=N_TOKENS).rows
    assert row.kv_bytes == found
    only_plain = all(type(cache) is KVCache for cache in caches)
    assert shareable(config)[0] is only_plain
