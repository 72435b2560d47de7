"""The first three messages of each side: what it speaks and can do, and which namespaces it is in."""

from enum import StrEnum
from typing import Annotated

import msgspec

from kvnet.protocol.messages.base import BaseMessage
from kvnet.protocol.messages.fields import Bytes32, Word

PROTOCOL_VERSION = 1
"""The only one this build speaks."""

# Of one hello; far beyond what any version says, so that the message stays small.
MAX_VERSIONS = 8
MAX_CAPABILITIES = 32
MAX_AGENT_LENGTH = 128
"""Characters of what a peer calls its program."""


class Capability(StrEnum):
    """What a peer can do beyond the handshake; a peer ignores those it does not know."""

    SERVE = "serve"
    """Answers lookups and serves manifests, chunk lists and chunks."""
    BULK = "bulk"
    """Understands `OpenBulk` and `DialBulk`."""
    BULK_CANCEL = "bulk_cancel"
    """Understands `CancelChunks` on a bulk connection."""
    HAVE = "have"
    """Understands `GetHave`."""
    STATEMENTS = "statements"
    """Understands `Tell` and `GetStatements`; its provider records say all that it holds."""
    ENROL = "enrol"
    """Understands `Enrol`."""
    MODELS = "models"
    """Understands `GetModels` and `GetSample`."""
    PRESENCE = "presence"
    """Understands `Presence`."""


class Hello(BaseMessage, frozen=True, tag="hello"):
    """First message of each side.

    Attributes:
        versions: protocol versions the sender speaks, ascending; the highest that both speak is used.
        capabilities: what the sender can do.
        agent: program and version in words, for people; never acted on.
    """

    versions: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=1, lt=2**16)], ...], msgspec.Meta(min_length=1, max_length=MAX_VERSIONS)
    ]
    capabilities: Annotated[tuple[Word, ...], msgspec.Meta(max_length=MAX_CAPABILITIES)]
    agent: Annotated[str, msgspec.Meta(max_length=MAX_AGENT_LENGTH)]


class Challenge(BaseMessage, frozen=True, tag="challenge"):
    """Second message of each side: the nonce the peer's proof must cover."""

    nonce: Bytes32


class Proof(BaseMessage, frozen=True, tag="proof"):
    """Third message of each side: its proof of membership, see `kvnet.protocol.membership`."""

    entries: Annotated[tuple[Bytes32, ...], msgspec.Meta(min_length=8, max_length=8)]
