"""What a fetch is for decides its order and its patience."""

from kvnet.protocol.fetch_limits import PATIENCE_S, ChunkOrder, FetchLimits, limits_for
from kvnet.protocol.pace import Purpose

OWN = FetchLimits(idle_s=3.0, attempts=1)


def test_where_somebody_waits_chunks_come_from_the_front_and_nobody_left_is_the_end() -> None:
    limits = limits_for(Purpose.INTERACTIVE)
    assert limits == FetchLimits()
    assert (limits.order, limits.patience_s) == (ChunkOrder.FRONT_FIRST, 0.0)
    assert limits_for(Purpose.INTERACTIVE, OWN) is OWN


def test_copy_begins_with_what_is_rare_and_has_patience() -> None:
    limits = limits_for(Purpose.REPLICATION, OWN)
    assert (limits.order, limits.patience_s) == (ChunkOrder.RAREST_FIRST, PATIENCE_S)
    assert (limits.idle_s, limits.attempts) == (3.0, 1)


def test_repair_begins_with_what_is_rare_and_is_tried_again_another_day() -> None:
    limits = limits_for(Purpose.SCRUB)
    assert (limits.order, limits.patience_s) == (ChunkOrder.RAREST_FIRST, 0.0)
