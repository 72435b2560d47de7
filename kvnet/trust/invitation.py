"""The text of an invitation: ``kvinv1`` and the signed statement with a checksum, in base32 without padding.

Case does not matter, and whatever is neither letter nor digit is left out, so that it survives mail, line breaks, the
quotes and marks that chat programs make, and QR codes; so do words before and after it. It is a secret until it is used
up or has expired: who has it may join.
"""

import base64
import binascii
import hmac
import re
from typing import Final

from kvnet.errors import KvnetError, UsageError, elsewhere
from kvnet.format.hashes import derive_key
from kvnet.trust.envelope import StatementType
from kvnet.trust.statement_bodies import Invitation
from kvnet.trust.statements import SignedStatement, open_statement

TEXT_PREFIX: Final = "kvinv1"
"""Every invitation's text begins so."""
MAX_TEXT_CHARACTERS: Final = 6000
"""White space included. An invitation with two addresses has about 850 characters; eight long addresses 4,300."""

MAX_WORDS_AFTER: Final = 16
"""Words behind the text that are tried without."""

_CHECKSUM_BYTES: Final = 4
_CONTEXT: Final = "kvnet 2026-11 invitation text"
_HINT: Final = (
    f"copy the whole text that `{elsewhere('kvnet invite')}` printed on the other machine, or have it printed anew"
)
_OTHER_VERSION: Final = re.compile(r"kvinv[02-9]")


def invitation_text(invitation: SignedStatement) -> str:
    """The text of a signed invitation, lower case, in one line."""
    data = invitation.envelope
    return TEXT_PREFIX + base64.b32encode(data + _checksum(data)).decode("ascii").rstrip("=").lower()


def begins_invitation(text: str) -> bool:
    """Whether an invitation begins in a text, which may be broken, quoted or have words around it."""
    return TEXT_PREFIX in "".join(filter(str.isalnum, text.lower()))


def parse_invitation_text(text: str) -> tuple[SignedStatement, Invitation]:
    """The invitation in a text made by `invitation_text`; its signature is valid, its times are not looked at.

    Raises:
        UsageError: it is no such text, or a character is wrong or missing.
    """
    if len(text) > MAX_TEXT_CHARACTERS:
        raise UsageError(
            f"expected an invitation of at most {MAX_TEXT_CHARACTERS:,} characters, found {len(text):,}", hint=_HINT
        )
    envelope = _envelope_in(["".join(filter(str.isalnum, word)) for word in text.lower().split()])
    try:
        statement = open_statement(envelope, kind=StatementType.INVITATION)
    except KvnetError as error:
        raise UsageError(f"an invitation that no kvnet writes: {error}", hint=_HINT) from error
    assert isinstance(statement.body, Invitation)  # noqa: S101 - the type asked for
    return statement, statement.body


def _envelope_in(words: list[str]) -> bytes:
    """The signed statement in a text that was split at white space, which may be inside it.

    Raises:
        UsageError: there is none, or it was damaged.
    """
    joined = "".join(words)
    _, found, body = joined.partition(TEXT_PREFIX)
    if not found:
        other = _OTHER_VERSION.search(joined)
        if other is not None:
            raise UsageError(
                f"expected an invitation beginning {TEXT_PREFIX}, found {other[0]}: another version of kvnet made it",
                hint="run the same kvnet on both machines",
            )
        raise UsageError(f"expected an invitation beginning {TEXT_PREFIX}, found {_shown(joined)}", hint=_HINT)
    envelope = _checked(body)
    for word in reversed(words[-MAX_WORDS_AFTER:]):
        if envelope is not None:
            break
        body = body[: len(body) - len(word)]
        envelope = _checked(body)
    if envelope is None:
        n_characters = len(TEXT_PREFIX) + len(joined.partition(TEXT_PREFIX)[2])
        raise UsageError(
            f"expected a whole invitation, found one that was cut or changed: {n_characters} characters that do not "
            "fit their checksum",
            hint=_HINT,
        )
    return envelope


def _checked(body: str) -> bytes | None:
    """The bytes of a text without its prefix, when their checksum fits."""
    try:
        data = base64.b32decode(body.upper() + "=" * (-len(body) % 8))
    except (binascii.Error, ValueError):
        return None
    envelope, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    return envelope if hmac.compare_digest(checksum, _checksum(envelope)) else None


def _checksum(data: bytes) -> bytes:
    return derive_key(_CONTEXT, data)[:_CHECKSUM_BYTES]


def _shown(text: str) -> str:
    """Little of it: it may be another secret."""
    return repr(text if len(text) <= 8 else text[:8] + "…") if text else "nothing"
