"""How somebody with an invitation becomes a member."""

from typing import Annotated

import msgspec

from kvnet.protocol.messages.base import BaseMessage
from kvnet.protocol.messages.fields import Bytes32, RequestId
from kvnet.protocol.messages.statements import Envelopes


class Enrol(BaseMessage, frozen=True, tag="enrol"):
    """I have an invitation of yours and would join.

    Attributes:
        invitation: its id.
        proof: that the sender has its secret, see `kvnet.protocol.enrolment`.
        publisher: publisher id of the sender.
        signature: by that key, over the same as the proof.
        label: what the sender calls itself.
    """

    request_id: RequestId
    invitation: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    proof: Bytes32
    publisher: Bytes32
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
    label: Annotated[str, msgspec.Meta(max_length=64)]


class Enrolled(BaseMessage, frozen=True, tag="enrolled"):
    """Welcome.

    Attributes:
        namespace: the namespace file, with its secrets.
        statements: the chain of memberships from the founder to the new member, and what else counts now.
    """

    request_id: RequestId
    namespace: Annotated[bytes, msgspec.Meta(min_length=1, max_length=4096)]
    statements: Envelopes
