"""The program in docs/simulation.md writes traces that can be replayed, with nothing of a prompt in them."""

import json
import random
import re
from pathlib import Path
from typing import Any

from simulations.replay import replay_file


def documented(repository_root: Path) -> dict[str, Any]:
    """What the program in the document defines."""
    text = (repository_root / "docs" / "simulation.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    defined: dict[str, Any] = {}
    exec(compile(program, "docs/simulation.md", "exec"), defined)
    return defined


def test_a_trace_of_ones_own_says_which_prompts_begin_alike_and_nothing_else(
    repository_root: Path, tmp_path: Path
) -> None:
    program = documented(repository_root)
    drawn = random.Random(1)
    document = [drawn.randrange(100_000, 200_000) for _ in range(1100)]
    prompts = [document, [*document, 1, 2, 3], document[:600], [7, *document]]
    file = tmp_path / "own.jsonl"
    file.write_text("\n".join(program["trace_line"](1000.0 * at, prompt, 5) for at, prompt in enumerate(prompts)))
    # Two blocks of the second prompt, one of the third; short last ones are others, and so is all of the fourth.
    result = replay_file(file)
    assert (result.requests, result.blocks) == (4, 3 + 3 + 2 + 3)
    assert result.hit_token_fraction == (2 * 512 + 512) / (1100 + 1103 + 600 + 1101)
    ids = [json.loads(line)["hash_ids"] for line in file.read_text().splitlines()]
    assert ids == [[0, 1, 2], [0, 1, 3], [0, 4], [5, 6, 7]]
