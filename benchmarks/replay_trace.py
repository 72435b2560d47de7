"""The shape of a recorded agent trace, as requests with synthetic text: the same blocks are shared, nothing is said.

The recorded prompts have tens of thousands of tokens. They are scaled by taking some recorded blocks together as one,
and giving each of these a text of its own; two prompts share as many of them as the recorded ones share.
"""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXCERPT = Path(__file__).parent / "data" / "agent_sessions_excerpt.jsonl"

_TEXT = (
    "the file line test name value path list read write change error return call build open find small large first "
    "second other next time state block table index count order print check model token node peer store fetch"
)
_WORDS = _TEXT.split()

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Scale:
    """How a trace is made smaller.

    Attributes:
        blocks: recorded blocks taken together as one.
        characters: of the text that stands for it.
    """

    blocks: int = 16
    characters: int = 64


@dataclass(frozen=True, slots=True)
class Request:
    """One request to send.

    Attributes:
        session: whose conversation it is.
        at_s: when it was sent, in seconds since its session began.
        node: which of the nodes it goes to.
        messages: OpenAI chat messages.
    """

    session: str
    at_s: float
    node: int
    messages: tuple[tuple[str, str], ...]

    @property
    def as_json(self) -> list[Message]:
        """The messages as they are sent."""
        return [{"role": role, "content": content} for role, content in self.messages]


def requests(scale: Scale, *, nodes: int = 2, seed: int = 0, file: Path = EXCERPT) -> list[Request]:
    """The requests of all sessions by time, each to one of the nodes: as when somebody works on several machines.

    Args:
        scale: how much smaller.
        nodes: how many nodes; a turn goes to any of them.
        seed: of that choice; the same one gives the same requests.
        file: the recorded sessions.
    """
    found: list[tuple[float, str, tuple[tuple[str, str], ...]]] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        session = json.loads(line)
        found += ((at_s, session["id"], messages) for at_s, messages in _session(session, scale))
    chosen = random.Random(seed)
    found.sort(key=lambda each: (each[0], each[1]))
    return [Request(name, at_s, chosen.randrange(nodes), messages) for at_s, name, messages in found]


def _session(session: dict[str, Any], scale: Scale) -> Iterable[tuple[float, tuple[tuple[str, str], ...]]]:
    head_tokens = session["tool_tokens"] + session["system_tokens"]
    head = max(1, head_tokens // session["block_size"] // scale.blocks)
    earlier: list[_Cut] = []
    for request in session["requests"]:
        blocks = _scaled(request["blocks"], scale.blocks)
        cut = _cut(blocks, min(head, len(blocks)), earlier)
        earlier.append(cut)
        texts = [
            "".join(text_of(session["id"], block, scale.characters) for block in blocks[begin:end])
            for begin, end in zip((0, *cut.ends), cut.ends, strict=False)
        ]
        yield request["t"], tuple(("user" if index else "system", text) for index, text in enumerate(texts))


@dataclass(frozen=True, slots=True)
class _Cut:
    """Blocks of a prompt, and where its messages end."""

    blocks: tuple[tuple[int, ...], ...]
    ends: tuple[int, ...]


def _cut(blocks: tuple[tuple[int, ...], ...], head: int, earlier: Sequence[_Cut]) -> _Cut:
    """Messages as in the earlier prompt that has most in common with this one, then all that is new as one."""
    common, like = max(
        ((common_length(blocks, each.blocks), index) for index, each in enumerate(earlier)), default=(0, -1)
    )
    ends = [end for end in earlier[like].ends if end <= common and end < len(blocks)] if like >= 0 else []
    if not ends and head < len(blocks):
        ends = [head]
    return _Cut(blocks, (*ends, len(blocks)))


def _scaled(runs: Sequence[Sequence[int]], blocks: int) -> tuple[tuple[int, ...], ...]:
    ids = [first + step for first, count in runs for step in range(count)]
    whole = len(ids) // blocks * blocks
    return tuple(tuple(ids[begin : begin + blocks]) for begin in range(0, whole or len(ids), blocks))


def text_of(session: str, block: Sequence[int], characters: int) -> str:
    """The text that stands for a block: the same for the same block of the same session, of an exact length."""
    words = random.Random(f"{session}/{list(block)}")
    text = ""
    while len(text) < characters:
        text += words.choice(_WORDS) + " "
    return text[: characters - 1] + " "


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many elements two sequences share from their beginning."""
    for index, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return index
    return min(len(one), len(other))


# --- what can be reused at all ---


def symbols(messages: Sequence[tuple[str, str]]) -> list[str]:
    """A prompt as a chat template prints it: one symbol for each mark and each character."""
    found = ["<s>"]
    for role, content in messages:
        found += ["<|start|>", *role, "\n", *content, "<|end|>", "\n"]
    return [*found, "<|start|>", *"assistant", "\n"]


def shared(wanted: Sequence[Request], *, across_nodes: bool) -> list[tuple[int, int]]:
    """Of each prompt, how many symbols an earlier one began with, and how many it has.

    Args:
        wanted: in the order in which they are sent.
        across_nodes: earlier requests to any node count; otherwise those to the same node.
    """
    before: list[tuple[int, list[str]]] = []
    found = []
    for request in wanted:
        prompt = symbols(request.messages)
        common = (common_length(prompt, other) for node, other in before if across_nodes or node == request.node)
        found.append((max(common, default=0), len(prompt)))
        before.append((request.node, prompt))
    return found
