"""The limit on open files of a running node."""

import subprocess
import sys

SCRIPT = """
import resource, sys
from kvnet_node.open_files import raise_open_files_limit
soft, hard = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
raise_open_files_limit(1000)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def limits_after(soft: int, hard: int) -> list[int]:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(soft), str(hard)], capture_output=True, check=True)
    return [int(number) for number in done.stdout.split()]


def test_a_low_limit_is_raised_to_what_a_node_wants() -> None:
    assert limits_after(256, 4096) == [1000, 4096]


def test_the_hard_limit_is_the_most_that_is_taken() -> None:
    assert limits_after(256, 512) == [512, 512]


def test_a_higher_limit_is_not_lowered() -> None:
    assert limits_after(2048, 4096) == [2048, 4096]
