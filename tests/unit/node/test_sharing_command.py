"""What ``kvnet share`` says at its end."""

import pytest

from kvnet_node.commands.sharing import _readers
from kvnet_node.operations.requests import ShareResult


@pytest.mark.parametrize(
    ("members", "said"),
    [(2, "2 other members"), (1, "1 other member"), (0, "kvnet invite --colleague --swarm team ")],
)
def test_who_can_read_what_is_shared_is_said_with_the_invitation_that_is_missing(members: int, said: str) -> None:
    result = ShareResult(
        "team", "bafyr4i", ["bafyr4i"], 1, 1, has_context=True, existed=False, strangers=[], members=members
    )
    assert said in _readers(result)
