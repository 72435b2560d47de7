"""What becomes of chunks that are late, and what second copies may cost."""

from kvnet.protocol.fetch_late import AskTwice, LateChunks, LetGo
from kvnet.protocol.fetch_peer import FetchPeer
from kvnet.protocol.ids import PeerId

LENGTH = 1000


def idle() -> FetchPeer:
    """A peer that delivers 1 MB a second, and has nothing to do."""
    fast = FetchPeer(PeerId(b"fast"))
    fast.begin(0.0)
    fast.count(10_000_000, 10.0)
    return fast


def holder(*indices: int) -> FetchPeer:
    """A peer that was asked for chunks at 0 s and delivers 100 bytes a second."""
    slow = FetchPeer(PeerId(b"slow"))
    slow.begin(0.0)
    for index in indices:
        slow.ask(index, LENGTH, 0.0)
    slow.count(1000, 10.0)
    return slow


def late(missing: set[int], budget_bytes: int) -> LateChunks:
    chunks = LateChunks(missing, budget_bytes)
    chunks.service.note(0.1)
    return chunks


def test_second_copies_are_asked_for_within_the_budget_and_then_the_slow_peer_is_let_go() -> None:
    slow = holder(0, 1, 2)
    chunks = late({0, 1, 2}, budget_bytes=2 * LENGTH)
    found = [chunks.look(idle(), [slow], 10.0) for _ in range(3)]
    assert {each.index for each in found[:2] if isinstance(each, AskTwice)} == {1, 2}
    assert found[2] == LetGo(slow)


def test_no_second_copy_is_larger_than_what_is_left_of_the_budget() -> None:
    slow = holder(0)
    assert late({0}, budget_bytes=LENGTH - 1).look(idle(), [slow], 10.0) == LetGo(slow)
    assert late({0}, budget_bytes=LENGTH).look(idle(), [slow], 10.0) == AskTwice(0)


def test_nothing_is_late_before_anything_has_arrived_or_once_it_is_here() -> None:
    assert LateChunks({0}, 10 * LENGTH).look(idle(), [holder(0)], 10.0) is None
    assert late(set(), budget_bytes=10 * LENGTH).look(idle(), [holder(0)], 10.0) is None
