from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from simulations.replay import prefix_hits
from simulations.scenario import Scenario
from simulations.scenario_files import parse
from simulations.workload.requests import RequestStream
from simulations.workload.sampling import HOUR_S, sizes, times, zipf
from simulations.workload.work import prepare

KINDS: dict[str, dict[str, Any]] = {
    "office": {"requests": 500, "documents": 20},
    "agents": {"requests": 500},
    "classroom": {"lessons": 2},
    "person": {"requests": 200},
    "codebase": {"days": 4.0},
    "trace": {"file": "conversation_excerpt.jsonl", "requests": 200},
}


def scenario(kind: str, *, nodes: int = 5, **changes: Any) -> Scenario:
    return parse(
        {
            "name": "test",
            "title": "a test",
            "model": "qwen3-8b",
            "machines": [{"count": nodes, "chip": "m4", "link": "wifi"}],
            "workload": {"kind": kind, **KINDS[kind], **changes},
        }
    )


def stream(kind: str, seed: int = 0, **changes: Any) -> RequestStream:
    return prepare(scenario(kind, **changes), seed).stream


def columns(of: RequestStream) -> list[Any]:
    rows = [of.arrival_s, of.node, of.session, of.segment, of.n_input, of.n_output, of.n_shared]
    return [*(row.tolist() for row in rows), of.segments.parent.tolist(), of.segments.begin.tolist()]


@pytest.mark.parametrize("kind", KINDS)
def test_one_seed_gives_one_stream_and_another_another(kind: str) -> None:
    assert columns(stream(kind, 3)) == columns(stream(kind, 3))
    assert columns(stream(kind, 3)) != columns(stream(kind, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_requests_come_in_order_at_nodes_that_are_there(kind: str) -> None:
    made = stream(kind)
    assert (np.diff(made.arrival_s) >= 0).all()
    assert ((made.node >= 0) & (made.node < made.n_nodes)).all()
    assert made.n_nodes == 5
    assert (made.n_input >= 1).all()
    assert (made.n_output >= 1).all()
    assert (made.n_shared <= made.n_input).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_tree_of_prompts_is_one(kind: str) -> None:
    made = stream(kind)
    tree = made.segments
    assert (tree.parent < np.arange(len(tree))).all()
    assert (tree.begin[tree.parent == -1] == 0).all()
    assert (tree.end >= tree.begin).all()
    assert (tree.first[1:] == (tree.first + tree.end - tree.begin)[:-1]).all()
    for request in made:
        parts = made.path(request)
        assert parts[0].begin == 0
        assert parts[-1].end == made.n_blocks(request.n_input)
        assert all(before.end == after.begin for before, after in pairwise(parts))
        assert all(part.end <= tree.end[part.segment] for part in parts)


@pytest.mark.parametrize("kind", ["office", "agents", "person"])
def test_as_many_requests_as_wanted(kind: str) -> None:
    assert len(stream(kind)) == KINDS[kind]["requests"]


@pytest.mark.parametrize("kind", ["office", "agents", "person", "classroom"])
def test_a_turn_begins_with_the_turn_before_and_its_answer(kind: str) -> None:
    made = stream(kind)
    last: dict[int, tuple[list[int], int]] = {}
    followed = 0
    for request in made:
        ids = made.block_ids(request)
        if request.session in last:
            before, reach = last[request.session]
            assert request.n_input > reach
            assert ids[: len(before)] == before
            followed += 1
        last[request.session] = ids, request.n_input + request.n_output
    assert followed > len(made) // 3


def test_conversations_end_before_they_are_too_long_and_others_make_up_for_them() -> None:
    shape = {"turns": 50.0, "question_tokens": 1000, "longest_tokens": 30_000}
    made = stream("office", document_tokens=1000, conversation=shape)
    assert len(made) == 500
    assert (made.n_input <= 30_000).all()


def test_people_of_an_office_begin_with_the_same_documents() -> None:
    made = stream("office")
    hits = np.minimum(prefix_hits(made) * 256, made.n_input).sum() / made.n_input.sum()
    assert hits > 0.7
    sharers: dict[int, set[int]] = {}
    for request in made:
        for part in made.path(request)[:-1]:
            sharers.setdefault(part.segment, set()).add(request.node)
    assert max(len(nodes) for nodes in sharers.values()) == 5


def test_a_class_begins_together_with_the_same_text() -> None:
    made = stream("classroom", lesson_s=5000.0, begin_within_s=60.0)
    first_of: dict[int, float] = {}
    for request in made:
        first_of.setdefault(request.session, request.arrival_s)
    lessons = sorted(int(at_s // 5000) for at_s in first_of.values())
    assert lessons == [0] * 5 + [1] * 5
    assert all(at_s % 5000 < 60 for at_s in first_of.values())


def test_a_person_goes_on_at_another_machine() -> None:
    where: dict[int, set[int]] = {}
    for request in stream("person", moves=0.5, nodes=2):
        where.setdefault(request.session, set()).add(request.node)
    assert sum(len(nodes) == 2 for nodes in where.values()) > len(where) // 2
    assert {request.node for request in stream("person", moves=0.5, nodes=1)} == {0}


def test_an_edit_changes_all_that_follows_it_and_nothing_before() -> None:
    made = stream("codebase", days=30.0, edit_from=0.5, question_tokens=10)
    hits = prefix_hits(made)
    half = 50_000 // 256
    assert (hits[1:] >= half - 8).all()
    assert (hits[1:] < made.n_shared[1:] // 256).any()


def test_without_edits_a_codebase_is_hit_whole() -> None:
    made = stream("codebase", edits_a_day=0.0)
    assert (prefix_hits(made)[1:] >= made.n_shared[1:] // 256).all()


def test_most_is_asked_in_working_hours() -> None:
    drawn = times(np.random.default_rng(0), 20_000, 3.0, working_hours=True)
    hour = drawn // HOUR_S % 24
    assert ((hour >= 8) & (hour < 18)).mean() > 0.75
    assert (drawn < 3 * 24 * HOUR_S).all()
    even = times(np.random.default_rng(0), 20_000, 0.5, working_hours=False)
    assert (even < 12 * HOUR_S).all()
    assert abs(even.mean() - 6 * HOUR_S) < 600


def test_the_most_popular_thing_is_asked_for_as_zipf_says() -> None:
    chosen = zipf(np.random.default_rng(0), 10, 1.0, 50_000)
    share = np.bincount(chosen, minlength=10) / len(chosen)
    expected = 1 / np.arange(1, 11) / (1 / np.arange(1, 11)).sum()
    assert np.abs(share - expected).max() < 0.01


def test_sizes_have_the_mean_they_were_given() -> None:
    drawn = sizes(np.random.default_rng(0), 1000, 0.8, 100_000)
    assert abs(drawn.mean() - 1000) < 20
    assert (drawn >= 1).all()
    assert set(sizes(np.random.default_rng(0), 7, 0.0, 10).tolist()) == {7}
