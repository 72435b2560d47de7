"""What two peers agree on before one dials the other."""

import ssl
from dataclasses import dataclass, field
from typing import Final

from kvnet.errors import NetworkError
from kvnet.network.bulk.certificates import SessionCertificate, pin_of
from kvnet.network.bulk.contexts import session_context
from kvnet.protocol.ids import PeerId

CIPHER_TLS: Final = "tls13"
CIPHER_NONE: Final = "none"

TLS_HANDSHAKE: Final = b"\x16"
"""The first byte of a TLS handshake record. No session without encryption has a name that begins with it."""

NAME_SIZE_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class BulkSession:
    """What two peers agreed on over their control session.

    Attributes:
        name: 16 random bytes, from the side that was asked.
        peer: the other one.
        own: our certificate.
        peer_certificate: theirs, as DER.
        cipher: ``tls13`` or ``none``.
    """

    name: bytes
    peer: PeerId
    own: SessionCertificate = field(repr=False)
    peer_certificate: bytes = field(repr=False)
    cipher: str = CIPHER_TLS

    @property
    def server_name(self) -> str:
        """What is sent as SNI."""
        return self.name.hex()

    @property
    def pin(self) -> bytes:
        """What the peer's certificate is compared by."""
        return pin_of(self.peer_certificate)

    def context(self, *, listens: bool) -> ssl.SSLContext:
        """The TLS context of this session, for the end that listens or the one that dials.

        Raises:
            NetworkError: the peer's certificate is none.
        """
        try:
            return session_context(self.own, self.peer_certificate, listens=listens)
        except ssl.SSLError as error:
            raise NetworkError("expected a certificate from the peer, found something else") from error
