"""What ``kvnet gc`` says when a limit is not kept although everything went that may."""

from kvnet_node.commands.artifacts import why_not_kept
from kvnet_node.operations.requests import CollectResult


def left(held_bytes: int, free_bytes: int) -> CollectResult:
    return CollectResult(
        [], 0, held_bytes, 1_000_000, artifacts=3, pinned=2, free_bytes=free_bytes, min_free_bytes=20_000_000_000
    )


def test_nothing_is_wrong_with_a_store_that_keeps_its_limits() -> None:
    assert why_not_kept(left(1_000_000, 20_000_000_000)) == ""


def test_the_limit_that_is_not_kept_is_named_with_what_was_found_and_how_much_is_pinned() -> None:
    assert why_not_kept(left(2_250_000, 30_000_000_000)) == (
        "expected at most 1.00 MB in the store, found 2.25 MB; artifacts pinned: 2 of 3"
    )
    assert why_not_kept(left(0, 5_000_000_000)) == (
        "expected 20.0 GB free on its disk, found 5.00 GB; artifacts pinned: 2 of 3"
    )
    assert why_not_kept(left(2_250_000, 5_000_000_000)).count("expected") == 2
