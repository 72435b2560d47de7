"""All that may come on the control stream: who asks what, and what answers it."""

from kvnet.protocol.messages.artifacts import (
    ChunkListReply,
    GetChunkList,
    GetHave,
    GetManifest,
    Have,
    Lookup,
    LookupReply,
    ManifestReply,
)
from kvnet.protocol.messages.base import decode_body
from kvnet.protocol.messages.bulk import BulkDialled, BulkOffer, DialBulk, OpenBulk
from kvnet.protocol.messages.enrolment import Enrol, Enrolled
from kvnet.protocol.messages.handshake import Challenge, Hello, Proof
from kvnet.protocol.messages.liveness import Ping, Pong, Presence
from kvnet.protocol.messages.models import GetModels, GetSample, Models, Sample
from kvnet.protocol.messages.refusals import Refused
from kvnet.protocol.messages.statements import GetStatements, Statements, Tell, Told

Handshake = Hello | Challenge | Proof
ArtifactRequest = Lookup | GetManifest | GetChunkList | GetHave
BulkRequest = OpenBulk | DialBulk
MemberRequest = Tell | GetStatements | GetModels | GetSample
"""What members ask each other apart from artifacts; each names the slot of their namespace."""
NodeRequest = Presence | Enrol
"""What any connected peer may say."""
Request = ArtifactRequest | BulkRequest | MemberRequest | NodeRequest | Ping
Reply = (
    LookupReply
    | ManifestReply
    | ChunkListReply
    | Have
    | BulkOffer
    | BulkDialled
    | Told
    | Statements
    | Models
    | Sample
    | Enrolled
    | Refused
    | Pong
)
Message = Handshake | Request | Reply


def decode_message(body: bytes) -> Message:
    """A message of the control stream.

    Raises:
        ProtocolViolationError: anything else.
    """
    message: Message = decode_body(Message, body, "control message")
    return message
