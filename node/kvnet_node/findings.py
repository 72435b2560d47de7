"""What a look at this machine came to."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; ``state`` is "ok", "note" or "problem", ``hint`` the next step."""

    subject: str
    state: str
    text: str
    hint: str = ""
