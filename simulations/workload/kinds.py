"""The kinds of work a scenario can name, as streams."""

from collections.abc import Callable

import numpy as np

from kvnet.format.prefix import BLOCK_TOKENS
from simulations.scenario import Agents, Classroom, Codebase, Office, Person, Scenario, Trace
from simulations.workload.generated import NOTHING, Beginnings, Talks, Text, Texts, conversations, segments_of
from simulations.workload.recorded import recorded_stream
from simulations.workload.requests import Ints, RequestStream
from simulations.workload.sampling import sizes, times, zipf
from simulations.workload.traces import find

TEXT_SPREAD = 0.7
"""Deviation of the logarithms of the sizes of documents and projects. An assumption: a few are very long."""

QUESTION_SPREAD = 0.5
"""The same of questions about a codebase and their answers."""


def stream_of(scenario: Scenario, rng: np.random.Generator) -> RequestStream:
    """The requests of a scenario, everybody being there.

    Raises:
        UsageError, MalformedError: a trace that is not there, or does not fit.
    """
    work, n_nodes = scenario.workload, scenario.n_nodes
    if isinstance(work, Office):
        return _office(scenario.name, work, n_nodes, rng)
    if isinstance(work, Agents):
        return _agents(scenario.name, work, n_nodes, rng)
    if isinstance(work, Classroom):
        return _classroom(scenario.name, work, n_nodes, rng)
    if isinstance(work, Person):
        return _person(scenario.name, work, n_nodes, rng)
    if isinstance(work, Codebase):
        return _codebase(scenario.name, work, n_nodes, rng)
    return _trace(work, n_nodes, rng)


def _office(name: str, work: Office, n_nodes: int, rng: np.random.Generator) -> RequestStream:
    texts = Texts()
    system = texts.after(NOTHING, work.system_tokens) if work.system_tokens else NOTHING
    lengths = sizes(rng, work.document_tokens, TEXT_SPREAD, work.documents)
    documents = [texts.after(system, int(length)) for length in lengths]
    begin = _over_days(rng, work, n_nodes, lambda count: zipf(rng, work.documents, work.popularity, count))
    talks = Talks(name, n_nodes, texts, documents, work.conversation)
    return conversations(talks, begin, rng, requests=work.requests)


def _agents(name: str, work: Agents, n_nodes: int, rng: np.random.Generator) -> RequestStream:
    texts = Texts()
    lengths = sizes(rng, work.project_tokens, TEXT_SPREAD, work.projects)
    heads: list[Text] = []
    for head_tokens in sizes(rng, work.head_tokens, TEXT_SPREAD / 2, work.kinds):
        agent = texts.after(NOTHING, int(head_tokens))
        heads += [texts.after(agent, int(length)) for length in lengths]

    def which(count: int) -> Ints:
        kind = zipf(rng, work.kinds, work.popularity, count)
        return kind * work.projects + zipf(rng, work.projects, work.popularity, count)

    begin = _over_days(rng, work, n_nodes, which)
    talks = Talks(name, n_nodes, texts, heads, work.conversation)
    return conversations(talks, begin, rng, requests=work.requests)


def _person(name: str, work: Person, n_nodes: int, rng: np.random.Generator) -> RequestStream:
    texts = Texts()
    system = texts.after(NOTHING, work.system_tokens) if work.system_tokens else NOTHING
    lengths = sizes(rng, work.project_tokens, TEXT_SPREAD, work.projects)
    projects = [texts.after(system, int(length)) for length in lengths]
    begin = _over_days(rng, work, n_nodes, lambda count: zipf(rng, work.projects, work.popularity, count))
    talks = Talks(name, n_nodes, texts, projects, work.conversation, work.moves)
    return conversations(talks, begin, rng, requests=work.requests)


def _over_days(
    rng: np.random.Generator, work: Office | Agents | Person, n_nodes: int, which: Callable[[int], Ints]
) -> Callable[[int], Beginnings]:
    """Conversations that begin over some days, at any node."""

    def begin(count: int) -> Beginnings:
        at_s = times(rng, count, work.days, working_hours=work.working_hours)
        return Beginnings(at_s, rng.integers(n_nodes, size=count), which(count))

    return begin


def _classroom(name: str, work: Classroom, n_nodes: int, rng: np.random.Generator) -> RequestStream:
    texts = Texts()
    system = texts.after(NOTHING, work.system_tokens) if work.system_tokens else NOTHING
    lengths = sizes(rng, work.material_tokens, TEXT_SPREAD, work.lessons)
    materials = [texts.after(system, int(length)) for length in lengths]

    def begin(count: int) -> Beginnings:
        lesson = np.arange(count) // n_nodes
        at_s = lesson * work.lesson_s + rng.random(count) * work.begin_within_s
        return Beginnings(at_s, np.arange(count) % n_nodes, lesson)

    talks = Talks(name, n_nodes, texts, materials, work.conversation)
    return conversations(talks, begin, rng, sessions=work.lessons * n_nodes)


def _codebase(name: str, work: Codebase, n_nodes: int, rng: np.random.Generator) -> RequestStream:
    """Every version leaves the one before it in the block of the edit; every question follows the version in force."""
    n_queries = max(1, round(work.days * work.queries_a_day))
    n_edits = round(work.days * work.edits_a_day)
    queries_s = np.sort(times(rng, n_queries, work.days, working_hours=work.working_hours))
    edits_s = np.sort(times(rng, n_edits, work.days, working_hours=work.working_hours))
    question = sizes(rng, work.question_tokens, QUESTION_SPREAD, n_queries)
    answer = sizes(rng, work.answer_tokens, QUESTION_SPREAD, n_queries)
    texts = Texts()
    versions = [texts.after(NOTHING, work.codebase_tokens)]
    for _ in range(n_edits):
        before = versions[-1]
        place = int((work.edit_from + rng.random() * (1 - work.edit_from)) * before.n_tokens)
        change = int(rng.integers(-work.edit_tokens, work.edit_tokens + 1))
        versions.append(texts.instead(before, place, max(place + 1, before.n_tokens + change)))
    version = np.searchsorted(edits_s, queries_s, side="right")
    codebase = np.array([each.n_tokens for each in versions], dtype=np.int64)[version]
    n_input = codebase + question
    session = np.arange(n_queries)
    return RequestStream(
        name,
        texts.block_tokens,
        n_nodes,
        segments_of(texts, versions, version, session, n_input + answer),
        queries_s,
        rng.integers(n_nodes, size=n_queries),
        session,
        session + len(texts.parent),
        n_input,
        answer,
        codebase,
        answers_follow=True,
    )


def _trace(work: Trace, n_nodes: int, rng: np.random.Generator) -> RequestStream:
    return recorded_stream(
        find(work.file),
        n_nodes,
        block_tokens=BLOCK_TOKENS,
        rng=rng,
        moves=work.moves,
        stretch=work.stretch,
        limit=work.requests,
    )
