"""Prompts as an engine takes and tokenizes them, and where others may part from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

JsonObject = Mapping[str, Any]
"""A chat message or a set of template inputs: whatever JSON holds."""

FROZEN_MOMENT = "strftime_now"
"""Template input: an ISO 8601 moment at which a template's ``strftime_now`` stands still."""


def frozen_template_inputs(moment: str) -> dict[str, str]:
    """Template inputs that would vary by themselves, fixed at ``moment`` (ISO 8601, such as ``2026-11-29T14:00:00``).

    A template that prints today's date prints that one, so that its rendering, and with it the tokens, stays the same.
    """
    return {FROZEN_MOMENT: moment}


class PromptKind(StrEnum):
    """Which of the two completion endpoints a body is for."""

    CHAT = "chat"
    TEXT = "text"


class BoundaryKind(StrEnum):
    """Why a place in a prompt is one where other prompts may part from it."""

    TOOLS = "tools"
    SYSTEM = "system"
    MESSAGE = "message"
    MARK = "mark"
    STABLE = "stable"


@dataclass(frozen=True, slots=True)
class Boundary:
    """The first ``n_tokens`` tokens of a prompt are those up to the end of something.

    Attributes:
        n_tokens: from the start; at least 1, at most the prompt.
        kind: what ends there.
        n_messages: how many of the prompt's messages lie before it.
    """

    n_tokens: int
    kind: BoundaryKind
    n_messages: int


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """A prompt to be tokenized as the completion endpoints would.

    Attributes:
        kind: of the body.
        body: the JSON body of an OpenAI-style request: ``messages`` and ``tools``, or ``prompt``.
        template_inputs: frozen inputs of the chat template; empty to render as of now.
        marks: message counts after which the client asked for a cache breakpoint, ascending.
    """

    kind: PromptKind
    body: bytes
    template_inputs: JsonObject
    marks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A tokenized prompt.

    Attributes:
        tokens: all token ids, from one tokenization, ready for the answer.
        boundaries: where other prompts may part from it, ascending by tokens.
        stable_tokens: how many tokens the next turn of this conversation will begin with, whatever the answer; where
            the template rewrites earlier reasoning, the tokens before it.
        live_tokens: of how many tokens, from the start, a live cache holds the K/V at the moment.
    """

    tokens: tuple[int, ...]
    boundaries: tuple[Boundary, ...]
    stable_tokens: int
    live_tokens: int
