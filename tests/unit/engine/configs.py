"""The parts of published configs that say what their layers cache."""

from typing import Any

QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3", "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_size": 4096, "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_32_3B: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_size": 3072, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "hidden_size": 7168, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "max_position_embeddings": 163840, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA_3_4B: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "sliding_window": 1024,
        "max_position_embeddings": 131072,
    },
    "torch_dtype": "bfloat16",
}  # fmt: skip
