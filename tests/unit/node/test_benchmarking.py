from pathlib import Path
from typing import Any

import pytest

from kvnet.errors import EngineError
from kvnet_node.benchmarking import ROWS, Bench, Measured, text_of
from kvnet_node.commands.bench import render
from kvnet_node.demonstration import BYTES_PER_TOKEN, Side, Timing, demo_document

TIMES = {
    "plain_mlx_lm_s": [2.0, 2.2, 9.0],
    "cold_s": [2.1, 2.2, 2.3],
    "empty_network_s": [2.2, 2.25, 2.3],
    "peer_s": [0.2, 0.1, 0.3],
    "local_store_s": [0.1, 0.1, 0.1],
}


def measured(**texts: set[str]) -> Measured:
    return Measured(1024, 1033, 1060, TIMES, {key: {"the same"} for key in TIMES} | texts)


def test_a_length_is_one_line_of_the_agreed_shape() -> None:
    record = measured().record("m")
    assert list(record)[:8] == [
        "type", "prefix_tokens", "cold_s", "plain_mlx_lm_s", "local_store_s", "peer_s", "empty_network_s", "same_text",
    ]  # fmt: skip
    assert list(record.values())[:8] == ["ttft", 1033, 2.2, 2.2, 0.1, 0.2, 2.25, True]


def test_every_row_of_the_table_is_measured_and_none_twice() -> None:
    assert {row.key for row in ROWS if not row.needs_endpoint} == TIMES.keys()
    assert len({row.key for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("texts", [{"peer_s": {"another"}}, {"peer_s": {"the same", "another"}}])
def test_one_other_text_is_not_the_same_text(texts: dict[str, set[str]]) -> None:
    assert not measured(**texts).same_text


def test_empty_answers_prove_nothing() -> None:
    assert not Measured(1, 1, 1, TIMES, {key: {""} for key in TIMES}).same_text


def test_ratios_stand_beside_the_medians() -> None:
    text = render(measured())
    assert "1,033 of 1,060 tokens shared, median of 3 rounds" in text
    assert "11.0 times as soon as cold and takes 2.00 times as long as disk" in text
    assert "+50 ms beside mlx-lm alone" in text


def test_a_long_text_goes_on_with_numbered_parts() -> None:
    wanted = 3 * len(demo_document()) / BYTES_PER_TOKEN
    text = text_of(int(wanted))
    assert abs(len(text) - wanted * BYTES_PER_TOKEN) < 50
    assert "Part 2." in text
    assert "Part 3." in text


class _Answers(Side):
    """Gives these answers in turn, and the last one from there on."""

    def __init__(self, *timings: Timing) -> None:
        self.timings = list(timings)

    def answer(self, *_: Any) -> Timing:
        return self.timings.pop(0) if len(self.timings) > 1 else self.timings[0]


@pytest.mark.parametrize(
    ("sources", "reused", "asked"),
    [
        ([], 0, "peer"),
        ([{"source": "disk", "tokens": 9}], 9, "peer"),
        ([{"source": "disk", "tokens": 8}], 8, "disk"),
        ([{"source": "ram", "tokens": 9}], 9, ""),
    ],
)
def test_a_row_that_shows_something_else_than_it_says_is_refused(
    sources: list[dict[str, Any]], reused: int, asked: str
) -> None:
    side = _Answers(Timing(0.1, "text", reused, sources, 12))
    bench = Bench(side, side, Path("m"), Path("d"), Path("c"), prefix_tokens=9)
    with pytest.raises(EngineError, match="expected"):
        bench.answer(source=asked)


def test_a_peer_that_was_too_late_is_asked_again() -> None:
    late = Timing(2.0, "text", 0, [], 12)
    side = _Answers(late, late, Timing(0.1, "text", 9, [{"source": "peer", "tokens": 9}], 12))
    bench = Bench(side, side, Path("m"), Path("d"), Path("c"), prefix_tokens=9)
    assert bench.answer(source="peer").ttft_s == 0.1
