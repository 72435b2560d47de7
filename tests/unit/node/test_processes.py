import subprocess
import sys

from kvnet_node.processes import ended_after

PIPE = subprocess.PIPE
ECHO = "import sys; sys.stdout.write(sys.stdin.read()); sys.stderr.write('said')"


def test_nothing_is_left_of_a_process_that_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", ECHO], stdin=PIPE, stdout=PIPE, stderr=PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with ended_after(process, 300.0):
        process.stdin.write(b"told")
        process.stdin.close()
        assert (process.stdout.read(), process.stderr.read()) == (b"told", b"said")
    assert process.returncode == 0
    assert all(pipe.closed for pipe in (process.stdin, process.stdout, process.stderr))


def test_a_process_that_goes_on_is_ended_with_what_was_to_be_told_it() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    with ended_after(process, 0.0):
        process.stdin.write(b"told")
        assert process.stdout.read() == b""
    assert process.returncode is not None
    assert process.stdin.closed
    assert process.stdout.closed
