"""What is said to somebody who leaves a swarm, or was removed from one."""

import pytest

from kvnet_node.commands.swarms import leaving_text, left_text, staying_text
from kvnet_node.operations.requests import LeaveResult
from kvnet_node.removed_text import removed_text


def test_who_was_removed_is_told_what_that_means() -> None:
    told = removed_text(["mine", "team"])
    assert told.startswith("this machine was removed from mine, team: it finds nothing new there until it joins")
    assert (told.count("kvnet leave"), "kvnet leave team forgets it" in told) == (1, True)


@pytest.mark.parametrize(
    ("left", "said", "unsaid"),
    [
        (LeaveResult("team", 2, "removed", 2, "vm"), "had removed this machine before", "founder"),
        (LeaveResult("team", 0, "colleague", 2, "vm"), "until its founder, vm, runs", "evicted"),
        (LeaveResult("team", 1, "founder", 2), "nobody can remove members any more", "until"),
        (LeaveResult("team", 0, "founder", 0), "nobody else was in it", "founder"),
        (LeaveResult("team", 0, "alone", 0), "nobody else was in it", "founder"),
    ],
)
def test_what_others_see_after_it_was_left_depends_on_who_left(left: LeaveResult, said: str, unsaid: str) -> None:
    text = left_text(left)
    assert (said in text, unsaid in text) == (True, False)
    assert text.startswith("left team; 1 artifact of it" if left.artifacts == 1 else "left team")


def test_a_founder_is_told_before_what_nobody_can_do_afterwards() -> None:
    assert "nobody can remove any of the 2 other members" in leaving_text(LeaveResult("team", 0, "founder", 2))
    assert "new invitation" in leaving_text(LeaveResult("team", 0, "colleague", 2, "vm"))
    assert "was removed from team" in leaving_text(LeaveResult("team", 0, "removed", 2, "vm"))


@pytest.mark.parametrize(("members", "text"), [(0, "0 members stay"), (1, "1 member stays"), (2, "2 members stay")])
def test_how_many_stay_after_a_removal_is_told(members: int, text: str) -> None:
    assert staying_text(members) == text
