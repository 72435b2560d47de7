"""Two ends of bulk connections in one process."""

import os
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import trio

from kvnet.network.bulk.certificates import SessionCertificate, make_certificate
from kvnet.network.bulk.endpoint import BulkEndpoint
from kvnet.network.bulk.link import Link
from kvnet.network.bulk.sessions import BulkSession
from kvnet.protocol.ids import PeerId
from tests.loopback.network.conftest import PATIENCE_S

PEER = PeerId(b"peer".ljust(38, b"\0"))


@dataclass
class Listening:
    """A listener, and what it has agreed on."""

    endpoint: BulkEndpoint
    links: list[Link] = field(default_factory=list)
    arrived: trio.Event = field(default_factory=trio.Event)

    def agree(
        self,
        cipher: str = "tls13",
        theirs: SessionCertificate | None = None,
        own: SessionCertificate | None = None,
    ) -> BulkSession:
        """Agree on a session; returns the dialling side's view of it."""
        name, own, theirs = os.urandom(16), own or make_certificate(), theirs or make_certificate()

        def take(link: Link) -> None:
            self.links.append(link)
            self.arrived.set()

        self.endpoint.expect(BulkSession(name, PEER, own, theirs.der, cipher), take)
        return BulkSession(name, PEER, theirs, own.der, cipher)

    async def dial(self, session: BulkSession) -> Link:
        """Dial as an honest peer does."""
        return await self.endpoint.dial(session, ["127.0.0.1"], self.endpoint.port, timeout_s=PATIENCE_S)

    def try_tls(
        self, name: str | None, certificate: SessionCertificate | None, resumed: ssl.SSLSession | None = None
    ) -> bytes:
        """Dial with any name and certificate, trusting everybody; returns the first bytes the listener sends."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        if certificate is not None:
            certificate.load_into(context)
        with (
            socket.create_connection(("127.0.0.1", self.endpoint.port), timeout=PATIENCE_S) as plain,
            context.wrap_socket(plain, server_hostname=name, session=resumed) as sock,
        ):
            return sock.recv(64)


@pytest.fixture
async def listening(nursery: trio.Nursery) -> AsyncIterator[Listening]:
    """A listener on 127.0.0.1; its links are closed in the end."""
    endpoint = BulkEndpoint(["127.0.0.1:0"])
    await nursery.start(endpoint.run)
    listener = Listening(endpoint)
    yield listener
    for link in listener.links:
        link.close()
