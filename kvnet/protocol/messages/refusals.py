"""What answers a request that is not granted."""

from enum import StrEnum

from kvnet.protocol.messages.base import BaseMessage
from kvnet.protocol.messages.fields import Reason, RequestId


class RefusalReason(StrEnum):
    """Why a request is not granted; a peer treats one it does not know like ``busy``."""

    UNKNOWN = "unknown"
    """Nothing of that name in a namespace both are in. One reason for: no such slot, a slot that is not proven, no such
    artifact; whoever lacks the namespace cannot tell them apart."""
    NOT_HELD = "not_held"
    """The artifact is known, that part of it is not held here."""
    BUSY = "busy"
    """Too many requests of this peer at once or in this second; ask again later or elsewhere."""
    NOT_SERVING = "not_serving"
    """This peer serves nothing now."""
    CANCELLED = "cancelled"
    """Whoever asked has taken it back."""


class Refused(BaseMessage, frozen=True, tag="refused"):
    """The answer to a request that is not granted; `reason` is a `RefusalReason` or one of a later version."""

    request_id: RequestId
    reason: Reason
