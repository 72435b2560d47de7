"""Who gets a bulk connection: exactly the peer that was agreed on."""

import contextlib
import socket
import ssl

import pytest
import trio

from kvnet.errors import NetworkError, PeerRefusedError
from kvnet.network.bulk import endpoint as endpoint_module
from kvnet.network.bulk.certificates import SessionCertificate, make_certificate
from kvnet.network.bulk.endpoint import MAX_PENDING_HANDSHAKES, BulkEndpoint
from kvnet.network.bulk.handshake import GREETING, plain_proof
from kvnet.network.bulk.sessions import BulkSession
from tests.loopback.network.bulk.conftest import PEER, Listening
from tests.loopback.network.conftest import PATIENCE_S

pytestmark = pytest.mark.loopback


async def refused(listening: Listening, name: str | None, certificate: SessionCertificate | None) -> None:
    """Whatever the client's library makes of it: not a byte comes, and the session is still to be had."""
    with contextlib.suppress(ssl.SSLError, ConnectionError):
        assert await trio.to_thread.run_sync(listening.try_tls, name, certificate) == b""
    assert listening.links == []


async def test_the_peer_that_was_agreed_on_is_greeted(listening: Listening) -> None:
    link = await listening.dial(listening.agree())
    await listening.arrived.wait()
    assert len(listening.links) == 1
    assert listening.endpoint.n_expected == 0
    for each in (link, *listening.links):
        each.close()


async def test_true_certificate_under_the_true_name_is_greeted_by_the_same_means_the_refusals_use(
    listening: Listening,
) -> None:
    session = listening.agree()
    assert await trio.to_thread.run_sync(listening.try_tls, session.server_name, session.own) == GREETING
    listening.links[0].close()


async def test_wrong_certificate_is_refused(listening: Listening) -> None:
    session = listening.agree()
    await refused(listening, session.server_name, make_certificate())
    (await listening.dial(session)).close()
    await listening.arrived.wait()


async def test_missing_certificate_is_refused(listening: Listening) -> None:
    session = listening.agree()
    await refused(listening, session.server_name, None)


async def test_certificate_of_another_session_is_refused(listening: Listening) -> None:
    session, other = listening.agree(), listening.agree()
    await refused(listening, session.server_name, other.own)


@pytest.mark.parametrize("name", ["00" * 16, "not-hexadecimal", "00"])
async def test_unknown_name_is_refused(listening: Listening, name: str) -> None:
    await refused(listening, name, listening.agree().own)


async def test_handshake_without_a_name_is_refused(listening: Listening) -> None:
    await refused(listening, None, listening.agree().own)


async def test_session_is_good_for_one_connection(listening: Listening) -> None:
    session = listening.agree()
    link = await listening.dial(session)
    await listening.arrived.wait()
    with contextlib.suppress(ssl.SSLError, ConnectionError):
        assert await trio.to_thread.run_sync(listening.try_tls, session.server_name, session.own) == b""
    assert len(listening.links) == 1
    for each in (link, *listening.links):
        each.close()


async def test_session_that_is_not_used_in_time_expires(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "SESSION_S", 0.0)
    session = listening.agree()
    await refused(listening, session.server_name, session.own)


@pytest.mark.parametrize("own_name", [True, False], ids=["own name", "another name"])
async def test_nothing_can_be_resumed(listening: Listening, own_name: bool) -> None:
    first, second = listening.agree(), listening.agree()

    def dial_and_keep_the_session() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        first.own.load_into(context)
        plain = socket.create_connection(("127.0.0.1", listening.endpoint.port), timeout=PATIENCE_S)
        with plain, context.wrap_socket(plain, server_hostname=first.server_name) as sock:
            assert sock.recv(64) == GREETING
            kept = sock.session
            assert kept is not None
            assert not kept.has_ticket
            # The library itself lets a session be used only with the context it is of.
            name = first.server_name if own_name else second.server_name
            again = socket.create_connection(("127.0.0.1", listening.endpoint.port), timeout=PATIENCE_S)
            with (
                again,
                contextlib.suppress(ssl.SSLError, ConnectionError),
                context.wrap_socket(again, server_hostname=name, session=kept) as resumed,
            ):
                assert not resumed.session_reused
                assert resumed.recv(64) == b""

    await trio.to_thread.run_sync(dial_and_keep_the_session)
    assert len(listening.links) == 1
    listening.links[0].close()


async def test_dialling_side_refuses_a_listener_with_another_certificate(listening: Listening) -> None:
    session = listening.agree()
    impostor = BulkSession(session.name, PEER, session.own, make_certificate().der)
    with pytest.raises(PeerRefusedError):
        await listening.dial(impostor)


async def test_dialling_side_learns_that_it_was_refused_before_it_counts_the_connection(listening: Listening) -> None:
    session = listening.agree()
    with pytest.raises(NetworkError):
        await listening.dial(BulkSession(session.name, PEER, make_certificate(), session.peer_certificate))


async def test_junk_for_a_certificate_is_refused_when_it_is_agreed_on() -> None:
    session = BulkSession(bytes(16), PEER, make_certificate(), b"junk")
    with pytest.raises(NetworkError, match="a certificate"):
        BulkEndpoint([]).expect(session, lambda link: link.close())


async def test_plain_connection_needs_the_proof_of_both_certificates(nursery: trio.Nursery) -> None:
    endpoint = BulkEndpoint(["127.0.0.1:0"], cipher="none")
    await nursery.start(endpoint.run)
    plain = Listening(endpoint)
    session = plain.agree("none")

    async def answer_to(hello: bytes) -> bytes:
        stream = await trio.open_tcp_stream("127.0.0.1", endpoint.port)
        async with stream:
            await stream.send_all(hello)
            try:
                return bytes(await stream.receive_some(64))
            except trio.BrokenResourceError:
                return b""

    assert await answer_to(session.name + bytes(32)) == b""
    assert await answer_to(bytes(16) + plain_proof(session.name, session.own.der, session.peer_certificate)) == b""
    # The listener's own answer, sent back to it:
    assert await answer_to(session.name + plain_proof(session.name, session.peer_certificate, session.own.der)) == b""
    assert plain.links == []
    link = await plain.dial(session)
    await plain.arrived.wait()
    for each in (link, *plain.links):
        each.close()


async def test_listener_with_encryption_takes_no_plain_connection(listening: Listening) -> None:
    session = listening.agree("none")
    with pytest.raises(NetworkError):
        await listening.dial(session)


async def test_four_hundred_silent_connections_keep_nobody_out_and_cost_no_thread(listening: Listening) -> None:
    import threading

    before = threading.active_count()
    silent = [await trio.open_tcp_stream("127.0.0.1", listening.endpoint.port) for _ in range(400)]
    link = await listening.dial(listening.agree())
    assert listening.endpoint.n_pending <= MAX_PENDING_HANDSHAKES
    assert threading.active_count() <= before
    await listening.arrived.wait()
    for each in (link, *listening.links):
        each.close()
    for stream in silent:
        await stream.aclose()


async def test_handshake_that_is_not_done_in_time_is_closed(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "HANDSHAKE_S", 0.05)
    async with await trio.open_tcp_stream("127.0.0.1", listening.endpoint.port) as stream:
        await stream.send_all(b"\x16\x03\x01")
        with contextlib.suppress(trio.BrokenResourceError):
            assert await stream.receive_some(1) == b""
