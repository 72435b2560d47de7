"""Which chunks of an artifact a peer has, as run lengths: what a holder of a part says in `Have`.

The lengths are those of runs of chunks that are missing and held, in turn, from the first chunk on; the first is 0 when
that is held. What comes after the last held run is missing, so that each set of chunks is written in one way only.
Beyond `MAX_RUNS` the rest is left out: whoever has less than it could say is asked for less, and nothing breaks.
"""

from bisect import bisect_right
from collections.abc import Container, Iterable, Sequence
from itertools import accumulate

from kvnet.errors import ProtocolViolationError
from kvnet.protocol.messages.artifacts import MAX_RUNS


def encode_runs(held: Iterable[int]) -> tuple[int, ...]:
    """The runs of the chunks that are held.

    Args:
        held: their indices, ascending, each once.
    """
    runs: list[int] = []
    end = 0
    for index in held:
        if runs and index == end:
            runs[-1] += 1
        elif len(runs) == MAX_RUNS:
            break
        else:
            runs += [index - end, 1]
        end = index + 1
    return tuple(runs)


class HeldChunks(Container[int]):
    """The chunks that a peer says it has.

    Args:
        runs: as they came.
        n_chunks: of the artifact.

    Raises:
        ProtocolViolationError: they are not the one way to write a set of this artifact's chunks.
    """

    def __init__(self, runs: Sequence[int], n_chunks: int) -> None:
        if len(runs) % 2 or 0 in runs[1:]:
            raise ProtocolViolationError("expected runs of missing and held chunks in turn, none of them empty")
        self._bounds = list(accumulate(runs))
        if self._bounds and self._bounds[-1] > n_chunks:
            raise ProtocolViolationError(f"expected runs of at most {n_chunks} chunks, found {self._bounds[-1]}")
        self._n_held = sum(runs[1::2])

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and bisect_right(self._bounds, index) % 2 == 1

    def __len__(self) -> int:
        return self._n_held
