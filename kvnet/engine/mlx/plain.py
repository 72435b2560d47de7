"""The alternative to all of kvnet: mlx-lm alone, in a process of its own.

``python -m kvnet.engine.mlx.plain MODEL CHAT MAX_TOKENS`` prints one JSON object: seconds to the first token of a chat,
its greedy text, and how many tokens the prompt has.
"""

import json
import sys
import time
from pathlib import Path

from kvnet.engine.mlx.blas import preload
from kvnet.engine.mlx.leaving import leave

preload()  # as kvnet's engine does, and before MLX is imported

import mlx_lm  # noqa: E402

# Asked before anything is measured.
WARM_UP = "Name the months of the year in their usual order."


def main(model_path: str, chat_path: str, max_tokens: int) -> None:
    """Answer a chat with `mlx_lm.stream_generate`, after the model is loaded and warm."""
    model, tokenizer = mlx_lm.load(model_path)[:2]
    messages = json.loads(Path(chat_path).read_bytes())
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    next(iter(mlx_lm.stream_generate(model, tokenizer, WARM_UP, max_tokens=2)))
    begun = time.perf_counter()
    ttft_s = 0.0
    text = ""
    for part in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=max_tokens):
        ttft_s = ttft_s or time.perf_counter() - begun
        text += part.text
    print(json.dumps({"ttft_s": ttft_s, "text": text, "prompt_tokens": len(prompt)}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    leave(0)
