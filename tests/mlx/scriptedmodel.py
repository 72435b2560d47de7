"""Writes tiny model folders whose answers are scripted: what mlx-lm parses out of answers can then be tested for real.

Each token decides the next one by itself: attention and MLP add nothing, and row ``next`` of the output layer is the
embedding of the token before it. The chat template ends a prompt with a token that starts one of the scripts.
"""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np

from tests.mlx.tinymodels import BOS, EOS, LLAMA, write_safetensors, write_tokenizer

PLAIN, ASKED, TOLD = "<|plain|>", "<|asked|>", "<|told|>"
"""End of a prompt: without tools, with tools, and after the result of one."""
THINK, THOUGHT, CALL, CALLED = "<think>", "</think>", "<tool_call>", "</tool_call>"
REASONING = "I should look."
CALL_TEXT = '{"name": "weather", "arguments": {"town": "Ulm", "days": 2}}'
SCRIPTS = (
    (PLAIN, "Good", " day", " to you", EOS),
    (ASKED, THINK, REASONING, THOUGHT, "One", " moment", CALL, CALL_TEXT, CALLED, EOS),
    (TOLD, "It", " rains", " in Ulm", EOS),
)
BLANKS = ("\u0109", "\u010a", "\u010d", "\u0120")
"""Tab, line ends and space as the vocabulary writes them. A grammar of JSON allows any number of them, so that a model
to which all is equal must not prefer them."""
TEMPLATE = (
    "{{ '<s>' }}{% if tools %}{{ '<|start|>tools\n' }}{% for t in tools %}{{ t.function | tojson + '\n' }}{% endfor %}"
    "{% endif %}{% for m in messages %}{{ '<|start|>' + m.role + '\n' }}"
    "{% if m.reasoning_content is defined and m.reasoning_content %}"
    "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{% set tool_call = c.function %}"
    '{{ \'<tool_call>{"name": "\' + tool_call.name + \'", "arguments": \' + (tool_call.arguments | tojson) + \'}'
    "</tool_call>' }}{% endfor %}{{ '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}"
    "{{ '<|told|>' if messages[-1].role == 'tool' else ('<|asked|>' if tools else '<|plain|>') }}{% endif %}"
)


def write_scripted(folder: Path, *, window_tokens: int = 4096) -> Path:
    """A model folder that follows ``SCRIPTS``."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, template=TEMPLATE)
    vocabulary = _add_tokens(folder)
    config = LLAMA | {
        "num_hidden_layers": 1,
        "vocab_size": len(vocabulary),
        "tie_word_embeddings": False,
        "max_position_embeddings": window_tokens,
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", _weights(vocabulary))
    return folder


def _add_tokens(folder: Path) -> dict[str, int]:
    """Every piece of a script becomes a token of its own; the whole vocabulary."""
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    vocabulary: dict[str, int] = dict(document["model"]["vocab"])
    pieces = [piece for script in SCRIPTS for piece in script if piece != EOS]
    assert not set(pieces) & set(vocabulary), "a piece is told from the bytes of other texts"
    assert len(pieces) == len(set(pieces)), "a token that is in two places has two followers"
    for piece in pieces:
        vocabulary[piece] = len(vocabulary)
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        document["added_tokens"].append({"id": vocabulary[piece], "content": piece, **flags})
    path.write_text(json.dumps(document))
    return vocabulary


def _weights(vocabulary: dict[str, int]) -> dict[str, np.ndarray]:
    size, hidden, inner = len(vocabulary), LLAMA["hidden_size"], LLAMA["intermediate_size"]
    generator = np.random.default_rng(0)
    embeddings = generator.standard_normal((size, hidden)).astype(np.float32)
    pieces = [piece for script in SCRIPTS for piece in script[:-1]]
    assert len(pieces) < hidden, "pieces are told apart by a direction each"
    embeddings[:, : len(pieces)] = 0
    for direction, piece in enumerate(pieces):
        embeddings[vocabulary[piece]] = np.eye(hidden, dtype=np.float32)[direction]
    # The same for every token, so that the output layer has something to write a bias into.
    embeddings[:, -1] = 1
    output = np.zeros((size, hidden), np.float32)
    for script in SCRIPTS:
        for before, after in pairwise(script):
            output[vocabulary[after]] += embeddings[vocabulary[before]]
    output[:, -1] = 0
    for blank in BLANKS:
        output[vocabulary[blank], -1] = -1
    key_dim = LLAMA["num_key_value_heads"] * hidden // LLAMA["num_attention_heads"]
    at = "model.layers.0."
    weights = {
        "model.embed_tokens.weight": embeddings,
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": output,
        at + "input_layernorm.weight": np.ones(hidden, np.float32),
        at + "post_attention_layernorm.weight": np.ones(hidden, np.float32),
        at + "self_attn.q_proj.weight": generator.standard_normal((hidden, hidden)).astype(np.float32),
        at + "self_attn.k_proj.weight": generator.standard_normal((key_dim, hidden)).astype(np.float32),
        at + "self_attn.v_proj.weight": generator.standard_normal((key_dim, hidden)).astype(np.float32),
        at + "self_attn.o_proj.weight": np.zeros((hidden, hidden), np.float32),
        at + "mlp.gate_proj.weight": np.zeros((inner, hidden), np.float32),
        at + "mlp.up_proj.weight": np.zeros((inner, hidden), np.float32),
        at + "mlp.down_proj.weight": np.zeros((hidden, inner), np.float32),
    }
    assert {BOS, EOS} <= set(vocabulary)
    return weights
