"""Tickets: copyable text that points to an artifact and, if wanted, to peers that have it.

``kvnet:`` and the artifact hash, then any number of peer addresses, each after a comma. Nothing in it needs quoting in
a shell. A ticket is no secret and gives no right: it opens nothing to those outside the artifact's namespace.
"""

import re
from dataclasses import dataclass
from typing import Final

from kvnet.errors import UsageError
from kvnet.format.hashes import ArtifactHash, artifact_text, parse_artifact_text
from kvnet.format.limits import HASH_SIZE_BYTES, MAX_ADDRESS_BYTES, MAX_TICKET_ADDRESSES, MAX_TICKET_BYTES

SCHEME: Final = "kvnet:"
"""Every ticket begins so."""
_ADDRESS: Final = re.compile(rf"/[A-Za-z0-9/.:_%=+-]{{1,{MAX_ADDRESS_BYTES - 1}}}")
_HINT: Final = "Copy the whole ticket, as kvnet show printed it."


@dataclass(frozen=True, slots=True)
class Ticket:
    """An artifact and where to find it.

    Attributes:
        artifact: its hash.
        addresses: multiaddresses of peers, as text; not interpreted here.

    Raises:
        UsageError: an address that cannot be written, or too many of them.
    """

    artifact: ArtifactHash
    addresses: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.artifact) != HASH_SIZE_BYTES:
            raise UsageError("ticket: expected an artifact hash of 32 bytes")
        if len(self.addresses) > MAX_TICKET_ADDRESSES:
            raise UsageError(f"ticket: expected at most {MAX_TICKET_ADDRESSES} addresses, found {len(self.addresses)}")
        for address in self.addresses:
            if not _ADDRESS.fullmatch(address):
                raise UsageError(
                    f"ticket: expected an address such as /ip4/192.0.2.1/tcp/5864/p2p/…, found {address[:64]!r}"
                )


def format_ticket(ticket: Ticket) -> str:
    """The ticket's text."""
    return SCHEME + ",".join((artifact_text(ticket.artifact), *ticket.addresses))


def parse_ticket(text: str) -> Ticket:
    """The ticket in ``text``; a bare artifact hash is a ticket without addresses.

    Raises:
        UsageError: neither.
    """
    if len(text) > MAX_TICKET_BYTES:
        raise UsageError(f"ticket: expected at most {MAX_TICKET_BYTES} characters, found {len(text)}", hint=_HINT)
    if not text.startswith(SCHEME):
        return Ticket(parse_artifact_text(text))
    artifact, *addresses = text.removeprefix(SCHEME).split(",", MAX_TICKET_ADDRESSES + 1)
    return Ticket(parse_artifact_text(artifact), tuple(addresses))
