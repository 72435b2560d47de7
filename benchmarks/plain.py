"""The alternative: mlx-lm alone, in a process of its own. ``python -m benchmarks.plain MODEL CHAT ROUNDS``.

Prints one JSON object: the time to first token of each round, in seconds, and the prompt's tokens.
"""

import json
import sys
import time
from pathlib import Path

from kvnet.engine.mlx.blas import preload

preload()  # as kvnet's engine does, and before MLX is imported

import mlx_lm  # noqa: E402

WARM_UP = "Name the months of the year in their usual order."


def main(model_path: str, chat_path: str, rounds: int) -> None:
    """Time the first token of a chat with `mlx_lm.stream_generate`, nothing kept between rounds."""
    model, tokenizer = mlx_lm.load(model_path)[:2]
    messages = json.loads(Path(chat_path).read_bytes())
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)  # type: ignore[no-untyped-call]
    next(iter(mlx_lm.stream_generate(model, tokenizer, WARM_UP, max_tokens=2)))
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        next(iter(mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=1)))
        times.append(time.perf_counter() - begun)
    print(json.dumps({"ttft_s": times, "prompt_tokens": len(prompt)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
