"""Writes tiny random model folders that mlx-lm loads offline: config, weights, tokenizer, chat template."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

BOS, EOS, START, END = "<s>", "</s>", "<|start|>", "<|end|>"
SPECIALS = (BOS, EOS, START, END)
VOCABULARY_SIZE = 512

CHAT_TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
DATED_TEMPLATE = "{{ 'Today is ' + strftime_now('%d %b %Y') + '.\n' }}" + CHAT_TEMPLATE
NO_SYSTEM_TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + CHAT_TEMPLATE
)
SILENT_SYSTEM_TEMPLATE = (
    "{{ '<s>' }}{% for m in messages if m['role'] != 'system' %}"
    "{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY_SIZE,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}
SLIDING_WINDOW: dict[str, Any] = {
    **LLAMA,
    "sliding_window": 16,
    "layer_types": ["full_attention", "sliding_attention"],
}
MLA: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY_SIZE,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_layer_freq": 1,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
}
MAMBA: dict[str, Any] = {
    "model_type": "mamba",
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "state_size": 8,
    "num_hidden_layers": 2,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 4,
    "tie_word_embeddings": True,
}


def byte_alphabet() -> list[str]:
    """The 256 characters byte-level BPE writes bytes with (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def write_tokenizer(folder: Path, *, merges: Iterable[str] = (), template: str | None = CHAT_TEMPLATE) -> None:
    """A byte-level BPE with the given merges (``"a b"`` joins a and b) and four special tokens."""
    merges = list(merges)
    tokens = [*SPECIALS, *byte_alphabet()]
    tokens += [joined for joined in (merge.replace(" ", "") for merge in merges) if joined not in tokens]
    added = [
        {
            "id": i,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, text in enumerate(SPECIALS)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level,
        "decoder": level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {BOS: {"id": BOS, "ids": [0], "tokens": [BOS]}},
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges,
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
    }
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_model(
    folder: Path,
    config: dict[str, Any] = LLAMA,
    *,
    seed: int = 0,
    shards: int = 1,
    scale: float = 0.2,
    template: str | None = CHAT_TEMPLATE,
    merges: Iterable[str] = (),
    dtype: str = "float32",
) -> Path:
    """A model folder with random weights; the same seed gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": dtype}))
    write_tokenizer(folder, merges=merges, template=template)
    shapes = _SHAPES[config["model_type"]](config)
    generator = np.random.default_rng(seed)
    weights = {
        name: np.ones(shape, np.float32)
        if name.endswith("norm.weight")
        else (generator.standard_normal(shape) * scale).astype(np.float32)
        for name, shape in sorted(shapes.items())
    }
    write_weights(folder, {name: _stored(array, dtype) for name, array in weights.items()}, shards=shards)
    return folder


def _stored(array: Any, dtype: str) -> Any:
    """An array as it is stored; numpy has no bfloat16, its bits are the upper half of float32's."""
    return (array.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else array.astype(dtype)


def write_weights(folder: Path, weights: dict[str, Any], *, shards: int = 1, names: list[str] | None = None) -> None:
    """Writes tensors to one or several files; ``names`` gives the order in which they are dealt out."""
    ordered = names or sorted(weights)
    for shard in range(shards):
        part = {name: weights[name] for name in ordered[shard::shards]}
        label = "model.safetensors" if shards == 1 else f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        write_safetensors(folder / label, part)


def write_safetensors(path: Path, tensors: dict[str, Any]) -> None:
    """A safetensors file with its tensors in the order given; 16-bit integers stand for bfloat16."""
    names = {"float32": "F32", "float16": "F16", "uint16": "BF16"}
    header: dict[str, Any] = {}
    position = 0
    for name, array in tensors.items():
        end = position + array.nbytes
        header[name] = {"dtype": names[array.dtype.name], "shape": array.shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(a.tobytes() for a in tensors.values()))


def _llama_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    key_dim, query_dim = (head_dim * config[field] for field in ("num_key_value_heads", "num_attention_heads"))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "input_layernorm.weight": (hidden,),
            at + "post_attention_layernorm.weight": (hidden,),
            at + "self_attn.q_proj.weight": (query_dim, hidden),
            at + "self_attn.k_proj.weight": (key_dim, hidden),
            at + "self_attn.v_proj.weight": (key_dim, hidden),
            at + "self_attn.o_proj.weight": (hidden, query_dim),
            at + "mlp.gate_proj.weight": (inner, hidden),
            at + "mlp.up_proj.weight": (inner, hidden),
            at + "mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def _mla_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    rank, rope, nope = config["kv_lora_rank"], config["qk_rope_head_dim"], config["qk_nope_head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "input_layernorm.weight": (hidden,),
            at + "post_attention_layernorm.weight": (hidden,),
            at + "self_attn.q_proj.weight": (heads * (nope + rope), hidden),
            at + "self_attn.kv_a_proj_with_mqa.weight": (rank + rope, hidden),
            at + "self_attn.kv_a_layernorm.weight": (rank,),
            at + "self_attn.kv_b_proj.weight": (heads * (nope + config["v_head_dim"]), rank),
            at + "self_attn.o_proj.weight": (hidden, heads * config["v_head_dim"]),
            at + "mlp.gate_proj.weight": (inner, hidden),
            at + "mlp.up_proj.weight": (inner, hidden),
            at + "mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def _mamba_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, state = config["hidden_size"], config["intermediate_size"], config["state_size"]
    rank = config["time_step_rank"]
    shapes: dict[str, tuple[int, ...]] = {
        "backbone.embeddings.weight": (config["vocab_size"], hidden),
        "backbone.norm_f.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"backbone.layers.{layer}."
        shapes |= {
            at + "norm.weight": (hidden,),
            at + "mixer.in_proj.weight": (2 * inner, hidden),
            at + "mixer.conv1d.weight": (inner, config["conv_kernel"], 1),
            at + "mixer.conv1d.bias": (inner,),
            at + "mixer.x_proj.weight": (rank + 2 * state, inner),
            at + "mixer.dt_proj.weight": (inner, rank),
            at + "mixer.dt_proj.bias": (inner,),
            at + "mixer.A_log": (inner, state),
            at + "mixer.D": (inner,),
            at + "mixer.out_proj.weight": (hidden, inner),
        }
    return shapes


_SHAPES = {"llama": _llama_shapes, "deepseek_v3": _mla_shapes, "mamba": _mamba_shapes}
