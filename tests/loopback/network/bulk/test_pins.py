"""Only the certificate that was agreed on counts, not what it vouches for."""

import contextlib
import datetime as dt
import ssl

import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from kvnet.errors import PeerRefusedError
from kvnet.network.bulk.certificates import SessionCertificate
from kvnet.network.bulk.sessions import BulkSession
from tests.loopback.network.bulk.conftest import PEER, Listening

pytestmark = pytest.mark.loopback


def certificate(name: str, key: Ed25519PrivateKey, issuer: str, issuer_key: Ed25519PrivateKey) -> SessionCertificate:
    """A certificate that may sign others."""
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(dt.datetime(1970, 1, 1, tzinfo=dt.UTC))
        .not_valid_after(dt.datetime(2100, 1, 1, tzinfo=dt.UTC))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(issuer_key, None)
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return SessionCertificate(made.public_bytes(Encoding.DER), made.public_bytes(Encoding.PEM) + private)


def agreed_and_signed_by_it() -> tuple[SessionCertificate, SessionCertificate]:
    """A self-signed certificate, and another that OpenSSL accepts from whoever trusts the first."""
    key, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    return certificate("agreed", key, "agreed", key), certificate("other", other, "agreed", key)


async def test_certificate_that_the_agreed_one_has_signed_is_refused_to_a_peer_that_dials(listening: Listening) -> None:
    agreed, signed = agreed_and_signed_by_it()
    session = listening.agree(theirs=agreed)
    with contextlib.suppress(ssl.SSLError, ConnectionError):
        assert await trio.to_thread.run_sync(listening.try_tls, session.server_name, signed) == b""
    assert listening.links == []
    assert listening.endpoint.refused == 1


async def test_certificate_that_the_agreed_one_has_signed_is_refused_to_a_peer_that_was_dialled(
    listening: Listening,
) -> None:
    agreed, signed = agreed_and_signed_by_it()
    # The listener shows the second, whatever it has said.
    session = listening.agree(own=signed)
    with pytest.raises(PeerRefusedError, match="the certificate that was agreed on"):
        await listening.dial(BulkSession(session.name, PEER, session.own, agreed.der))
