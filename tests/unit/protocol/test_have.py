"""What holders of a part say they have."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnet.errors import ProtocolViolationError
from kvnet.protocol.have import HeldChunks, encode_runs
from kvnet.protocol.messages.artifacts import MAX_RUNS


@given(st.sets(st.integers(0, 199)))
def test_a_set_of_chunks_reads_back(held: set[int]) -> None:
    runs = encode_runs(sorted(held))
    told = HeldChunks(runs, 200)
    assert [index for index in range(200) if index in told] == sorted(held)
    assert len(told) == len(held)


@pytest.mark.parametrize(
    ("held", "runs"), [([], ()), ([0], (0, 1)), ([0, 1, 5, 6, 7], (0, 2, 3, 3)), ([3], (3, 1)), (range(64), (0, 64))]
)
def test_a_set_has_one_writing(held: list[int], runs: tuple[int, ...]) -> None:
    assert encode_runs(held) == runs


@pytest.mark.parametrize("runs", [(1,), (0, 2, 0, 1), (0, 0), (0, 1, 2), (0, 11), (5, 6), (2**32 - 1, 2**32 - 1)])
def test_other_writings_and_more_chunks_than_there_are_break_the_protocol(runs: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolViolationError):
        HeldChunks(runs, 10)


def test_only_indices_are_in_it() -> None:
    told = HeldChunks((0, 3), 10)
    assert 2 in told
    text: object = "2"
    assert not told.__contains__(text)
    assert -1 not in told


def test_more_gaps_than_fit_are_left_out_and_the_rest_holds() -> None:
    n_chunks = 2 * MAX_RUNS
    runs = encode_runs(range(1, n_chunks, 2))
    assert len(runs) == MAX_RUNS
    told = HeldChunks(runs, n_chunks)
    assert MAX_RUNS - 1 in told
    assert MAX_RUNS + 1 not in told
