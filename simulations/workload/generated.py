"""Conversations that begin with texts others begin with too: generated in one go, a million in seconds.

A prompt is a shared text, then the questions and answers of the conversation before, then a question. Times are those
at which somebody asks, whatever the answer took: after an answer, read at `ANSWER_TOKENS_S`, comes a pause, then the
next turn.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvnet.format.prefix import BLOCK_TOKENS
from simulations.scenario import Conversation
from simulations.workload.requests import ROOT, Floats, Ints, RequestStream, Segments
from simulations.workload.sampling import sizes

N = TypeVar("N", np.int64, np.float64)

ANSWER_TOKENS_S: Final = 20.0
"""Tokens of an answer in a second, as far as the time of the next turn is concerned. An assumption."""


class Text(NamedTuple):
    """A text that prompts begin with: where it ends in the tree, and how many tokens there are up to there."""

    segment: int
    n_tokens: int


NOTHING: Final = Text(ROOT, 0)


class Texts:
    """The tree of shared texts.

    Args:
        block_tokens: tokens of a block. One that two texts share only in part belongs to the second.
    """

    def __init__(self, block_tokens: int = BLOCK_TOKENS) -> None:
        self.block_tokens = block_tokens
        self.parent: list[int] = []
        self.begin: list[int] = []
        self.end: list[int] = []

    def after(self, text: Text, n_tokens: int) -> Text:
        """A new text that follows another."""
        return self.instead(text, text.n_tokens, text.n_tokens + n_tokens)

    def instead(self, text: Text, same_tokens: int, n_tokens: int) -> Text:
        """A new text of `n_tokens` that begins with the first `same_tokens` of another."""
        begin = same_tokens // self.block_tokens
        segment = text.segment
        while segment != ROOT and self.begin[segment] >= begin:
            segment = self.parent[segment]
        self.parent.append(segment)
        self.begin.append(begin if segment != ROOT else 0)
        self.end.append(max(self.begin[-1], -(-n_tokens // self.block_tokens)))
        return Text(len(self.parent) - 1, n_tokens)


@dataclass(frozen=True, slots=True)
class Beginnings:
    """How conversations begin: a row each.

    Attributes:
        at_s: when.
        node: where.
        text: which of the texts each begins with.
    """

    at_s: Floats
    node: Ints
    text: Ints


@dataclass(frozen=True, slots=True)
class Talks:
    """What all conversations of a stream have in common.

    Attributes:
        name: of the stream.
        n_nodes: how many nodes there are.
        texts: the tree of shared texts.
        heads: those of them that conversations begin with.
        shape: how a conversation grows.
        moves: share of turns that go to another node than the turn before.
    """

    name: str
    n_nodes: int
    texts: Texts
    heads: list[Text]
    shape: Conversation
    moves: float = 0.0

    @property
    def head_tokens(self) -> Ints:
        """Tokens of each head."""
        return np.array([head.n_tokens for head in self.heads], dtype=np.int64)


def conversations(
    talks: Talks,
    begin: Callable[[int], Beginnings],
    rng: np.random.Generator,
    *,
    requests: int = 0,
    sessions: int = 0,
) -> RequestStream:
    """Conversations as they grow.

    Args:
        talks: what they have in common.
        begin: so many beginnings; `text` is a place in `talks.heads`.
        rng: what all is drawn with.
        requests: how many in all; 0 to have `sessions` conversations, however long they become.
        sessions: how many conversations.
    """
    share = 1.0
    while True:
        turns = _turns(rng, talks.shape, int(requests * share), sessions)
        drawn = _draw(talks, begin(len(turns)), turns, rng)
        kept = drawn.kept
        if int(kept.sum()) >= requests:
            break
        # Conversations that became too long end before; more of them make up for it.
        share *= 1.05 * requests / max(1, int(kept.sum()))
    if requests:
        kept &= np.cumsum(kept) <= requests
    order = np.flatnonzero(kept)[np.argsort(drawn.at_s[kept], kind="stable")]
    segments = segments_of(
        talks.texts, talks.heads, drawn.text, drawn.session[kept], (drawn.n_input + drawn.answer)[kept]
    )
    return RequestStream(
        talks.name,
        talks.texts.block_tokens,
        talks.n_nodes,
        segments,
        drawn.at_s[order],
        drawn.node[order],
        drawn.session[order],
        drawn.session[order] + len(talks.texts.parent),
        drawn.n_input[order],
        drawn.answer[order],
        talks.head_tokens[drawn.text][drawn.session][order],
        answers_follow=True,
    )


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Turns of conversations, one conversation after the other; `text` has a row for each conversation."""

    text: Ints
    session: Ints
    at_s: Floats
    node: Ints
    n_input: Ints
    answer: Ints
    kept: NDArray[np.bool_]


def _draw(talks: Talks, started: Beginnings, turns: Ints, rng: np.random.Generator) -> _Drawn:
    shape, n_nodes = talks.shape, talks.n_nodes
    session = np.repeat(np.arange(len(turns)), turns)
    first = np.cumsum(turns) - turns
    head_tokens = talks.head_tokens[started.text]
    question = sizes(rng, shape.question_tokens, shape.spread, len(session))
    answer = sizes(rng, shape.answer_tokens, shape.spread, len(session))
    n_input = _within(question + answer, session, first) + head_tokens[session] - answer
    pause_s = rng.exponential(shape.pause_s, len(session)) + answer / ANSWER_TOKENS_S
    at_s = _within(pause_s, session, first) - pause_s + started.at_s[session]
    steps = np.zeros(len(session), dtype=np.int64)
    if talks.moves and n_nodes > 1:
        steps = (rng.random(len(session)) < talks.moves) * rng.integers(1, n_nodes, len(session))
        steps[first] = 0
    node = (_within(steps, session, first) + started.node[session]) % n_nodes
    # The first turn of a text that is too long is asked all the same: the world may refuse it, the workload does not.
    kept = (n_input <= shape.longest_tokens) | (np.arange(len(session)) == first[session])
    return _Drawn(started.text, session, at_s, node, n_input, answer, kept)


def _turns(rng: np.random.Generator, shape: Conversation, requests: int, sessions: int) -> Ints:
    """Turns of each conversation; so many in all where `requests` says so."""
    if not requests:
        return rng.geometric(1 / shape.turns, sessions).astype(np.int64)
    turns = np.zeros(0, dtype=np.int64)
    while turns.sum() < requests:
        more = int((requests - turns.sum()) / shape.turns * 1.1) + 10
        turns = np.concatenate((turns, rng.geometric(1 / shape.turns, more).astype(np.int64)))
    before = np.cumsum(turns) - turns
    turns = turns[before < requests]
    turns[-1] = requests - before[before < requests][-1]
    return turns


def _within(values: NDArray[N], session: Ints, first: Ints) -> NDArray[N]:
    """Running sums of values, each session's from its first turn on."""
    sums = np.cumsum(values)
    return np.asarray(sums - (sums[first] - values[first])[session])


def segments_of(texts: Texts, heads: list[Text], text: Ints, session: Ints, reach: Ints) -> Segments:
    """The tree of texts, and after them of each conversation a segment that leaves its text where that ends.

    Args:
        texts: the tree.
        heads: what conversations begin with.
        text: of each conversation, a place in `heads`.
        session: of each request, its conversation.
        reach: of each request, tokens of prompt and answer.
    """
    parents, begins = np.zeros(len(heads), dtype=np.int64), np.zeros(len(heads), dtype=np.int64)
    for place, head in enumerate(heads):
        begin, segment = head.n_tokens // texts.block_tokens, head.segment
        while segment != ROOT and texts.begin[segment] >= begin:
            segment = texts.parent[segment]
        parents[place], begins[place] = segment, begin if segment != ROOT else 0
    ends = begins[text]
    np.maximum.at(ends, session, -(-reach // texts.block_tokens))
    parent = np.concatenate((np.array(texts.parent, dtype=np.int64), parents[text]))
    begin_at = np.concatenate((np.array(texts.begin, dtype=np.int64), begins[text]))
    end = np.concatenate((np.array(texts.end, dtype=np.int64), ends))
    lengths = end - begin_at
    return Segments(parent, begin_at, end, np.cumsum(lengths) - lengths)
