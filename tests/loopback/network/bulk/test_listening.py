"""Where bulk connections are taken."""

import socket

import pytest
import trio

from kvnet.network.bulk.endpoint import BulkEndpoint
from tests.loopback.network.bulk.conftest import Listening
from tests.loopback.network.conftest import PATIENCE_S

pytestmark = pytest.mark.loopback


async def test_taken_default_port_is_replaced_by_a_free_one(nursery: trio.Nursery) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        endpoint = BulkEndpoint(None, hosts=["127.0.0.1"], default_port=port)
        await nursery.start(endpoint.run)
        assert endpoint.port not in {0, port}
        assert [host for host, _ in endpoint.addresses()] == ["127.0.0.1"]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
async def test_peer_is_dialled_over_ipv6(nursery: trio.Nursery) -> None:
    endpoint = BulkEndpoint(["[::1]:0"])
    await nursery.start(endpoint.run)
    listening = Listening(endpoint)
    # The first address does not answer: nobody listens there.
    link = await endpoint.dial(listening.agree(), ["127.0.0.1", "::1"], endpoint.port, timeout_s=PATIENCE_S)
    await listening.arrived.wait()
    for each in (link, *listening.links):
        each.close()


async def test_endpoint_that_listens_nowhere_has_no_port(nursery: trio.Nursery) -> None:
    endpoint = BulkEndpoint([])
    await nursery.start(endpoint.run)
    assert endpoint.port == 0
