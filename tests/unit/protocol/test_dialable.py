"""Which addresses that others have told are dialled, and how often on whose word."""

import pytest

from kvnet.protocol.dialable import (
    MAX_SIGNERS,
    UNANSWERED_BURST,
    UNANSWERED_PER_S,
    Reach,
    Unanswered,
    plausible,
    reach_of,
)

PEER = "/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
AT_HOME = ["/ip4/192.168.1.5/tcp/5864" + PEER]
IN_THE_WORLD = ["/ip4/8.8.4.4/tcp/5864" + PEER]
ON_ONE_MACHINE = ["/ip4/127.0.0.1/tcp/5864" + PEER]


def at(host: str, port: int = 5864) -> str:
    return f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}{PEER}"


@pytest.mark.parametrize(
    ("host", "reach"),
    [
        ("127.0.0.1", Reach.THIS_MACHINE),
        ("127.9.9.9", Reach.THIS_MACHINE),
        ("::1", Reach.THIS_MACHINE),
        ("::ffff:127.0.0.1", Reach.THIS_MACHINE),
        ("169.254.169.254", Reach.THIS_LINK),
        ("fe80::1", Reach.THIS_LINK),
        ("::ffff:169.254.169.254", Reach.THIS_LINK),
        ("10.1.2.3", Reach.PRIVATE),
        ("172.16.0.1", Reach.PRIVATE),
        ("192.168.1.1", Reach.PRIVATE),
        ("100.64.0.1", Reach.PRIVATE),
        ("fd00::1", Reach.PRIVATE),
        ("8.8.8.8", Reach.WORLD),
        ("2606:4700::1111", Reach.WORLD),
        ("0.0.0.0", None),
        ("0.1.2.3", None),
        ("::", None),
        ("::7f00:1", None),
        ("64:ff9b::7f00:1", None),
        ("2002:7f00:1::1", None),
        ("224.0.0.251", None),
        ("ff02::fb", None),
        ("255.255.255.255", None),
        ("localhost", None),
        ("", None),
    ],
)
def test_reach_of_a_host(host: str, reach: Reach | None) -> None:
    assert reach_of(host) is reach


@pytest.mark.parametrize(
    ("own", "dialled"),
    [
        (ON_ONE_MACHINE, {"127.0.0.1", "192.168.1.1", "169.254.1.1", "8.8.8.8"}),
        (AT_HOME, {"192.168.1.1", "8.8.8.8"}),
        (IN_THE_WORLD, {"8.8.8.8"}),
        ([*AT_HOME, *ON_ONE_MACHINE], {"192.168.1.1", "8.8.8.8"}),
        ([*AT_HOME, at("169.254.7.7")], {"192.168.1.1", "169.254.1.1", "8.8.8.8"}),
        ([], {"192.168.1.1", "8.8.8.8"}),
        (["/memory/a" + PEER], {"192.168.1.1", "8.8.8.8"}),
    ],
    ids=["one machine", "at home", "in the world", "home and loopback", "on a cable", "not started", "simulated"],
)
def test_nobody_makes_a_node_dial_into_a_narrower_network_than_it_is_in(own: list[str], dialled: set[str]) -> None:
    hosts = ["127.0.0.1", "192.168.1.1", "169.254.1.1", "8.8.8.8"]
    assert plausible([at(host) for host in hosts], own) == tuple(at(host) for host in hosts if host in dialled)


@pytest.mark.parametrize(
    "address",
    [
        at("192.168.1.1", 80),
        at("192.168.1.1", 1023),
        "/dns4/printer.local/tcp/9100" + PEER,
        "/ip4/192.168.1.1/udp/5864" + PEER,
        "/ip4/192.168.1.1/tcp/-5864" + PEER,
        "/ip4/192.168.1.1/tcp/٥٨٦٤" + PEER,
        "/ip4/192.168.1.1/tcp/586400" + PEER,
        "/ip4/localhost/tcp/5864" + PEER,
        "/ip6zone/en0/ip6/fe80::1/tcp/5864" + PEER,
        "/ip4/192.168.1.1",
        "",
    ],
)
def test_what_can_be_no_node_is_not_dialled(address: str) -> None:
    assert plausible([address], ON_ONE_MACHINE) == ()


def test_simulated_addresses_are_left_to_simulated_networks() -> None:
    assert plausible(["/memory/a" + PEER], ["/memory/b" + PEER]) == ("/memory/a" + PEER,)


def test_ports_from_1024_on_are_dialled() -> None:
    assert plausible([at("192.168.1.1", 1024)], AT_HOME) == (at("192.168.1.1", 1024),)


def test_one_publishers_word_is_good_for_so_many_addresses_in_vain_and_nobody_elses_suffers() -> None:
    unanswered, many = Unanswered(), [at(f"192.168.1.{host}") for host in range(1, 60)]
    assert unanswered.take(b"m", many, 0.0) == tuple(many[: int(UNANSWERED_BURST)])
    assert unanswered.take(b"m", many, 1.0) == ()
    assert unanswered.take(b"other", many[:8], 1.0) == tuple(many[:8])
    assert unanswered.take(b"m", many, 2 / UNANSWERED_PER_S) == tuple(many[:2])


def test_a_peer_that_was_there_costs_nothing() -> None:
    unanswered, two = Unanswered(), [at("192.168.1.1"), at("192.168.1.2")]
    for _ in range(100):
        assert unanswered.take(b"m", two, 0.0) == tuple(two)
        unanswered.answered(b"m", 2)
    unanswered.answered(b"m", 1000)
    assert len(unanswered.take(b"m", [at("192.168.1.1")] * 100, 0.0)) == UNANSWERED_BURST
    unanswered.answered(b"nobody", 1)


def test_no_more_publishers_are_remembered_than_memory_is_given_for() -> None:
    unanswered = Unanswered()
    for number in range(MAX_SIGNERS + 10):
        unanswered.take(number.to_bytes(4, "big"), [at("192.168.1.1")], 0.0)
    assert len(unanswered._left) == MAX_SIGNERS
