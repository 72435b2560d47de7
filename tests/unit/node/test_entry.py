import json
import subprocess
import sys

import pytest

from kvnet.errors import InterruptedByUserError
from kvnet_node.entry import INTERRUPTED

INTERRUPT_AN_IMPORT = """
import sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "kvnet.errors":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
from kvnet_node.entry import main
sys.exit(main())
"""


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_ctrl_c_while_modules_are_loaded_exits_with_130_without_a_traceback(flags: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPT_AN_IMPORT, *flags, "list"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (INTERRUPTED, "")
    message = json.loads(done.stderr)["message"] if flags else done.stderr.removeprefix("error: ").strip()
    assert message == "interrupted"


def test_the_exit_code_is_the_one_of_an_interrupt() -> None:
    assert InterruptedByUserError.exit_code == INTERRUPTED
