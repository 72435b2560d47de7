"""Stop texts are found wherever they lie in a growing text."""

import pytest

from kvnet.engine.mlx.stopping import StopText


@pytest.mark.parametrize(
    ("texts", "pieces", "end"),
    [
        (("\n",), ["a", "\n\n"], (1, 1)),
        (("stop",), ["a st", "o", "p now"], (2, 1)),
        (("zz", "b"), ["ab", "zz"], (0, 2)),
        (("abc", "b"), ["xabc"], (0, 3)),
        (("end",), ["en", "en", "d"], (2, 1)),
    ],
)
def test_the_stop_text_that_is_complete_first_ends_the_answer(
    texts: tuple[str, ...], pieces: list[str], end: tuple[int, int]
) -> None:
    watch = StopText(texts)
    cuts = [(i, cut) for i, piece in enumerate(pieces) if (cut := watch.cut(piece)) is not None]
    assert cuts[0] == end


def test_without_stop_texts_nothing_ends_it() -> None:
    watch = StopText(())
    assert [watch.cut(piece) for piece in ("a", "", "b")] == [None, None, None]
