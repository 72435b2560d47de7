"""A guest whose inviter is not reached is told why, as far as trying its addresses tells, and what to do."""

import pytest

from kvnet_node.operations.requests import Reach
from kvnet_node.unreached import STILL_GOOD, unreached

HOME = "/ip4/192.168.1.5/tcp/5864/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
OFFICE = HOME.replace("192.168.1.5", "10.0.0.9")
LOOPBACK = HOME.replace("192.168.1.5", "127.0.0.1")


@pytest.mark.parametrize(
    ("reaches", "online", "platform", "said"),
    [
        ([Reach(LOOPBACK, "refused")], True, "linux", "listens on its own machine alone"),
        ([Reach(HOME, "no_route"), Reach(OFFICE, "no_route")], False, "linux", "is in no network"),
        ([Reach(OFFICE, "timeout"), Reach(HOME, "refused", near=True)], True, "linux", "no node runs at that port"),
        ([Reach(HOME, "timeout", near=True)], True, "linux", "awake"),
        ([Reach(HOME, "timeout"), Reach(OFFICE, "no_route")], True, "linux", "such as Tailscale"),
        ([Reach(HOME, "no_route", near=True, gateway_answers=True)], True, "darwin", "macOS keeps this program off"),
    ],
)
def test_the_next_step_fits_what_was_found(reaches: list[Reach], online: bool, platform: str, said: str) -> None:
    error = unreached(reaches, online=online, platform=platform)
    assert said in error.hint
    assert error.hint.endswith(STILL_GOOD)


def test_every_address_is_named_with_what_came_of_it() -> None:
    error = unreached([Reach(HOME, "timeout"), Reach(OFFICE, "failed", "Permission denied")], online=True, platform="")
    assert "192.168.1.5 port 5864: no answer; 10.0.0.9 port 5864: Permission denied" in error.message
    assert "12D3" not in error.message
