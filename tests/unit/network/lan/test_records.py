"""What is said on the local network, and what of it is believed."""

import ipaddress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnet.network.lan.records import (
    MAX_ADDRESSES,
    MAX_MERGED,
    SERVICE_TYPE,
    ClockWatch,
    Families,
    Heard,
    LanInterface,
    announce,
    near_addresses,
    places,
    private_interfaces,
    read_heard,
)
from kvnet.protocol.ids import PeerId, peer_text

OWN = PeerId(bytes.fromhex("002408011220") + bytes(32))
OTHER = PeerId(bytes.fromhex("002408011220") + bytes([7]) * 32)


def interface(text: str, name: str = "en0", index: int = 4) -> LanInterface:
    return LanInterface(name, ipaddress.ip_interface(text), index)


HOME = [interface("127.0.0.1/8", "lo0"), interface("192.168.1.5/24"), interface("10.9.0.2/32", "utun0")]
SIX = [interface("fe80::5/64"), interface("fd00::5/64"), interface("2001:db8::5/64")]
HEARD = Heard(f"0011223344556677.{SERVICE_TYPE}", 5864, {b"id": peer_text(OTHER).encode(), b"v": b"1"}, ["192.168.1.7"])


def test_a_neighbour_is_a_peer_id_and_addresses_to_try() -> None:
    sighting = read_heard(HEARD, OWN, HOME)
    assert sighting is not None
    assert (sighting.peer, sighting.version, sighting.name) == (OTHER, 1, HEARD.name)
    assert sighting.addresses == (f"/ip4/192.168.1.7/tcp/5864/p2p/{peer_text(OTHER)}",)


def test_what_is_announced_is_read_back() -> None:
    said = announce(
        OTHER, ["/ip4/127.0.0.1/tcp/1", "/ip4/192.168.1.5/tcp/4001/p2p/x", "/ip6/::1/tcp/4"], HOME, bytes(16)
    )
    assert said is not None
    assert (said.port, said.addresses) == (4001, ("192.168.1.5",))
    properties = {key.encode(): value.encode() for key, value in said.properties.items()}
    sighting = read_heard(Heard(said.instance, said.port, properties, said.addresses), OWN, HOME)
    assert sighting is not None
    assert sighting.peer == OTHER


@pytest.mark.parametrize(
    "listening",
    [
        [],
        ["/ip4/127.0.0.1/tcp/4001"],
        ["/ip4/203.0.113.9/tcp/4001"],
        ["/ip4/10.9.0.2/tcp/4001"],
        ["/ip6/fd00::1/tcp/1"],
    ],
)
def test_a_node_that_no_neighbour_can_reach_says_nothing(listening: list[str]) -> None:
    assert announce(OWN, listening, HOME, bytes(16)) is None


def test_names_are_nothing_but_the_random_bytes() -> None:
    for random in (bytes(16), bytes(range(16))):
        said = announce(OWN, ["/ip4/192.168.1.5/tcp/4001"], HOME, random)
        assert said is not None
        assert said.instance == f"{random[:8].hex()}.{SERVICE_TYPE}"
        assert said.host == f"{random[8:].hex()}.local."
        assert set(said.properties) == {"id", "v"}


def test_of_several_ports_the_one_that_most_addresses_have_is_said() -> None:
    both = [*HOME, interface("10.0.0.3/24", "en1")]
    listening = ["/ip4/192.168.1.5/tcp/1", "/ip4/192.168.1.5/tcp/2", "/ip4/10.0.0.3/tcp/2"]
    said = announce(OWN, listening, both, bytes(16))
    assert said is not None
    assert (said.port, said.addresses) == (2, ("192.168.1.5", "10.0.0.3"))


def test_this_node_is_no_neighbour_of_its_own() -> None:
    assert read_heard(HEARD, OTHER, HOME) is None


@pytest.mark.parametrize(
    "addresses",
    [
        ["8.8.8.8"],  # not private
        ["192.168.2.7"],  # not in a network of ours
        ["127.0.0.1"],  # would be ourselves
        ["10.9.0.3"],  # the other end of a tunnel
        ["192.168.1.255"],  # everybody
        ["192.168.1.0"],
        ["fe80::1", "not an address", ""],
        [],
    ],
)
def test_nobody_makes_this_node_dial_beyond_its_own_cable(addresses: list[str]) -> None:
    assert read_heard(replace(HEARD, addresses=addresses), OWN, HOME) is None


@pytest.mark.parametrize(
    "heard",
    [
        replace(HEARD, name="x"),
        replace(HEARD, name="x" * 200 + f".{SERVICE_TYPE}"),
        replace(HEARD, port=None),
        replace(HEARD, port=0),
        replace(HEARD, port=65536),
        replace(HEARD, properties={}),
        replace(HEARD, properties={b"id": b"not base58 0OIl", b"v": b"1"}),
        replace(HEARD, properties={b"id": b"\xff\xfe", b"v": b"1"}),
        replace(HEARD, properties={b"id": peer_text(OTHER).encode(), b"v": b""}),
        replace(HEARD, properties={b"id": peer_text(OTHER).encode(), b"v": b"x"}),
        replace(HEARD, properties={b"id": peer_text(OTHER).encode(), b"v": b"999999"}),
        replace(HEARD, properties={b"id": peer_text(OTHER).encode(), b"v": None}),
        replace(HEARD, properties={**HEARD.properties, b"more": b"x" * 129}),
        replace(HEARD, properties={**HEARD.properties, **{bytes([n]): b"" for n in range(8)}}),
    ],
)
def test_what_no_node_says_is_passed_over(heard: Heard) -> None:
    assert read_heard(heard, OWN, HOME) is None


def test_a_later_version_is_listed_with_its_number() -> None:
    sighting = read_heard(replace(HEARD, properties={**HEARD.properties, b"v": b"7"}), OWN, HOME)
    assert sighting is not None
    assert sighting.version == 7


def test_hundreds_of_addresses_are_cut_down() -> None:
    many = [f"192.168.1.{n}" for n in range(1, 250)] * 4
    sighting = read_heard(replace(HEARD, addresses=many), OWN, HOME)
    assert sighting is not None
    assert len(sighting.addresses) == MAX_ADDRESSES


@pytest.mark.parametrize(
    ("text", "private"),
    [
        ("192.168.1.5/24", True),
        ("172.20.0.1/16", True),
        ("10.1.2.3/8", True),
        ("169.254.7.7/16", True),
        ("127.0.0.1/8", False),
        ("100.64.0.1/10", False),
        ("203.0.113.5/24", False),
        ("192.168.1.5/31", False),
    ],
)
def test_neighbours_are_looked_for_in_private_networks_only(text: str, private: bool) -> None:
    assert bool(private_interfaces([interface(text)])) is private


@given(
    name=st.text(max_size=40).map(lambda text: f"{text}.{SERVICE_TYPE}"),
    port=st.integers(-5, 70_000),
    properties=st.dictionaries(st.sampled_from([b"id", b"v", b"x"]), st.none() | st.binary(max_size=60)),
    addresses=st.lists(st.ip_addresses().map(str) | st.text(max_size=20) | st.just("fe80::7%4"), max_size=5),
)
def test_whatever_is_heard_is_read_or_passed_over(
    name: str, port: int, properties: dict[bytes, bytes | None], addresses: list[str]
) -> None:
    sighting = read_heard(Heard(name, port, properties, addresses), OWN, HOME + SIX)
    assert sighting is None or {a.partition("/tcp/")[0] for a in sighting.addresses} <= set(
        near_addresses(addresses, HOME + SIX)
    )


def test_a_link_local_neighbour_is_behind_the_interface_it_was_heard_on() -> None:
    two = [*HOME, *SIX, interface("192.168.9.5/24", "en1", 7), interface("fe80::6/64", "en1", 7)]
    assert near_addresses(["fe80::7%7"], two) == ["/ip6zone/en1/ip6/fe80::7"]
    assert near_addresses(["fe80::7"], two) == ["/ip6zone/en0/ip6/fe80::7", "/ip6zone/en1/ip6/fe80::7"]
    sighting = read_heard(replace(HEARD, addresses=["192.168.1.7", "fe80::7%4", "fd00::7"]), OWN, HOME + SIX)
    assert sighting is not None
    peer = peer_text(OTHER)
    assert sighting.addresses == (
        f"/ip4/192.168.1.7/tcp/5864/p2p/{peer}",
        f"/ip6zone/en0/ip6/fe80::7/tcp/5864/p2p/{peer}",
        f"/ip6/fd00::7/tcp/5864/p2p/{peer}",
    )


@pytest.mark.parametrize(
    "addresses",
    [
        ["fe80::7%9"],  # behind an interface that takes no part
        ["fd01::7"],  # not in a network of ours
        ["2001:db8::7"],  # reachable from elsewhere: not said, and not believed
        ["fd00::", "fe80::"],  # every router
        ["::1", "::", "ff02::fb", "fe80::7%"],
    ],
)
def test_nobody_makes_this_node_dial_beyond_its_own_cable_over_ipv6(addresses: list[str]) -> None:
    assert read_heard(replace(HEARD, addresses=addresses), OWN, HOME + SIX) is None


@pytest.mark.parametrize(
    ("here", "taking_part"),
    [
        (["192.168.1.5/24", "fe80::5/64"], ["192.168.1.5", "fe80::5"]),
        (["fe80::5/64", "2001:db8::5/64"], ["fe80::5"]),  # a network without IPv4
        (["192.0.0.2/32", "fe80::5/64", "2001:db8::5/64"], ["fe80::5"]),  # the same, with an IPv4 of its own making
        (["fe80::5/64", "fd00::5/64", "fd00::6/128"], ["fe80::5", "fd00::5"]),
        (["fe80::5/64"], []),  # tunnels, awdl0, the outer ends of containers
        (["203.0.113.5/24", "fe80::5/64", "2001:db8::5/64"], []),  # a public network
        (["::1/128"], []),
    ],
)
def test_which_interfaces_take_part_over_ipv6(here: list[str], taking_part: list[str]) -> None:
    assert [str(each.ip) for each in private_interfaces([interface(text) for text in here])] == taking_part


def test_whoever_listens_everywhere_announces_each_address_of_its_interfaces() -> None:
    said = announce(OWN, ["/ip4/0.0.0.0/tcp/5864", "/ip6/::/tcp/5864"], HOME + SIX, bytes(16))
    assert said is not None
    assert said.addresses == ("192.168.1.5", "fe80::5", "fd00::5")
    said = announce(OWN, ["/ip4/0.0.0.0/tcp/5864", "/ip6/::1/tcp/5864"], HOME + SIX, bytes(16))
    assert said is not None
    assert said.addresses == ("192.168.1.5",)


def test_an_ipv6_address_of_another_day_is_no_other_network() -> None:
    assert places([interface("2001:db8::5/64")]) == places([interface("2001:db8::77/64")])
    assert places([interface("2001:db8::5/64")]) != places([interface("2001:db9::5/64")])
    assert places([interface("fe80::5/64")]) != places([interface("fe80::6/64")])
    assert places([interface("192.168.1.5/24")]) != places([interface("192.168.1.6/24")])


def test_both_families_of_an_instance_are_put_together_and_go_one_by_one() -> None:
    families, six = Families(), replace(HEARD, addresses=["fe80::7%4"])
    assert families.heard(six, 6) == six
    assert families.heard(HEARD, 4).addresses == ["192.168.1.7", "fe80::7%4"]
    assert families.gone(HEARD.name, 4) == six
    assert families.gone(HEARD.name, 6) is None
    assert families.gone(HEARD.name, 6) is None


def test_of_too_many_instances_the_oldest_is_forgotten() -> None:
    families = Families()
    for number in range(MAX_MERGED + 1):
        families.heard(replace(HEARD, name=str(number)), 4)
    assert families.heard(replace(HEARD, name="0", addresses=["fe80::7"]), 6).addresses == ["fe80::7"]
    assert families.heard(replace(HEARD, name=str(MAX_MERGED), addresses=["fe80::7"]), 6).addresses[0] == "192.168.1.7"


def test_a_machine_that_slept_is_noticed_and_a_slow_look_is_not() -> None:
    clocks = ClockWatch(tolerance_s=5.0)
    assert not clocks.jumped(1000.0, 10.0)
    assert not clocks.jumped(1060.0, 70.0)
    assert clocks.jumped(2000.0, 73.0)
    assert not clocks.jumped(2003.0, 76.0)
    assert clocks.jumped(1900.0, 79.0)
