"""What a failed dial says."""

import errno
import os

import pytest

from kvnet.network.bulk.dialling import dial_failure


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
