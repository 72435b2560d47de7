import io

from simulations.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_nothing_is_shown_of_what_takes_less_than_a_second() -> None:
    clock, stream = Clock(), Terminal()
    progress = Progress("run", stream=stream, clock=clock)
    for step in range(9):
        clock.now_s += 0.1
        progress(step, 10)
    progress.close()
    assert not stream.getvalue()


def test_a_terminal_has_a_bar_that_goes_away() -> None:
    clock, stream = Clock(), Terminal()
    progress = Progress("run", stream=stream, clock=clock)
    progress(0, 4)
    clock.now_s += 2.0
    progress(1, 4)
    assert stream.getvalue() == "\r\x1b[Krun  [######------------------] 1 of 4, 6 s left"
    progress.close()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_without_a_terminal_a_line_is_written_now_and_then() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = Progress("run", stream=stream, clock=clock)
    for step in range(200):
        clock.now_s += 0.1
        progress(step, 200)
    progress.close()
    assert 3 <= len(stream.getvalue().splitlines()) <= 5
    assert "\x1b" not in stream.getvalue()
