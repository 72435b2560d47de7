import json
import os
import random
from pathlib import Path

import pytest

from simulations.replay import replay_file
from simulations.workload.traces import EXCERPTS


def write_trace(file: Path, seed: int) -> tuple[float, float]:
    """A trace of prompts that begin alike, and what a replay must count, found in the plainest way."""
    drawn = random.Random(seed)
    ids: dict[tuple[int, ...], int] = {}
    seen: set[int] = set()
    lines, hit_tokens, tokens, hit_blocks, blocks = [], 0, 0, 0, 0
    for at in range(200):
        prompt = [drawn.randrange(2) for _ in range(drawn.randrange(1, 9))]
        rest = drawn.choice([0, 0, 100])
        n_input = 512 * len(prompt) - rest
        # The last block's id stands for what it holds, so that a short one has another.
        names = [tuple(prompt[: end + 1]) for end in range(len(prompt))]
        names[-1] = (*names[-1], rest)
        mine = [ids.setdefault(name if len(name) > end + 1 else (*name, 0), len(ids)) for end, name in enumerate(names)]
        hits = next((end for end, block in enumerate(mine) if block not in seen), len(mine))
        hit_tokens, tokens = hit_tokens + min(hits * 512, n_input), tokens + n_input
        hit_blocks, blocks = hit_blocks + hits, blocks + len(mine)
        seen.update(mine)
        lines.append(json.dumps({"timestamp": at, "input_length": n_input, "output_length": 1, "hash_ids": mine}))
    file.write_text("\n".join(lines))
    return hit_tokens / tokens, hit_blocks / blocks


@pytest.mark.parametrize("seed", range(5))
def test_a_replay_counts_what_plain_counting_counts(tmp_path: Path, seed: int) -> None:
    file = tmp_path / "trace.jsonl"
    expected = write_trace(file, seed)
    result = replay_file(file)
    assert (result.hit_token_fraction, result.hit_block_fraction) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "requests", "tokens", "blocks"),
    [
        ("conversation_excerpt.jsonl", 800, 0.19462, 0.19135),
        ("synthetic_excerpt.jsonl", 400, 0.05445, 0.05326),
        ("agent_sessions_excerpt.jsonl", 483, 0.93670, 0.93644),
    ],
)
def test_an_excerpt_replays_as_counted_before(name: str, requests: int, tokens: float, blocks: float) -> None:
    result = replay_file(EXCERPTS / name)
    assert result.requests == requests
    assert result.hit_token_fraction == pytest.approx(tokens, abs=5e-6)
    assert result.hit_block_fraction == pytest.approx(blocks, abs=5e-6)
    assert result.digest == replay_file(EXCERPTS / name).digest


def test_another_trace_has_another_digest(tmp_path: Path) -> None:
    digests = set()
    for seed in range(3):
        write_trace(tmp_path / "trace.jsonl", seed)
        digests.add(replay_file(tmp_path / "trace.jsonl").digest)
    assert len(digests) == 3


def test_progress_is_reported_and_never_beyond_the_end() -> None:
    read: list[tuple[int, int]] = []
    counted: list[tuple[int, int]] = []
    file = EXCERPTS / "conversation_excerpt.jsonl"
    replay_file(file, lambda *told: read.append(told), lambda *told: counted.append(told))
    assert len(read) == 800
    assert all(0 < done <= total == file.stat().st_size for done, total in read)
    assert counted
    assert all(0 <= done <= total == 800 for done, total in counted)


@pytest.mark.nightly
@pytest.mark.skipif("KVNET_TRACES" not in os.environ, reason="KVNET_TRACES names no folder with the whole traces")
@pytest.mark.parametrize(
    ("name", "tokens", "blocks"),
    [("conversation_trace.jsonl.gz", 0.374, 0.366), ("synthetic_trace.jsonl.gz", 0.651, 0.640)],
)
def test_a_whole_trace_replays_as_counted_before(name: str, tokens: float, blocks: float) -> None:
    result = replay_file(Path(os.environ["KVNET_TRACES"]) / name)
    assert round(result.hit_token_fraction, 3) == tokens
    assert round(result.hit_block_fraction, 3) == blocks
