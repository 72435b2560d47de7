"""Imports MLX and mlx-lm once, safely, and says what computes here.

Import this module (after ``blas.preload``) instead of ``mlx_lm`` itself: importing mlx-lm lowers the process's limit of
open files, soft and hard, for good.
"""

import os
import platform
import resource
import subprocess
import sys
from importlib.metadata import version

from kvnet.engine.mlx.blas import BlasReport
from kvnet.errors import EngineError

# The parts of mlx-lm used here are not its public interface everywhere; a contract test covers the names.
SUPPORTED = {"mlx": "0.32.", "mlx-lm": "0.32."}

CPU_PREFILL_STEP = 512
"""Tokens per prefill step on the CPU: large enough for BLAS, small enough for progress and cancellation."""

METAL_PREFILL_STEP = 2048
"""Tokens per prefill step on Metal: mlx-lm's own default there."""


def import_mlx_lm() -> None:
    """Imports mlx-lm while the limit of open files stays as it is.

    Raises:
        EngineError: mlx or mlx-lm is missing or of a version this build was not tested with.
    """
    _check_versions()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_OFFLINE"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    set_limit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        import mlx_lm.generate
        import mlx_lm.models.cache
        import mlx_lm.utils  # noqa: F401 - loaded here so that no later import changes the limit
    finally:
        resource.setrlimit = set_limit


def _check_versions() -> None:
    for package, prefix in SUPPORTED.items():
        try:
            found = version(package)
        except ModuleNotFoundError:
            raise EngineError(
                f"{package} {prefix}x is needed to run a model; it is not installed",
                hint="install kvnet with the extra 'cpu' on Linux, plain on macOS",
            ) from None
        if not found.startswith(prefix):
            raise EngineError(f"{package} {prefix}x is needed to run a model; found {found}")


def on_metal() -> bool:
    """Whether arrays live on an Apple GPU."""
    import mlx.core as mx

    return bool(mx.metal.is_available()) and mx.default_device() == mx.Device(mx.gpu, 0)


def prefill_step() -> int:
    """Tokens per prefill step on this device; steps end at absolute multiples of it."""
    return METAL_PREFILL_STEP if on_metal() else CPU_PREFILL_STEP


def versions_text(blas: BlasReport) -> str:
    """Versions that change the low bits of K/V, BLAS included."""
    words = [f"{package} {version(package)}" for package in SUPPORTED]
    return ", ".join([*words, f"blas {blas.text}"])


def device_text() -> str:
    """The chip, such as ``Apple M3 Max`` or ``AMD EPYC 9354 (CPU)``."""
    import mlx.core as mx

    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string") or str(mx.device_info().get("device_name", "Apple"))
    return f"{_linux_cpu() or mx.device_info().get('device_name', platform.machine())} (CPU)"


def system_text() -> str:
    """Operating system and machine, without a host name."""
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]} {platform.machine()}"
    return f"{platform.system()} {platform.machine()}"


def total_memory_bytes() -> int:
    """Bytes of memory a model may plan with: Metal's recommended working set, else 80 % of the RAM."""
    import mlx.core as mx

    recommended = mx.device_info().get("max_recommended_working_set_size") if on_metal() else None
    if recommended:
        return int(recommended)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 8 // 10


def _sysctl(name: str) -> str:
    try:
        done = subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _linux_cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        return ""
    return ""
