"""What ``kvnet swarm list`` says beside its table."""

from kvnet_node.commands.swarms import removed_text
from kvnet_node.operations.requests import SwarmEntry, SwarmListResult


def listed(*roles: str) -> SwarmListResult:
    return SwarmListResult([SwarmEntry(f"s{number}", "00", role, 2, 0, 0) for number, role in enumerate(roles)])


def test_who_was_removed_is_told_what_that_means() -> None:
    assert removed_text(listed("founder", "device", "alone")) == ""
    told = removed_text(listed("founder", "removed", "removed"))
    assert told == "this machine was removed from s1, s2: it finds nothing new there until it joins anew"
