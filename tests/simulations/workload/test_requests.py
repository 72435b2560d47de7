import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulations.workload.requests import ROOT, Request, StreamBuilder

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=12)


@given(PROMPTS)
def test_two_prompts_share_ids_exactly_as_far_as_they_begin_alike(prompts: list[list[int]]) -> None:
    builder = StreamBuilder("x", 1, block_tokens=4)
    for at_s, prompt in enumerate(prompts):
        builder.add(at_s, 0, 0, builder.segment_of(prompt), 4 * len(prompt), 1)
    stream = builder.build()
    name_of: dict[int, tuple[int, ...]] = {}
    for request, prompt in zip(stream, prompts, strict=True):
        ids = stream.block_ids(request)
        assert len(ids) == len(prompt)
        for end, block_id in enumerate(ids, 1):
            assert name_of.setdefault(block_id, tuple(prompt[:end])) == tuple(prompt[:end])
    assert len(set(name_of.values())) == len(name_of)


def test_a_conversation_that_grows_stays_in_one_segment() -> None:
    builder = StreamBuilder("x", 1, block_tokens=4)
    segments = {builder.segment_of([1, 2]), builder.segment_of([1, 2, 3]), builder.segment_of([1, 2, 3, 4, 5])}
    assert len(segments) == 1


def test_a_prompt_that_parts_leaves_its_segment_there() -> None:
    builder = StreamBuilder("x", 1, block_tokens=4)
    first = builder.segment_of([1, 2, 3])
    other = builder.segment_of([1, 2, 4])
    tree = builder.segments()
    assert tree.parent[other] == first
    assert tree.begin[other] == 2
    assert [(part.segment, part.begin, part.end) for part in tree.path(other, 3)] == [(first, 0, 2), (other, 2, 3)]


def test_a_prompt_shorter_than_where_its_segment_begins_ends_in_an_earlier_one() -> None:
    builder = StreamBuilder("x", 1, block_tokens=4)
    first = builder.segment_of([1, 2, 3])
    other = builder.segment_of([1, 2, 4])
    assert [part.segment for part in builder.segments().path(other, 2)] == [first]


def test_requests_come_by_time_and_those_of_one_time_as_they_were_added() -> None:
    builder = StreamBuilder("x", 3)
    segment = builder.open_segment()
    for at_s, node in ((5.0, 0), (1.0, 1), (5.0, 2)):
        builder.add(at_s, node, 0, segment, 10, 1)
    assert [(request.arrival_s, request.node) for request in builder.build()] == [(1.0, 1), (5.0, 0), (5.0, 2)]


def test_a_long_stream_iterates_as_it_is_indexed() -> None:
    builder = StreamBuilder("x", 1)
    segment = builder.open_segment()
    for at in range(65_540):
        builder.add(float(at), 0, at, segment, 1 + at % 700, 2, n_shared=1)
    stream = builder.build()
    listed = list(stream)
    assert len(listed) == len(stream) == 65_540
    assert listed[65_539] == stream[65_539] == Request(65_539, 65_539.0, 0, 65_539, segment, 440, 2, 1)
    assert stream.duration_s == 65_539.0


def test_an_answer_that_follows_belongs_to_the_segment() -> None:
    builder = StreamBuilder("x", 1, block_tokens=4, answers_follow=True)
    segment = builder.open_segment()
    builder.add(0.0, 0, 0, segment, 5, 10)
    assert builder.segments().end[segment] == 4


@pytest.mark.parametrize(("parent", "begin"), [(ROOT, 1), (0, 0), (7, 1), (-2, 1)])
def test_a_segment_leaves_a_place_that_is_there(parent: int, begin: int) -> None:
    builder = StreamBuilder("x", 1)
    builder.open_segment()
    with pytest.raises(ValueError, match="expected a place"):
        builder.open_segment(parent, begin)
