import io
import json

import pytest

from kvnet.errors import elsewhere
from kvnet_node.events import Note, PeerProgress, Progress, TextDelta
from kvnet_node.operations.requests import PinResult
from kvnet_node.output import Output, columns, escape, format_bytes, format_count, format_counted, format_seconds, pairs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Screen:
    def __init__(self, *, terminal: bool = False, json: bool = False, quiet: bool = False) -> None:
        stream = Terminal if terminal else io.StringIO
        self.out, self.err, self.clock = stream(), stream(), Clock()
        self.output = Output(json=json, quiet=quiet, stdout=self.out, stderr=self.err, clock=self.clock)

    def progress(self, at_s: float, done: int, total: int = 10, stage: str = "prefill") -> None:
        self.clock.now_s = at_s
        self.output.event(Progress(stage, done, total, "tokens"))


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("plain ascii, naïve, 日本", "plain ascii, naïve, 日本"),
        ("\x1b[2Jgone", "\\x1b[2Jgone"),
        ("a\rb", "a\\rb"),
        ("bell\x07", "bell\\x07"),
        ("right\u202eto left", "right\\u202eto left"),
        ("zero\u200bwidth", "zero\\u200bwidth"),
        ("line\nfeed", "line\\nfeed"),
        ("\x9b31m", "\\x9b31m"),
        ("\ud800", "\\ud800"),
    ],
)
def test_text_from_elsewhere_cannot_move_the_cursor_or_hide(text: str, escaped: str) -> None:
    assert escape(text) == escaped


def test_newlines_are_kept_where_asked() -> None:
    assert escape("a\n\tb\x1b", keep_newlines=True) == "a\n\tb\\x1b"


def test_cells_of_tables_are_escaped_and_aligned() -> None:
    assert columns([("a\x1b", "1")], ("NAME", "N")) == "NAME   N\na\\x1b  1"
    assert pairs([("one", "\x07"), ("three", "x")]) == "one    \\x07\nthree  x"


def test_a_result_for_a_person_goes_to_stdout_alone() -> None:
    screen = Screen()
    screen.output.message("working")
    screen.output.result(PinResult("a", pinned=True), lambda result: f"pinned {result.artifact}")
    assert screen.out.getvalue() == "pinned a\n"
    assert screen.err.getvalue() == "working\n"


def test_commands_for_another_machine_are_as_they_are_typed_in_json_too() -> None:
    screen = Screen(json=True)
    screen.output.result(PinResult(elsewhere("kvnet node start"), pinned=True), lambda _: "")
    assert json.loads(screen.out.getvalue()) == {"type": "pin", "artifact": "kvnet node start", "pinned": True}


def test_with_json_every_line_of_stdout_is_an_object_and_the_last_is_the_result() -> None:
    screen = Screen(json=True)
    screen.progress(0, 1)
    screen.progress(2, 5)
    screen.output.event(Note("plan", data={"tokens": 5}))
    screen.output.event(TextDelta("hel\nlo"))
    screen.output.message("a remark")
    screen.output.result(PinResult("a", pinned=True), lambda _: "never shown")
    lines = [json.loads(line) for line in screen.out.getvalue().splitlines()]
    assert [line["type"] for line in lines] == ["progress", "note", "text", "pin"]
    assert lines[-1] == {"type": "pin", "artifact": "a", "pinned": True}
    assert screen.err.getvalue() == "a remark\n"


def test_an_error_never_reaches_stdout() -> None:
    for json_wanted in (False, True):
        screen = Screen(json=json_wanted)
        screen.output.error(code="not_found", exit_code=60, message="expected x, found \x1b", hint="do y")
        assert screen.out.getvalue() == ""
        assert "\x1b" not in screen.err.getvalue()
    assert json.loads(screen.err.getvalue())["code"] == "not_found"


@pytest.mark.parametrize(
    ("hint", "printed"),
    [
        ("Run `kvnet store rebuild`.", "Run kvnet store rebuild"),
        (
            "`kvnet peers` shows who is there; `--from ADDR` names a peer.",
            "kvnet peers shows who is there; --from ADDR names a peer",
        ),
        ("kvnet list shows names", "kvnet list shows names"),
        ("one ` alone, and so on...", "one ` alone, and so on..."),
    ],
)
def test_hints_are_printed_in_one_style_and_given_to_programs_as_they_are(hint: str, printed: str) -> None:
    told, read = Screen(), Screen(json=True)
    for screen in (told, read):
        screen.output.error(code="usage", exit_code=2, message="expected `x`", hint=hint)
    assert told.err.getvalue() == f"error: expected `x`\n  {printed}\n"
    assert json.loads(read.err.getvalue())["hint"] == hint


def test_quiet_keeps_warnings_and_drops_the_rest() -> None:
    screen = Screen(quiet=True)
    screen.progress(0, 1)
    screen.progress(9, 5)
    screen.output.message("remark")
    screen.output.event(Note("plan"))
    screen.output.event(Note("beware", level="warning"))
    assert screen.err.getvalue() == "warning: beware\n"


def test_progress_appears_only_after_a_second() -> None:
    screen = Screen()
    screen.progress(0, 1)
    screen.progress(0.9, 5)
    assert screen.err.getvalue() == ""
    screen.progress(1.1, 6)
    assert "6 tokens of 10 tokens (60 %)" in screen.err.getvalue()


def test_without_a_terminal_progress_is_written_now_and_then() -> None:
    screen = Screen()
    for step in range(100):
        screen.progress(step / 10, step, total=1000)
    assert len(screen.err.getvalue().splitlines()) == 2


def test_what_is_waited_for_is_said_now_and_then_and_counts_nothing() -> None:
    screen = Screen()
    for step in range(70):
        screen.clock.now_s = step / 10
        screen.output.event(Progress("look up", 0, text="asking studio"))
    assert screen.err.getvalue().splitlines() == ["look up  asking studio"] * 2


def test_on_a_terminal_progress_is_cleared_before_the_result() -> None:
    screen = Screen(terminal=True)
    screen.progress(0, 1)
    screen.progress(2, 5)
    screen.output.result(PinResult("a", pinned=True), lambda _: "done")
    assert screen.err.getvalue().endswith("\r")
    assert screen.out.getvalue() == "done\n"


def test_streamed_text_ends_with_a_newline_of_its_own() -> None:
    screen = Screen()
    screen.output.event(TextDelta("Hel"))
    screen.output.event(TextDelta("lo"))
    screen.output.result(PinResult("a", pinned=True), lambda _: "")
    assert screen.out.getvalue() == "Hello\n"


def test_generated_control_characters_do_not_reach_a_terminal() -> None:
    screen = Screen(terminal=True)
    screen.output.event(TextDelta("\x1b]0;title\x07 text\n"))
    assert screen.out.getvalue() == "\\x1b]0;title\\x07 text\n"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (147_456, "147 kB"), (1_179_648_000, "1.18 GB"), (18_874_368_000, "18.9 GB")],
)
def test_sizes_have_three_digits_and_decimal_units(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_durations_and_counts_are_readable() -> None:
    assert format_seconds(0.0341) == "0.034 s"
    assert format_seconds(7.12) == "7.1 s"
    assert format_seconds(125) == "2 min 5 s"
    assert format_seconds(7260) == "2 h 1 min"
    assert format_seconds(71 * 3600 + 60) == "71 h 1 min"
    assert format_seconds(40 * 86400 + 7200) == "40 d 2 h"
    assert format_count(12_288) == "12,288"


@pytest.mark.parametrize(("count", "text"), [(0, "0 files"), (1, "1 file"), (2, "2 files"), (12_288, "12,288 files")])
def test_one_is_not_in_the_plural(count: int, text: str) -> None:
    assert format_counted(count, "file") == text


def transfer(done: int, peers: int = 2) -> Progress:
    parts = [PeerProgress(f"12D3KooWPeer{n:04d}", done // peers, n, 1_500_000.0, "bulk") for n in range(peers)]
    return Progress("fetch", done, 40_000_000, "bytes", "5/10 chunks verified", rate=3_000_000.0, peers=parts)


def test_a_transfer_is_a_bar_with_a_line_for_each_peer_redrawn_in_place() -> None:
    screen = Screen(terminal=True)
    for at_s, done in ((0.0, 0), (1.5, 10_000_000), (2.5, 20_000_000)):
        screen.clock.now_s = at_s
        screen.output.event(transfer(done))
    first, _, second = screen.err.getvalue().rpartition("\r\x1b[3A\x1b[J\r")
    assert first.startswith("\r\x1b[J\r")
    bar, verified, *peers = second.split("\n")
    assert bar.split("  ")[:3] == ["fetch", "[########--------]", "20.0 MB of 40.0 MB (50 %)"]
    assert bar.rstrip().endswith("3.00 MB/s  6.7 s left")
    assert verified.strip() == "5/10 chunks verified"
    assert [line.strip() for line in peers] == [
        "KooWPeer0000  1.50 MB/s  10.0 MB in 0 chunks  bulk",
        "KooWPeer0001  1.50 MB/s  10.0 MB in 1 chunk  bulk",
    ]
    screen.output.close()
    assert screen.err.getvalue().endswith("\r\x1b[3A\x1b[J\r")


def test_many_peers_of_a_transfer_are_counted() -> None:
    screen = Screen(terminal=True)
    screen.output.event(transfer(0))
    screen.clock.now_s = 2.0
    screen.output.event(transfer(10_000_000, peers=11))
    assert screen.err.getvalue().split("\n")[-1].strip() == "and 3 more"


def test_without_a_terminal_a_transfer_writes_a_line_a_second_and_none_when_quiet() -> None:
    screen, quiet = Screen(), Screen(quiet=True)
    for step in range(41):
        for each in (screen, quiet):
            each.clock.now_s = step / 10
            each.output.event(transfer(step * 1000))
    lines = screen.err.getvalue().splitlines()
    assert len(lines) == 4
    assert "\x1b" not in screen.err.getvalue()
    assert "from KooWPeer0000  1.50 MB/s" in lines[-1]
    assert quiet.err.getvalue() == ""
