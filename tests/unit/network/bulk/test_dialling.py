"""What a failed dial says, and where peers are dialled."""

import errno
import os

import pytest

from kvnet.exchange.bulk import hosts_of
from kvnet.network.bulk.endpoint import dial_failure


def failure(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def test_unreachable_neighbour_on_macos_points_to_local_network_privacy() -> None:
    error = dial_failure(["192.168.1.7"], 5865, [failure(errno.EHOSTUNREACH)], platform="darwin")
    assert "macOS may block the local network" in error.message
    assert "Privacy & Security > Local Network" in error.hint


@pytest.mark.parametrize(
    ("host", "number", "platform"),
    [
        ("192.168.1.7", errno.EHOSTUNREACH, "linux"),
        ("192.168.1.7", errno.ECONNREFUSED, "darwin"),
        ("8.8.8.8", errno.EHOSTUNREACH, "darwin"),
        ("127.0.0.1", errno.EHOSTUNREACH, "darwin"),
    ],
)
def test_other_failures_say_what_the_system_said(host: str, number: int, platform: str) -> None:
    error = dial_failure([host], 5865, [failure(number)], platform=platform)
    assert error.message == f"expected an answer at {host} port 5865, found: {os.strerror(number)}"


def test_hosts_are_the_ip_addresses_of_multiaddrs_each_once() -> None:
    texts = ["/ip4/10.0.0.1/tcp/1/p2p/x", "/ip6/fd00::1/tcp/1/p2p/x", "/ip4/10.0.0.1/tcp/2/p2p/x", "/dns4/a/tcp/1", ""]
    assert hosts_of(texts) == ["10.0.0.1", "fd00::1"]
