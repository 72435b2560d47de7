"""TLS contexts: mutual TLS 1.3 in which each side accepts exactly one certificate.

What OpenSSL does not do by itself, and what each line here is for:

- A context that a server switches to by SNI does not bring its verify mode along: the *listening* context must demand
  a certificate, and trusts nobody, so that whatever is not switched is refused.
- A session ticket made under one name resumes under another, with no certificate at all: no context makes tickets.
- A peer without a certificate, or with one that chains to the right one by accident, must not depend on OpenSSL's
  judgement alone: `kvnet.network.bulk.handshake` compares the pin before a byte is used.
"""

import ssl
from collections.abc import Callable

from kvnet.network.bulk.certificates import SessionCertificate

FindContext = Callable[[ssl.SSLObject, str], ssl.SSLContext | None]
"""The context of the session that this name stands for; ``None`` for a name that nobody was told."""


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the name is a session's, and the certificate is compared whole
    context.verify_mode = ssl.CERT_REQUIRED
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_TICKET
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    return context


def listening_context(find: FindContext) -> ssl.SSLContext:
    """The context of a listener: it has no certificate, trusts none, and hands over to the session that SNI names.

    Args:
        find: called inside the handshake with the name the client sent.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER)

    def choose(connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> int | None:
        chosen = find(connection, name) if name is not None and isinstance(connection, ssl.SSLObject) else None
        if chosen is None:
            return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
        connection.context = chosen
        return None

    context.sni_callback = choose
    return context


def session_context(own: SessionCertificate, peer_certificate: bytes, *, listens: bool) -> ssl.SSLContext:
    """The context of one session.

    Args:
        own: what we show.
        peer_certificate: the one certificate that is accepted, as DER.
        listens: whether the peer dials us.

    Raises:
        ssl.SSLError: the peer's certificate is none.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER if listens else ssl.PROTOCOL_TLS_CLIENT)
    own.load_into(context)
    context.load_verify_locations(cadata=peer_certificate)
    return context
