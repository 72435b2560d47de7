"""The command line starts without the slow libraries: they load when a verb needs them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SLOW = {"libp2p", "mlx", "mlx_lm", "transformers", "multiaddr", "numpy"}


def loaded_after(statement: str, directory: Path) -> set[str]:
    """Run a statement in a new interpreter; return the top-level names of the modules it loaded."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted({{m.partition('.')[0] for m in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=directory)
    return set(json.loads(done.stdout))


@pytest.mark.docs
@pytest.mark.parametrize("module", ["kvnet_node.entry", "kvnet_node.app", "kvnet", "kvnet.errors"])
def test_importing_loads_neither_libp2p_nor_mlx(module: str, tmp_path: Path) -> None:
    loaded = loaded_after(f"import {module}", tmp_path)
    assert module.partition(".")[0] in loaded
    assert loaded & SLOW == set()


@pytest.mark.docs
def test_help_loads_neither_libp2p_nor_mlx(tmp_path: Path) -> None:
    statement = (
        "import contextlib, io, sys\n"
        "from kvnet_node.app import main\n"
        "sys.argv = ['kvnet', '--help']\n"
        "out = io.StringIO()\n"
        "with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):\n"
        "    main()\n"
        "assert 'kvnet' in out.getvalue()"
    )
    assert loaded_after(statement, tmp_path) & SLOW == set()
