"""Where an address leads, link-local IPv6 included."""

import pytest

from kvnet.errors import UsageError, elsewhere
from kvnet.network.libp2p.addresses import parse_peer_address
from kvnet.network.places import host_of, hosts_of, port_of, split_scoped

PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
SCOPED = f"/ip6zone/en0/ip6/fe80::1/tcp/5864/p2p/{PEER}"


def test_hosts_are_the_ip_addresses_of_multiaddrs_each_once() -> None:
    texts = ["/ip4/10.0.0.1/tcp/1/p2p/x", "/ip6/fd00::1/tcp/1/p2p/x", "/ip4/10.0.0.1/tcp/2/p2p/x", "/dns4/a/tcp/1", ""]
    assert hosts_of([*texts, SCOPED]) == ["10.0.0.1", "fd00::1", "fe80::1%en0"]


def test_a_link_local_address_is_its_interface_and_the_rest() -> None:
    assert split_scoped(SCOPED) == ("en0", f"/ip6/fe80::1/tcp/5864/p2p/{PEER}")
    assert (host_of(SCOPED), port_of(SCOPED)) == ("fe80::1%en0", "5864")
    assert (host_of(f"/dns4/a/tcp/1/p2p/{PEER}"), port_of("/ip4/10.0.0.1/tcp/1")) == ("a", "1")
    target, _ = parse_peer_address(SCOPED)
    assert str(target) == "/ip6zone/en0/ip6/fe80::1/tcp/5864"


@pytest.mark.parametrize(
    "address",
    [
        f"/ip6zone/en0/ip6/fd00::1/tcp/5864/p2p/{PEER}",  # an interface where none is needed
        f"/ip6zone/en0/ip6/::1/tcp/5864/p2p/{PEER}",
        f"/ip6zone/en 0/ip6/fe80::1/tcp/5864/p2p/{PEER}",
        f"/ip6zone/{'x' * 33}/ip6/fe80::1/tcp/5864/p2p/{PEER}",
        f"/ip6zone/en0/ip4/10.0.0.1/tcp/5864/p2p/{PEER}",
        f"/ip6zone/en0/ip6/:::/tcp/5864/p2p/{PEER}",
        f"/ip6zone/en0/ip6/fe80::1/tcp/99999/p2p/{PEER}",
        f"/ip6zone/en0/ip6/fe80::1/udp/5864/p2p/{PEER}",
        "/ip6zone/en0/ip6/fe80::1/tcp/5864",
    ],
)
def test_an_interface_stands_before_a_link_local_address_alone(address: str) -> None:
    with pytest.raises(UsageError):
        parse_peer_address(address)


def test_where_an_address_is_copied_from_is_the_other_machine() -> None:
    with pytest.raises(UsageError) as refused:
        parse_peer_address("nonsense")
    assert elsewhere("kvnet node status") in refused.value.hint
