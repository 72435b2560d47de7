"""The text of an invitation: ``kvinv1`` and the signed statement with a checksum, in base32 without padding.

Case does not matter and white space is left out, so that it survives mail, line breaks and QR codes. It is a secret
until it is used up or has expired: who has it may join.
"""

import base64
import binascii
import hmac
from typing import Final

from kvnet.errors import KvnetError, UsageError
from kvnet.format.hashes import derive_key
from kvnet.trust.envelope import StatementType
from kvnet.trust.statements import Invitation, SignedStatement, open_statement

TEXT_PREFIX: Final = "kvinv1"
MAX_TEXT_CHARACTERS: Final = 6000
"""White space included. An invitation with two addresses has about 850 characters; eight long addresses 4,300."""

_CHECKSUM_BYTES: Final = 4
_CONTEXT: Final = "kvnet 2026-11 invitation text"
_HINT: Final = "copy the whole text that `kvnet invite` printed on the other machine, or have it printed anew"


def invitation_text(invitation: SignedStatement) -> str:
    """The text of a signed invitation, lower case, in one line."""
    data = invitation.envelope
    return TEXT_PREFIX + base64.b32encode(data + _checksum(data)).decode("ascii").rstrip("=").lower()


def parse_invitation_text(text: str) -> tuple[SignedStatement, Invitation]:
    """The invitation in a text made by `invitation_text`; its signature is valid, its times are not looked at.

    Raises:
        UsageError: it is no such text, or a character is wrong or missing.
    """
    if len(text) > MAX_TEXT_CHARACTERS:
        raise UsageError(
            f"expected an invitation of at most {MAX_TEXT_CHARACTERS:,} characters, found {len(text):,}", hint=_HINT
        )
    joined = "".join(text.split()).lower()
    if not joined.startswith(TEXT_PREFIX):
        raise UsageError(f"expected an invitation beginning {TEXT_PREFIX}, found {_shown(joined)}", hint=_HINT)
    body = joined.removeprefix(TEXT_PREFIX).upper()
    try:
        data = base64.b32decode(body + "=" * (-len(body) % 8))
    except (binascii.Error, ValueError) as error:
        raise UsageError("expected an invitation of the letters a-z and the digits 2-7 alone", hint=_HINT) from error
    envelope, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if not hmac.compare_digest(checksum, _checksum(envelope)):
        raise UsageError("expected an invitation whose checksum fits, found one that was cut or changed", hint=_HINT)
    try:
        statement = open_statement(envelope, kind=StatementType.INVITATION)
    except KvnetError as error:
        raise UsageError(f"an invitation that no kvnet writes: {error}", hint=_HINT) from error
    assert isinstance(statement.body, Invitation)  # noqa: S101 - the type asked for
    return statement, statement.body


def _checksum(data: bytes) -> bytes:
    return derive_key(_CONTEXT, data)[:_CHECKSUM_BYTES]


def _shown(text: str) -> str:
    """Little of it: it may be another secret."""
    return repr(text if len(text) <= 8 else text[:8] + "…")
