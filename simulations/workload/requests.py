"""A stream of requests that fits in memory a million at a time.

All prompts of a stream are one tree. An edge of it is a *segment*: a run of blocks with consecutive ids. A prompt is a
segment and a number of tokens: its blocks are those of the segment's ancestors up to where each was left, then the
segment's own. A block id therefore names everything before it too: two prompts that share an id share all earlier ones,
and what they share is the longest common beginning of their lists of ids. A conversation that grows stays in one
segment, whatever its number of turns.

Whoever follows what a node holds needs only, for each segment, up to which block it is held.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvnet.format.prefix import BLOCK_TOKENS, common_prefix

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

ROOT = -1
"""The parent of a segment that begins with the prompt."""


class Request(NamedTuple):
    """One request.

    Attributes:
        number: its place in the stream, from 0; streams are ordered by arrival.
        arrival_s: seconds from the stream's beginning.
        node: which node it is sent to.
        session: whose conversation it belongs to.
        segment: where its prompt ends in the tree.
        n_input: tokens of the prompt, at least 1.
        n_output: tokens of the answer.
        n_shared: leading tokens that are not the session's own: tools, a system prompt, a document.
    """

    number: int
    arrival_s: float
    node: int
    session: int
    segment: int
    n_input: int
    n_output: int
    n_shared: int


class Part(NamedTuple):
    """A prompt's blocks within one segment: blocks `begin` up to `end` of the prompt; the first has id `first`."""

    segment: int
    begin: int
    end: int
    first: int


@dataclass(frozen=True, eq=False)
class Segments:
    """The tree of all prompts, one element per segment.

    Attributes:
        parent: the segment it leaves, or `ROOT`; always an earlier one.
        begin: blocks of a prompt before it: it leaves its parent's path there.
        end: blocks of the longest prompt through it, up to its last block.
        first: id of its first block; the others follow.
    """

    parent: Ints
    begin: Ints
    end: Ints
    first: Ints

    def __len__(self) -> int:
        return len(self.parent)

    def path(self, segment: int, n_blocks: int) -> list[Part]:
        """The parts of a prompt of `n_blocks` blocks that ends in `segment`, from its beginning."""
        parents, begins, firsts = self._lists
        parts: list[Part] = []
        end = n_blocks
        while segment != ROOT:
            begin = begins[segment]
            if begin < end:
                parts.append(Part(segment, begin, end, firsts[segment]))
                end = begin
            segment = parents[segment]
        parts.reverse()
        return parts

    @cached_property
    def _lists(self) -> tuple[list[int], list[int], list[int]]:
        """As lists: taking one element of an array at a time takes several times as long."""
        return self.parent.tolist(), self.begin.tolist(), self.first.tolist()


@dataclass(frozen=True, eq=False)
class RequestStream:
    """Requests in order of arrival, as columns.

    Attributes:
        name: of the trace or scenario.
        block_tokens: tokens of a block.
        n_nodes: how many nodes requests are sent to; `node` is below it.
        segments: the tree of prompts.
        arrival_s: seconds, never falling.
        node, session, segment, n_input, n_output, n_shared: as in `Request`.
        answers_follow: whether an answer is what follows the prompt in its segment, as in a generated conversation;
            in a recorded trace answers have no ids.
    """

    name: str
    block_tokens: int
    n_nodes: int
    segments: Segments
    arrival_s: Floats
    node: Ints
    session: Ints
    segment: Ints
    n_input: Ints
    n_output: Ints
    n_shared: Ints
    answers_follow: bool = False

    def __len__(self) -> int:
        return len(self.arrival_s)

    def __iter__(self) -> Iterator[Request]:
        """All requests as values; converted some at a time, so that a long stream needs no second copy."""
        step = 65_536
        for begin in range(0, len(self), step):
            part = slice(begin, begin + step)
            yield from map(
                Request._make,
                zip(
                    range(begin, min(begin + step, len(self))),
                    self.arrival_s[part].tolist(),
                    self.node[part].tolist(),
                    self.session[part].tolist(),
                    self.segment[part].tolist(),
                    self.n_input[part].tolist(),
                    self.n_output[part].tolist(),
                    self.n_shared[part].tolist(),
                    strict=True,
                ),
            )

    def __getitem__(self, number: int) -> Request:
        columns = (self.node, self.session, self.segment, self.n_input, self.n_output, self.n_shared)
        return Request(number, float(self.arrival_s[number]), *(int(column[number]) for column in columns))

    def rearranged(self, order: Ints, arrival_s: Floats, node: Ints) -> "RequestStream":
        """Some of the requests in another order, at other times and nodes.

        Args:
            order: numbers of those that stay, by their new times.
            arrival_s: times of all of them, as they are numbered now.
            node: nodes of all of them.
        """
        return replace(
            self,
            arrival_s=arrival_s[order],
            node=node[order],
            session=self.session[order],
            segment=self.segment[order],
            n_input=self.n_input[order],
            n_output=self.n_output[order],
            n_shared=self.n_shared[order],
        )

    def n_blocks(self, n_tokens: int) -> int:
        """Blocks that hold so many tokens, a short last one included."""
        return -(-n_tokens // self.block_tokens)

    def path(self, request: Request) -> list[Part]:
        """The parts of a request's prompt, from its beginning."""
        return self.segments.path(request.segment, self.n_blocks(request.n_input))

    def block_ids(self, request: Request) -> list[int]:
        """The id of every block of a request's prompt."""
        return [part.first + step for part in self.path(request) for step in range(part.end - part.begin)]

    @cached_property
    def duration_s(self) -> float:
        """Seconds from the stream's beginning to the last arrival; 0 without requests."""
        return float(self.arrival_s[-1]) if len(self) else 0.0


class StreamBuilder:
    """Puts requests together, from lists of block ids or from segments that a generator opens itself.

    Args:
        name: of the stream.
        n_nodes: how many nodes requests are sent to.
        block_tokens: tokens of a block.
        answers_follow: as in `RequestStream`.
    """

    def __init__(
        self, name: str, n_nodes: int, *, block_tokens: int = BLOCK_TOKENS, answers_follow: bool = False
    ) -> None:
        self.name = name
        self.n_nodes = n_nodes
        self.block_tokens = block_tokens
        self.answers_follow = answers_follow
        self._parent, self._begin, self._end = array("q"), array("q"), array("q")
        self._arrival_s = array("d")
        self._columns = tuple(array("q") for _ in range(6))
        self._children: dict[tuple[int, int, int], int] = {}
        self._ids: list[list[int]] = []

    def open_segment(self, parent: int = ROOT, begin: int = 0) -> int:
        """A new segment that leaves `parent` after `begin` blocks of the prompt.

        Raises:
            ValueError: there is no such place.
        """
        if (parent == ROOT) != (begin == 0) or parent >= len(self._parent) or parent < ROOT:
            raise ValueError(f"expected a place in an earlier segment, found segment {parent}, block {begin}")
        self._parent.append(parent)
        self._begin.append(begin)
        self._end.append(begin)
        return len(self._parent) - 1

    def add(
        self,
        arrival_s: float,
        node: int,
        session: int,
        segment: int,
        n_input: int,
        n_output: int,
        *,
        n_shared: int = 0,
    ) -> None:
        """One request whose prompt ends in `segment`; its answer too where answers follow."""
        reach = n_input + n_output if self.answers_follow else n_input
        n_blocks = -(-reach // self.block_tokens)
        self._end[segment] = max(self._end[segment], n_blocks)
        self._arrival_s.append(arrival_s)
        for column, value in zip(self._columns, (node, session, segment, n_input, n_output, n_shared), strict=True):
            column.append(value)

    def segment_of(self, ids: Sequence[int]) -> int:
        """The segment in which a prompt with these recorded block ids ends, after inserting what is new of it.

        Ids need mean nothing beyond being equal or not, and only after equal beginnings.
        """
        segment, at = ROOT, 0
        while at < len(ids):
            child = self._children.get((segment, at, ids[at]))
            if child is None:
                child = self.open_segment(segment, at)
                self._children[segment, at, ids[at]] = child
                self._ids.append(list(ids[at:]))
                self._end[child] = len(ids)
                return child
            known = self._ids[child]
            in_common = common_prefix(known, ids[at : at + len(known)])
            at += in_common
            if at < len(ids) and in_common == len(known) and (child, at, ids[at]) not in self._children:
                known.extend(ids[at:])
                self._end[child] = at = len(ids)
            segment = child
        return segment

    def build(self) -> RequestStream:
        """The stream, ordered by arrival; requests of the same time stay in the order in which they were added."""
        arrival_s = np.array(self._arrival_s, dtype=np.float64)
        order = np.argsort(arrival_s, kind="stable")
        columns = [np.array(column, dtype=np.int64)[order] for column in self._columns]
        node, session, segment, n_input, n_output, n_shared = columns
        return RequestStream(
            self.name,
            self.block_tokens,
            self.n_nodes,
            self.segments(),
            arrival_s[order],
            node,
            session,
            segment,
            n_input,
            n_output,
            n_shared,
            self.answers_follow,
        )

    def segments(self) -> Segments:
        """The tree so far."""
        begin = np.array(self._begin, dtype=np.int64)
        end = np.array(self._end, dtype=np.int64)
        first = np.concatenate((np.zeros(1, np.int64), np.cumsum(end - begin)[:-1])) if len(end) else end
        return Segments(np.array(self._parent, dtype=np.int64), begin, end, first)
