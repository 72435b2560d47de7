"""The known killers of shared prefixes: what each is, why it kills, what to do, and how it is found.

A killer is found in one request, by what probably varies; between two requests that followed each other, by what did;
or in prompts, by what the chat template made of them. Nothing here changes a request.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from kvnet.engine.prompts import BoundaryKind
from kvnet_node.prompts import changes
from kvnet_node.prompts.changes import Change
from kvnet_node.prompts.compare import Place, Prompt, compare, place
from kvnet_node.prompts.normalise import Removed
from kvnet_node.prompts.outline import Outline
from kvnet_node.prompts.sections import ANSWER
from kvnet_node.prompts.spans import SpanKind, volatile_spans

MAX_FINDINGS = 5
"""Places shown of one killer in one request."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A killer, found.

    Attributes:
        killer: its id.
        words: what was found, without any of the request's text.
        place: where; ``None`` when it is in no text of the request.
        certain: it was seen to vary, instead of being likely to.
        removed: the node takes it out before it makes a prompt of the request.
    """

    killer: str
    words: str
    place: Place | None = None
    certain: bool = False
    removed: bool = False


@dataclass(frozen=True, slots=True)
class Killer:
    """A known cause of prompts that share less than they could.

    Attributes:
        id: a stable word for programs.
        title: what it is.
        why: why it kills.
        remedy: what to do.
        between: finds it between two requests; ``None`` when that says nothing.
        span: the kind of text that gives it away in a single request; ``None`` when there is none.
        in_prompt: finds it in one prompt.
        between_prompts: finds it between two prompts of the same texts.
        general: it is told only of texts that no other killer explains.
    """

    id: str
    title: str
    why: str
    remedy: str
    between: Callable[[Outline, Outline], Change | None] | None = None
    span: SpanKind | None = None
    in_prompt: Callable[[Prompt], str] | None = None
    between_prompts: Callable[[Prompt, Prompt], str] | None = None
    general: bool = False


def _rewritten_reasoning(prompt: Prompt) -> str:
    """What the template will render otherwise next time, in words; "" for nothing."""
    messages = [mark for mark in prompt.prepared.boundaries if mark.kind is BoundaryKind.MESSAGE]
    end = max((mark.n_tokens for mark in messages), default=0)
    lost = end - prompt.prepared.stable_tokens
    return f"the next turn renders the last {lost:,} tokens of this conversation otherwise" if lost > 0 else ""


def _rendered_otherwise(earlier: Prompt, later: Prompt) -> str:
    """Where a template renders the same message otherwise once others follow it, in words; "" for nowhere."""
    found = compare(earlier, later)
    if not found.parts or not found.in_template or found.section == ANSWER or _same(earlier, later):
        return ""
    return f"{found.section} is the same in both requests and rendered otherwise in the later one"


def _varying_template(earlier: Prompt, later: Prompt) -> str:
    """Where the same request gives other tokens at another moment, in words; "" for nowhere."""
    found = compare(earlier, later)
    if not found.parts or not _same(earlier, later):
        return ""
    return f"the template itself prints what varies, in {found.section}, after {found.common_tokens:,} tokens"


def _same(earlier: Prompt, later: Prompt) -> bool:
    return earlier.sent == later.sent


KILLERS: tuple[Killer, ...] = (
    Killer(
        "billing-line",
        "A line for accounting at the head of the system prompt",
        "Some agents put x-anthropic-billing-header first in the system prompt; one of its values is another one with "
        "every request, so everything after it is new.",
        "The node takes it out (prompt.remove_billing_line). For other servers: CLAUDE_CODE_ATTRIBUTION_HEADER=0.",
        between=changes.billing_changed,
    ),
    Killer(
        "date-at-top",
        "A date or time before the conversation",
        "A time changes with every request and a date every day; all tools and messages after it are computed again.",
        "Put it at the end of the last user message, or leave it out; at least no finer than the day.",
        between=partial(changes.span_changed, SpanKind.DATE),
        span=SpanKind.DATE,
    ),
    Killer(
        "names-at-top",
        "A person, machine or folder before the conversation",
        "User names, host names and working directories are others on every machine and in every project, so that "
        "nobody shares what follows them.",
        "Move them behind tools and instructions, into the first user message.",
        between=partial(changes.span_changed, SpanKind.NAME),
        span=SpanKind.NAME,
    ),
    Killer(
        "request-id",
        "An id of the request or session",
        "Request ids, session ids, UUIDs and nonces never come twice.",
        "Send them as HTTP headers or as metadata of the request, not in the prompt.",
        between=partial(changes.span_changed, SpanKind.ID),
        span=SpanKind.ID,
    ),
    Killer(
        "machine-state",
        "The state of a repository before the conversation",
        "The branch, the last commits and changed files are others after every step of the work.",
        "Put it into a user message when it is asked for, or let a tool answer it.",
        between=partial(changes.span_changed, SpanKind.STATE),
        span=SpanKind.STATE,
    ),
    Killer(
        "running-counter",
        "A counter before the end",
        "Tokens left, turn numbers and budgets are others with every request.",
        "Append it to the newest message only, and leave it there.",
        between=partial(changes.span_changed, SpanKind.COUNTER),
        span=SpanKind.COUNTER,
    ),
    Killer(
        "tools-reordered",
        "Tools in changing order",
        "Tools collected from a set, a map or several servers come in another order each time; templates print them "
        "as they come.",
        "Sort tools by name before sending them.",
        between=changes.tools_reordered,
    ),
    Killer(
        "tools-changed",
        "Tools that come and go",
        "Tools stand at the head of a prompt; one more or less changes everything after it.",
        "Keep the list of tools the same for a whole conversation; wait for tool servers before the first request.",
        between=changes.tools_changed,
    ),
    Killer(
        "keys-reordered",
        "JSON keys in changing order",
        "Schemas and arguments written from unordered maps say the same in other characters, and templates print them "
        "as they come.",
        "Write JSON with sorted keys and fixed spacing, and send a call's arguments back as they were received.",
        between=changes.keys_reordered,
    ),
    Killer(
        "history-rewritten",
        "An earlier message changed",
        "Reminders added to and removed from old messages, shortened tool results and edited answers change what was "
        "computed already.",
        "Only append. What has been sent stays as it was sent.",
        between=changes.history_rewritten,
        general=True,
    ),
    Killer(
        "history-truncated",
        "Oldest messages dropped",
        "A sliding window of messages gives every request another beginning, one that no request had before.",
        "Drop many messages at once and seldom, or summarise; not one with each turn.",
        between=changes.history_truncated,
    ),
    Killer(
        "parts-reordered",
        "Paragraphs or documents in changing order",
        "Retrieved documents sorted by score, and parts of a prompt taken from a map, come in another order each time.",
        "Sort documents by an id that stays, or put those that stay first.",
        between=changes.paragraphs_reordered,
    ),
    Killer(
        "parts-sampled",
        "A part of the system prompt drawn anew",
        "Examples, hints or memories chosen for each request change the prompt before the conversation.",
        "Choose them once for a conversation, or put them into the newest message.",
        between=changes.paragraphs_sampled,
        general=True,
    ),
    Killer(
        "white-space",
        "White space, line ends or letters encoded otherwise",
        "The same words with other spaces, line ends or Unicode forms are other tokens.",
        "Read and write texts in one way: LF line ends, no trailing spaces, NFC.",
        between=changes.whitespace_changed,
    ),
    Killer(
        "template-rewrites-reasoning",
        "A template that rewrites earlier reasoning",
        "Templates of reasoning models leave out the reasoning of earlier turns, so the next turn does not begin with "
        "what was computed for this one.",
        "Nothing to do: a boundary is kept before it, and that far the next turn shares.",
        in_prompt=_rewritten_reasoning,
        between_prompts=_rendered_otherwise,
    ),
    Killer(
        "template-prints-the-time",
        "A template that prints the date",
        "Some chat templates put today's date at the head of every prompt (strftime_now).",
        "Named contexts keep the date of their making. For others: the prefix lasts until midnight.",
        between_prompts=_varying_template,
    ),
)
"""All of them, the most usual first."""

_BY_ID = {killer.id: killer for killer in KILLERS}


def killer(id_: str) -> Killer:
    """The killer of this id."""
    return _BY_ID[id_]


def in_request(of: Outline, removed: Sequence[Removed] = ()) -> list[Finding]:
    """What in one request probably varies from the next, before its conversation; the order is that of the texts.

    Args:
        of: the request, as it was sent but without what was removed.
        removed: what normalising took out of it.
    """
    found = removed_findings(removed)
    shown: Counter[SpanKind] = Counter()
    for kind, where in _spans(of):
        shown[kind] += 1
        if shown[kind] <= MAX_FINDINGS:
            found.append(Finding(kind.value, "probably another one next time", where))
    return found


def removed_findings(removed: Sequence[Removed]) -> list[Finding]:
    """What normalising took out, as findings."""
    return [
        Finding("billing-line", f"{each.characters} characters, in {each.where}", certain=True, removed=True)
        for each in removed
    ]


def between_requests(earlier: Outline, later: Outline) -> list[Finding]:
    """What made a request differ from the one before it, in the order of ``KILLERS``; certain, all of it."""
    found = [
        (each, change)
        for each in KILLERS
        if each.between is not None and (change := each.between(earlier, later)) is not None
    ]
    explained = {change.place.path for each, change in found if not each.general}
    return [
        Finding(each.id, change.words, change.place, certain=True)
        for each, change in found
        if not each.general or change.place.path not in explained
    ]


def in_prompt(prompt: Prompt) -> list[Finding]:
    """What the template will do to this prompt in the next turn."""
    return [
        Finding(each.id, words, certain=True)
        for each in KILLERS
        if each.in_prompt is not None and (words := each.in_prompt(prompt))
    ]


def between_prompts(earlier: Prompt, later: Prompt) -> list[Finding]:
    """What the template did to texts that are the same in two prompts."""
    return [
        Finding(each.id, words, certain=True)
        for each in KILLERS
        if each.between_prompts is not None and (words := each.between_prompts(earlier, later))
    ]


def _spans(of: Outline) -> Iterator[tuple[SpanKind, Place]]:
    for part in of.head:
        for piece in part.pieces:
            for span in volatile_spans(piece.text):
                yield span.kind, place(part, piece, span.start)
