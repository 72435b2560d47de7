"""What importing MLX does to the process, and which BLAS it computes with."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvnet.engine.mlx.blas import BlasReport

pytestmark = pytest.mark.mlx


def run(code: str, root: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root,
        env={**os.environ, **environment},
    )  # fmt: skip
    return done.stdout.strip()


def test_importing_mlx_lm_leaves_the_limit_of_open_files_alone(repository_root: Path) -> None:
    code = (
        "import resource as r\n"
        "before = r.getrlimit(r.RLIMIT_NOFILE)\n"
        "from kvnet.engine.mlx import runtime\n"
        "runtime.import_mlx_lm()\n"
        "print(before == r.getrlimit(r.RLIMIT_NOFILE), r.setrlimit.__module__)"
    )
    assert run(code, repository_root) == "True resource"


def test_blas_is_loaded_before_mlx_or_not_at_all(repository_root: Path) -> None:
    code = (
        "import mlx.core\n"
        "from kvnet.engine.mlx import blas\n"
        "try:\n    blas.preload()\nexcept RuntimeError as error:\n    print(error)"
    )
    expected = "" if sys.platform == "darwin" else "OpenBLAS must be loaded before mlx.core, which is imported already"
    assert run(code, repository_root) == expected


@pytest.mark.skipif(sys.platform == "darwin", reason="Accelerate is part of the system")
def test_slow_reference_blas_is_said_to_be_in_use(repository_root: Path) -> None:
    code = "from kvnet.engine.mlx import blas\nprint(blas.preload().text)"
    assert run(code, repository_root, KVNET_OPENBLAS="off") == "reference"


def test_blas_report_is_one_line_for_the_producer_record() -> None:
    assert BlasReport("openblas", "0.3.21 Haswell x4").text == "openblas 0.3.21 Haswell x4"
    assert BlasReport("accelerate", "").text == "accelerate"


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for a process that is no child of this one")
def test_engine_ends_when_its_node_is_killed(tiny_llama: Path, tmp_path: Path, repository_root: Path) -> None:
    import select
    import signal

    code = (
        "import sys, trio\n"
        "from pathlib import Path\n"
        "from kvnet.engine.client import open_engine\n"
        "async def main():\n"
        "    async with open_engine(Path(sys.argv[1]), work_dir=Path(sys.argv[2])) as engine:\n"
        "        print(engine.process_id, flush=True)\n"
        "        await trio.sleep_forever()\n"
        "trio.run(main)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tiny_llama), str(tmp_path)], stdout=subprocess.PIPE, cwd=repository_root
    ) as node:
        assert node.stdout is not None
        engine = os.pidfd_open(int(node.stdout.readline()))
        try:
            node.send_signal(signal.SIGKILL)
            assert select.select([engine], [], [], 120)[0], "the engine outlived its node"
        finally:
            os.close(engine)
