"""Whether a peer is there, and how it is."""

from kvnet.protocol.messages.base import BaseMessage
from kvnet.protocol.messages.fields import RequestId, Word


class Ping(BaseMessage, frozen=True, tag="ping"):
    """Are you there?"""

    request_id: RequestId


class Pong(BaseMessage, frozen=True, tag="pong"):
    """Answer to `Ping`."""

    request_id: RequestId


class Presence(BaseMessage, frozen=True, tag="presence"):
    """How I am from now on.

    Attributes:
        state: ``serving``, ``paused`` (serves nothing for now) or ``leaving`` (asleep or ended in a moment).
    """

    request_id: RequestId
    state: Word
