"""How two peers agree on a connection of its own for chunks."""

from enum import StrEnum
from typing import Annotated

import msgspec

from kvnet.protocol.messages.base import BaseMessage
from kvnet.protocol.messages.fields import RequestId, Word

MAX_CERTIFICATE_BYTES = 2048
"""A certificate for one bulk connection; ours has about 230."""

BulkName = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Certificate = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_CERTIFICATE_BYTES)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class BulkCipher(StrEnum):
    """What protects a bulk connection; a peer refuses one it does not know."""

    TLS13 = "tls13"
    """Mutual TLS 1.3 with the certificates that were exchanged."""
    NONE = "none"
    """Nothing: for a cable that both owners trust. Chunks are compared with their hashes as ever."""


class OpenBulk(BaseMessage, frozen=True, tag="open_bulk"):
    """I want to ask you for chunks over a connection of their own.

    Attributes:
        certificate: of the asking side for this connection alone, as DER.
        cipher: what the asking side wants, a `BulkCipher`.
    """

    request_id: RequestId
    certificate: Certificate
    cipher: Word


class BulkOffer(BaseMessage, frozen=True, tag="bulk_offer"):
    """Dial me, within 30 seconds.

    Attributes:
        name: of the connection; what the dialling side sends as SNI, in hexadecimal.
        certificate: of the answering side for this connection alone, as DER.
        port: where it listens, on the addresses of the control connection; 0: nowhere.
        cipher: what is used: ``none`` only when both sides want that.
    """

    request_id: RequestId
    name: BulkName
    certificate: Certificate
    port: Port
    cipher: Word


class DialBulk(BaseMessage, frozen=True, tag="dial_bulk"):
    """I cannot reach you: dial me for the connection of this name.

    Attributes:
        name: from a `BulkOffer`.
        port: where the asking side listens, on the addresses of the control connection.
    """

    request_id: RequestId
    name: BulkName
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class BulkDialled(BaseMessage, frozen=True, tag="bulk_dialled"):
    """I do; the connection comes or does not."""

    request_id: RequestId
