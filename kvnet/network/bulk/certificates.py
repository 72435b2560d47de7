"""A certificate for one session: made at once, told over the control session, pinned by the other side, thrown away.

It says nothing: the peer is known from the control session over which its hash came. So it is self-signed, valid for
ever (clocks of home machines are wrong), and holds a key that exists nowhere else.
"""

import contextlib
import datetime as dt
import hashlib
import os
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

_NAME: Final = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvnet")])
_VALID_FROM: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_VALID_UNTIL: Final = dt.datetime(2100, 1, 1, tzinfo=dt.UTC)


@dataclass(frozen=True, slots=True)
class SessionCertificate:
    """Our certificate of one session, with its private key.

    Attributes:
        der: the certificate, as the peer gets it.
        pem: certificate and private key, as OpenSSL reads them.
    """

    der: bytes
    pem: bytes = field(repr=False)

    def load_into(self, context: ssl.SSLContext) -> None:
        """Be who we are in this context.

        Python's ssl takes a private key from a file only: this one lives for a moment, readable by us alone.
        """
        handle, name = tempfile.mkstemp(prefix="kvnet-", suffix=".pem")  # made with mode 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(self.pem)
            context.load_cert_chain(name)
        finally:
            with contextlib.suppress(FileNotFoundError):
                Path(name).unlink()


def make_certificate() -> SessionCertificate:
    """A fresh Ed25519 key and its self-signed certificate; about 300 bytes of DER."""
    key = Ed25519PrivateKey.generate()
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_NAME)
        .issuer_name(_NAME)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_VALID_FROM)
        .not_valid_after(_VALID_UNTIL)
        .sign(key, None)
    )
    pem = certificate.public_bytes(Encoding.PEM)
    pem += key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return SessionCertificate(certificate.public_bytes(Encoding.DER), pem)


def pin_of(certificate_der: bytes) -> bytes:
    """What a certificate is compared by: SHA-256 of its DER form."""
    return hashlib.sha256(certificate_der).digest()
