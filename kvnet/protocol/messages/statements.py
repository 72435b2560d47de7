"""How members pass on what has been signed: news as it comes, and all of it to who asks."""

from typing import Annotated

import msgspec

from kvnet.protocol.messages.base import BaseMessage
from kvnet.protocol.messages.fields import Envelope, RequestId, Slot

MAX_TOLD = 64
"""Statements in one message; their bytes have a limit of their own."""
MAX_TOLD_BYTES = 192 * 1024
"""Bytes of statements in one message: what a frame leaves with room to spare."""
MAX_KNOWN = 4096
"""Statements one side says it knows when it asks for others."""
KNOWN_SIZE_BYTES = 8
"""First bytes of a statement's hash: who has two with the same beginning asks for one in vain, until it expires."""

Envelopes = Annotated[tuple[Envelope, ...], msgspec.Meta(max_length=MAX_TOLD)]


class Tell(BaseMessage, frozen=True, tag="tell"):
    """New statements of the namespace's members, provider records among them. They are checked one by one, later."""

    request_id: RequestId
    slot: Slot
    statements: Envelopes


class Told(BaseMessage, frozen=True, tag="told"):
    """Received; says nothing about whether any of it counts."""

    request_id: RequestId


class GetStatements(BaseMessage, frozen=True, tag="get_statements"):
    """Send the statements of this namespace that I do not know.

    Attributes:
        known: the first 8 bytes of the BLAKE3 hash of each envelope the asking side has, ascending.
    """

    request_id: RequestId
    slot: Slot
    known: Annotated[
        tuple[Annotated[bytes, msgspec.Meta(min_length=KNOWN_SIZE_BYTES, max_length=KNOWN_SIZE_BYTES)], ...],
        msgspec.Meta(max_length=MAX_KNOWN),
    ]


class Statements(BaseMessage, frozen=True, tag="statements"):
    """These; ask again when there are more."""

    request_id: RequestId
    statements: Envelopes
    more: bool
