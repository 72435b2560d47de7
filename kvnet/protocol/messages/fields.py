"""Types of fields that messages of several conversations have, each with its bounds."""

from typing import Annotated

import msgspec

from kvnet.trust.statements import MAX_STATEMENT_BYTES

MAX_SLOT = 7
"""A proof has 8 entries, so a session has slots 0 to 7."""
MAX_WORD_LENGTH = 64
"""Characters of a capability or of another name that the protocol gives."""
MAX_REASON_LENGTH = 32
"""Characters of the reason of a refusal."""

Bytes32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
RequestId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Slot = Annotated[int, msgspec.Meta(ge=0, le=MAX_SLOT)]
ChunkIndex = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Word = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_WORD_LENGTH, pattern=r"\A[a-z0-9][a-z0-9._+/-]*\Z")]
Envelope = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_STATEMENT_BYTES + 256)]
Reason = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_REASON_LENGTH, pattern=r"\A[a-z_]+\Z")]
