import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnet.errors import MalformedError
from simulations.workload.recorded import native_stream, recorded_stream, relabel
from simulations.workload.traces import EXCERPTS

CONVERSATIONS = EXCERPTS / "conversation_excerpt.jsonl"
AGENTS = EXCERPTS / "agent_sessions_excerpt.jsonl"


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_a_larger_block_is_divided_and_a_short_last_one_has_only_what_is_there() -> None:
    assert relabel([7, 8], 512, 256, 700, whole=False) == [14, 15, 16]


def test_smaller_blocks_become_one_that_the_last_names() -> None:
    assert relabel([1, 2, 3, 4, 5, 6], 64, 256, 64 * 6, whole=True) == [4, 6]


def test_what_has_no_id_makes_a_block_that_nobody_else_has() -> None:
    assert relabel([1, 2, 3, 4, 5, 6], 64, 256, 64 * 6 + 1, whole=True) == [4, -1]
    assert relabel([1, 2, 3, 4], 64, 256, 257, whole=True) == [4, -1]
    assert relabel([], 64, 64, 10, whole=True) == [-1]


@pytest.mark.parametrize("block_tokens", [100, 384])
def test_sizes_that_do_not_divide_are_refused(block_tokens: int) -> None:
    with pytest.raises(ValueError, match="expected blocks"):
        relabel([1], 256, block_tokens, 100, whole=True)


@pytest.mark.parametrize(
    ("session", "says"),
    [
        (
            {"block_size": 100, "requests": [{"t": 0, "in": 9}]},
            "block_size: expected a part or a multiple of 256",
        ),
        ({"block_size": 64, "requests": []}, "expected a request, found none"),
    ],
)
def test_a_trace_that_cannot_be_asked_is_named(tmp_path: Path, session: dict[str, Any], says: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps({"id": "a", **session}))
    with pytest.raises(MalformedError, match=f"trace.jsonl: {says}"):
        recorded_stream(file, 1, block_tokens=256, rng=np.random.default_rng(0))


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.sampled_from([(64, 256), (512, 256), (64, 64)]))
def test_relabelled_prompts_share_whole_blocks_of_what_they_shared(
    same: int, one: int, other: int, sizes: tuple[int, int]
) -> None:
    recorded, wanted = sizes

    def labels(first: int, count: int) -> list[int]:
        ids = [*range(1, same + 1), *range(first, first + count)]
        return relabel(ids, recorded, wanted, recorded * len(ids), whole=True)

    ours, theirs = labels(100, one), labels(200, other)
    shared = next(
        (at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )
    if one and other:
        assert shared == same * recorded // wanted
    else:
        assert shared in {same * recorded // wanted, -(-same * recorded // wanted)}


def test_a_trace_on_many_nodes_keeps_each_conversation_at_one() -> None:
    stream = recorded_stream(CONVERSATIONS, 8, block_tokens=256, rng=rng())
    assert len(stream) == 800
    assert len(set(stream.node.tolist())) == 8
    where: dict[int, set[int]] = {}
    for request in stream:
        where.setdefault(request.session, set()).add(request.node)
    assert all(len(nodes) == 1 for nodes in where.values())
    assert 400 < len(where) < 800


def test_turns_move_as_often_as_they_are_told_to() -> None:
    stream = recorded_stream(AGENTS, 4, block_tokens=256, rng=rng(), moves=0.5)
    last: dict[int, int] = {}
    moved = stayed = 0
    for request in stream:
        if request.session in last:
            moved, stayed = moved + (last[request.session] != request.node), stayed + 1
        last[request.session] = request.node
    assert 0.4 < moved / stayed < 0.6


def test_times_are_stretched_and_requests_limited() -> None:
    stream = recorded_stream(CONVERSATIONS, 1, block_tokens=256, rng=rng(), limit=50)
    slow = recorded_stream(CONVERSATIONS, 1, block_tokens=256, rng=rng(), stretch=10.0, limit=50)
    assert len(stream) == len(slow) == 50
    assert slow.duration_s == pytest.approx(10 * stream.duration_s)


def test_ids_of_two_sessions_are_not_the_same(tmp_path: Path) -> None:
    turn = {"t": 0, "in": 128, "out": 1, "hash_ids": [1, 2]}
    file = tmp_path / "trace.jsonl"
    sessions = [{"id": name, "block_size": 64, "requests": [turn, turn]} for name in ("a", "b")]
    file.write_text("\n".join(json.dumps(session) for session in sessions))
    stream = native_stream(file)
    ids = [tuple(stream.block_ids(request)) for request in stream]
    assert len(set(ids)) == 2
    assert not set(ids[0]) & set(ids[2])


def test_one_seed_gives_one_stream() -> None:
    one, same, other = (recorded_stream(AGENTS, 4, block_tokens=256, rng=rng(seed)) for seed in (1, 1, 2))
    assert (one.node == same.node).all()
    assert (one.arrival_s == same.arrival_s).all()
    assert (one.arrival_s != other.arrival_s).any()
