"""Recorded requests as a stream: blocks of another size, conversations found again, turns sent to nodes."""

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from kvnet.errors import MalformedError
from simulations.workload.requests import RequestStream, StreamBuilder
from simulations.workload.traces import MOONCAKE_BLOCK_TOKENS, Report, Trace, TraceRequest, read, silent

_NEW = -1
"""Labels a block that no other prompt has; negative numbers count them."""
_SESSION_SHIFT = 64
"""Ids of sessions are kept apart above the bits of an id and its parts."""


def native_stream(path: Path, report: Report = silent) -> RequestStream:
    """A whole trace at one node, in its own block size and the file's order.

    Args:
        path: of the trace.
        report: told how many bytes of how many are read.

    Raises:
        MalformedError: a line that does not fit.
    """
    trace = read(path, report)
    builder = StreamBuilder(path.stem, 1, block_tokens=trace.block_tokens)
    for request, labels, session in _labelled(trace, trace.block_tokens):
        # The file's order is that of a session; between sessions it matters not, as they share nothing.
        builder.add(
            request.arrival_s,
            0,
            session,
            builder.segment_of(labels),
            request.n_input,
            request.n_output,
            n_shared=request.n_shared,
        )
    return builder.build()


def recorded_stream(
    path: Path,
    n_nodes: int,
    *,
    block_tokens: int,
    rng: np.random.Generator,
    moves: float = 0.0,
    stretch: float = 1.0,
    limit: int = 0,
) -> RequestStream:
    """A trace on many nodes: each conversation at one of them.

    Sessions that a trace names begin evenly over its longest session's duration times `stretch`, as they were not
    recorded together.

    Args:
        path: of the trace.
        n_nodes: how many nodes.
        block_tokens: of the stream.
        rng: chooses nodes and beginnings.
        moves: share of turns that go to another node than the turn before.
        stretch: times are multiplied by it.
        limit: at most so many requests; 0 for all.

    Raises:
        MalformedError: a line that does not fit, blocks that do not, or no request.
    """
    builder = StreamBuilder(path.stem, n_nodes, block_tokens=block_tokens)
    rows = _rows(path, builder, block_tokens, limit)
    named = bool(rows[0][0].session)
    longest_s = max(request.arrival_s for request, _, _ in rows)
    at: dict[int, int] = {}
    begins_s: dict[int, float] = {}
    for request, segment, session in rows:
        if session not in at:
            at[session] = int(rng.integers(n_nodes))
            begins_s[session] = float(rng.random()) * longest_s if named else 0.0
        elif n_nodes > 1 and rng.random() < moves:
            at[session] = (at[session] + int(rng.integers(1, n_nodes))) % n_nodes
        builder.add(
            (begins_s[session] + request.arrival_s) * stretch,
            at[session],
            session,
            segment,
            request.n_input,
            max(1, request.n_output),
            n_shared=request.n_shared,
        )
    return builder.build()


def _rows(path: Path, builder: StreamBuilder, block_tokens: int, limit: int) -> list[tuple[TraceRequest, int, int]]:
    """The requests of a trace, each with its segment in the builder's tree and the number of its session."""
    trace = read(path)
    if max(trace.block_tokens, block_tokens) % min(trace.block_tokens, block_tokens):
        raise MalformedError(
            f"{path}: block_size: expected a part or a multiple of {block_tokens} tokens, found {trace.block_tokens}"
        )
    labelled = islice(_labelled(trace, block_tokens), limit or None)
    rows = [(request, builder.segment_of(labels), session) for request, labels, session in labelled]
    if not rows:
        raise MalformedError(f"{path}: expected a request, found none")
    return rows


def _labelled(trace: Trace, block_tokens: int) -> Iterable[tuple[TraceRequest, list[int], int]]:
    """Each request with the labels of its blocks and the number of its session."""
    sessions = _Sessions()
    numbers: dict[str, int] = {}
    new = 0
    for request in trace.requests:
        labels = relabel(request.ids, trace.block_tokens, block_tokens, request.n_input, whole=request.whole)
        if request.session:
            # Ids mean something within their session alone: its number becomes part of the first, and all that follows
            # in the tree of prompts is then apart from other sessions.
            session = numbers.setdefault(request.session, len(numbers))
            if labels[0] != _NEW:
                labels[0] |= session << _SESSION_SHIFT
        else:
            session = sessions.number(request)
        # Blocks without an id are the last ones, and nobody else has them.
        for place in range(len(labels) - labels.count(_NEW), len(labels)):
            new += 1
            labels[place] = -new
        yield request, labels, session


def relabel(ids: Sequence[int], recorded_tokens: int, block_tokens: int, n_input: int, *, whole: bool) -> list[int]:
    """Labels of a prompt's blocks of `block_tokens`, from the ids of its recorded blocks.

    A recorded block that is larger is divided: equal ids give equal parts. Of smaller ones, so many together make a
    block, which the id of the last one names, since an id names everything before it too.

    Args:
        ids: recorded.
        recorded_tokens: tokens of a recorded block.
        block_tokens: tokens of a block that is wanted.
        n_input: tokens of the prompt.
        whole: whether what lies behind the last whole recorded block has no id; its label is then -1.

    Raises:
        ValueError: neither size divides the other.
    """
    n_blocks = -(-n_input // block_tokens)
    if recorded_tokens == block_tokens:
        labels = list(ids[:n_blocks])
    elif recorded_tokens > block_tokens:
        parts, rest = divmod(recorded_tokens, block_tokens)
        if rest:
            raise ValueError(f"expected blocks that divide {recorded_tokens} tokens, found {block_tokens}")
        labels = [id_ * parts + part for id_ in ids for part in range(parts)][:n_blocks]
    else:
        together, rest = divmod(block_tokens, recorded_tokens)
        if rest:
            raise ValueError(f"expected blocks of a multiple of {recorded_tokens} tokens, found {block_tokens}")
        named = len(ids) // together if whole and len(ids) * recorded_tokens < n_input else -(-len(ids) // together)
        labels = [ids[min(len(ids), (block + 1) * together) - 1] for block in range(named)]
    return labels + [_NEW] * (n_blocks - len(labels))


class _Sessions:
    """Finds conversations again in a trace that does not name them.

    A request goes on with an earlier one when its prompt contains all whole blocks of the earlier prompt, and no other
    has done so before: that is what the next turn of a conversation does.
    """

    def __init__(self) -> None:
        self._count = 0
        self._ending_at: dict[int, int] = {}

    def number(self, request: TraceRequest) -> int:
        """The number of a request's session."""
        before = next((id_ for id_ in reversed(request.ids) if id_ in self._ending_at), None)
        if before is None:
            session = self._count
            self._count += 1
        else:
            session = self._ending_at.pop(before)
        if whole := request.n_input // MOONCAKE_BLOCK_TOKENS:
            self._ending_at[request.ids[whole - 1]] = session
        return session
