"""What an operation reports while it works: progress, streamed text and remarks.

Events travel as JSON objects from the process that works to the process that shows them, so they hold only plain
values. They never hold a prompt; ``TextDelta`` holds generated text and goes to the asker alone, never to a log.
"""

from typing import Any, Literal

import msgspec


class PeerProgress(msgspec.Struct, frozen=True):
    """What one peer has brought so far.

    Attributes:
        peer: its peer id.
        bytes: verified bytes.
        chunks: in so many chunks.
        rate_bytes_s: what it delivers of late.
        path: "bulk", "stream", or "" before a channel to it is open.
        name: what the machine is called; "" when it is no member.
    """

    peer: str
    bytes: int
    chunks: int
    rate_bytes_s: float
    path: str
    name: str = ""


class Progress(msgspec.Struct, frozen=True, tag_field="type", tag="progress"):
    """How far one stage of an operation is.

    Attributes:
        stage: a short word ("prefill", "fetch", "verify"); progress of one stage replaces the earlier one.
        done: work finished, in ``unit``.
        total: work in all, in ``unit``; 0 when it is not known.
        unit: "tokens", "bytes", "chunks" or "files".
        text: a few words for a person, or "".
        rate: units a second of late; 0 when it is not known.
        peers: who brings it, and how much; only for transfers.
    """

    stage: str
    done: int
    total: int = 0
    unit: str = ""
    text: str = ""
    rate: float = 0.0
    peers: list[PeerProgress] = []


class TextDelta(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """The next piece of generated text."""

    text: str


class Note(msgspec.Struct, frozen=True, tag_field="type", tag="note"):
    """One remark for the person at the keyboard, such as the plan of an ``add`` before it starts.

    Attributes:
        text: the remark, one line or a few.
        level: "info" or "warning"; warnings are shown even with ``--quiet``.
        data: the same as numbers, for ``--json``.
    """

    text: str
    level: Literal["info", "warning"] = "info"
    data: dict[str, Any] = {}


Event = Progress | TextDelta | Note
