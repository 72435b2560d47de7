"""Why a prompt did not go on from the one before it: the first place where they part, and what kind of change it is."""

from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest

from kvnet_node.audit.prompt import Step
from kvnet_node.prompts.killers import killer


class Cause(StrEnum):
    """The first cause of a miss; where a killer of prefixes is known by that id, it is that one."""

    BILLING_LINE = "billing-line"
    DATE = "date-at-top"
    NAME = "names-at-top"
    ID = "request-id"
    STATE = "machine-state"
    COUNTER = "running-counter"
    TOOLS_ORDER = "tools-reordered"
    KEYS = "keys-reordered"
    TOOLS = "tools-changed"
    SYSTEM = "system-changed"
    REASONING = "template-rewrites-reasoning"
    REWRITTEN = "history-rewritten"
    TRUNCATED = "history-truncated"
    COMPACTED = "history-compacted"
    MODEL = "model-changed"
    IDLE = "idle"
    NEW_CONVERSATION = "new-conversation"
    NOT_CACHED = "not-cached"


_WORDS: dict[Cause, tuple[str, str]] = {
    Cause.BILLING_LINE: ("A line for accounting at the head of the system prompt", "kvnet takes it out."),
    Cause.SYSTEM: ("Another system prompt", "Put what changes after what stays."),
    Cause.COMPACTED: ("History replaced by a summary", "Nothing to do: it was meant to get shorter."),
    Cause.MODEL: ("Another model", "K/V of one model is of no use to another; keep to one for a conversation."),
    Cause.IDLE: ("Nothing was asked for a while, and the cache was gone", "kvnet keeps prefixes on disk."),
    Cause.NEW_CONVERSATION: ("A new conversation", "kvnet keeps prefixes from one conversation to the next."),
    Cause.NOT_CACHED: (
        "Repeated and still not cached; the log does not show why",
        "kvnet reuses a prefix without any marks.",
    ),
}
"""Title and remedy of what the table of killers does not have, or says for other readers."""


def title(cause: Cause) -> str:
    """What it is, in words."""
    return _WORDS[cause][0] if cause in _WORDS else killer(cause.value).title


def remedy(cause: Cause) -> str:
    """What to do about it, or what kvnet does."""
    return _WORDS[cause][1] if cause in _WORDS else killer(cause.value).remedy


_VARYING = (Cause.BILLING_LINE, Cause.ID, Cause.DATE, Cause.COUNTER, Cause.STATE, Cause.NAME, Cause.REASONING)

MENDABLE = frozenset({*_VARYING, Cause.TOOLS_ORDER, Cause.KEYS})
"""Changes that mean nothing to the model, or little."""


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two prompts part.

    Attributes:
        cause: what kind of change it is.
        parts: how many parts are equal before it.
        mended_parts: how many would be, had nothing varied by itself.
        messages: how many of these are messages.
    """

    cause: Cause
    parts: int
    mended_parts: int
    messages: int


def parting(before: Step, now: Step) -> Parting | None:
    """The first difference of a prompt from one sent before it; None when it only goes on."""
    if _begins(before, now):
        return None
    first: Cause | None = None
    parts = mended = messages = 0
    for old, new in zip_longest(before.path(), now.path()):
        if old is None:
            break
        if new is None or (old.kind, old.mended_part) != (new.kind, new.mended_part):
            first = first or _changed(old, new, before, now)
            break
        mended += old.kind != "hidden"
        messages += old.kind == "message"
        if old.part != new.part:
            first = first or _mendable(old, new)
        elif first is None:
            parts += old.kind != "hidden"
    return Parting(first, parts, mended, messages) if first is not None else None


def _begins(before: Step, now: Step) -> bool:
    """Whether a prompt only goes on from an earlier one: the usual case, seen without looking at all of it."""
    for step in now.upwards():
        if step.n_parts <= before.n_parts:
            return step.sent[-1].hash == before.sent[-1].hash
    return False


def _mendable(old: Step, new: Step) -> Cause:
    """Which of the things that vary by themselves is another one."""
    if old.kind == "tools":
        order = Cause.TOOLS_ORDER.value
        return Cause.TOOLS_ORDER if old.features.get(order) != new.features.get(order) else Cause.KEYS
    for cause in _VARYING:
        if old.features.get(cause.value) != new.features.get(cause.value):
            return cause
    return Cause.REWRITTEN


def _changed(old: Step, new: Step | None, before: Step, now: Step) -> Cause:
    if new is not None and "tools" in {old.kind, new.kind}:
        return Cause.TOOLS
    if new is not None and "system" in {old.kind, new.kind}:
        return Cause.SYSTEM
    if new is not None and any(step.part == new.part for step in before.upwards() if step.n_parts > old.n_parts):
        return Cause.TRUNCATED
    return Cause.COMPACTED if now.n_parts < before.n_parts else Cause.REWRITTEN
