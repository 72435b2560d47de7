"""What is held, counted against sets of blocks."""

from hypothesis import given
from hypothesis import strategies as st

from simulations.workload.requests import ROOT
from simulations.world.holdings import Held, Holdings
from simulations.world.tree import PromptTree
from tests.simulations.world.worlds import stream

# A head of 4 blocks; a text that leaves after it and one that leaves inside; conversations behind both.
SEGMENTS = ((ROOT, 0), (0, 4), (0, 2), (1, 9), (1, 7), (2, 5))
TREE = PromptTree(stream([(0.0, 0, segment, 4096, 0) for segment in range(len(SEGMENTS))], 1, SEGMENTS))

Prefix = tuple[int, int]
PREFIXES = st.tuples(st.integers(0, len(SEGMENTS) - 1), st.integers(1, 16))


def blocks_of(segment: int, n_blocks: int) -> set[tuple[int, int]]:
    """Each block as the segment it lies in and its number."""
    found: set[tuple[int, int]] = set()
    while segment != ROOT:
        parent, begin = SEGMENTS[segment]
        found |= {(segment, number) for number in range(begin, n_blocks)}
        segment, n_blocks = parent, min(begin, n_blocks)
    return found


@given(st.lists(st.tuples(st.booleans(), PREFIXES), max_size=30), PREFIXES)
def test_what_is_held_is_the_union_of_its_prefixes(steps: list[tuple[bool, Prefix]], asked: Prefix) -> None:
    holdings, expected = Holdings(TREE), dict[int, set[tuple[int, int]]]()
    for adding, (segment, n_blocks) in steps:
        path = TREE.path(segment, n_blocks * 256)
        tip = path[0][0]
        if adding and (tip not in holdings.held or holdings.held[tip].tokens < path[0][1]):
            holdings.add(Held(tip, path, 0.0))
            expected[tip] = blocks_of(segment, n_blocks)
        elif not adding and tip in holdings.held:
            holdings.remove(tip)
            del expected[tip]
    union = set[tuple[int, int]]().union(*expected.values())
    assert holdings.blocks == len(union)
    assert {segment for segment, _ in union} == set(holdings.extent)
    wanted = TREE.path(asked[0], asked[1] * 256)
    in_order = sorted(blocks_of(*asked), key=lambda each: each[1])
    shared = next((at for at, each in enumerate(in_order) if each not in union), len(in_order))
    assert holdings.longest(wanted) == shared * 256
    assert holdings.new_blocks(wanted) == len(in_order) - len(set(in_order) & union)


@given(PREFIXES, st.integers(1, 4096))
def test_a_cut_path_is_the_path_of_fewer_tokens(prefix: Prefix, n_tokens: int) -> None:
    segment, n_blocks = prefix
    whole = TREE.path(segment, n_blocks * 256)
    assert TREE.cut(whole, n_tokens) == TREE.path(segment, min(n_tokens, n_blocks * 256))
