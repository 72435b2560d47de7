"""Loads OpenBLAS before MLX on Linux.

The CPU build of MLX is linked to the reference BLAS, whose float32 product is about 17 times slower than OpenBLAS.
A shared object loaded with ``RTLD_GLOBAL`` *before* MLX resolves MLX's BLAS symbols first; nothing is rebuilt.
On macOS MLX uses Accelerate and Metal: nothing is loaded there.
"""

import ctypes
import glob
import os
import sys
from dataclasses import dataclass

# Debian, Ubuntu and Fedora names of the pthread build; the soname alone lets the dynamic linker choose.
_SONAME = "libopenblas.so.0"
_KNOWN_PATTERNS = (
    "/usr/lib/*/openblas-pthread/libopenblas.so.0",
    "/usr/lib/*/libopenblas.so.0",
    "/usr/lib64/libopenblas*.so.0",
    "/usr/lib/libopenblas*.so.0",
    "/usr/local/lib/libopenblas*.so.0",
)


@dataclass(frozen=True, slots=True)
class BlasReport:
    """Which BLAS library MLX computes with.

    Attributes:
        name: ``"openblas"``, ``"reference"`` (the wheel's own) or ``"accelerate"``.
        detail: version, CPU kernel and thread count; changes the low bits of K/V, so it is part of the producer record.
    """

    name: str
    detail: str

    @property
    def text(self) -> str:
        """One word for the producer record, such as ``openblas 0.3.21 SkylakeX x2``."""
        return f"{self.name} {self.detail}".strip()


def preload() -> BlasReport:
    """Loads OpenBLAS with ``RTLD_GLOBAL`` if it is installed; harmless where it is not.

    Must run before ``mlx.core`` is imported.

    Raises:
        RuntimeError: MLX was imported already, so the order is wrong.
    """
    if sys.platform == "darwin":
        return BlasReport("accelerate", "")
    if "mlx.core" in sys.modules:
        raise RuntimeError("OpenBLAS must be loaded before mlx.core, which is imported already")
    # An explicit "off" lets the slow path be measured and tested.
    if os.environ.get("KVNET_OPENBLAS", "") == "off":
        return BlasReport("reference", "")
    for candidate in _candidates():
        try:
            library = ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        if hasattr(library, "cblas_sgemm"):
            return BlasReport("openblas", _describe(library))
    return BlasReport("reference", "")


def _candidates() -> list[str]:
    known = [path for pattern in _KNOWN_PATTERNS for path in sorted(glob.glob(pattern))]
    # The known pthread builds come first: the soname may point to a serial or OpenMP build.
    return [*known, _SONAME]


def _describe(library: ctypes.CDLL) -> str:
    words: list[str] = []
    try:
        library.openblas_get_config.restype = ctypes.c_char_p
        config = (library.openblas_get_config() or b"").decode("ascii", "replace").split()
        words += config[1:2]
        library.openblas_get_corename.restype = ctypes.c_char_p
        words.append((library.openblas_get_corename() or b"").decode("ascii", "replace"))
        words.append(f"x{int(library.openblas_get_num_threads())}")
    except (AttributeError, ValueError):
        return " ".join(words)
    return " ".join(word for word in words if word)
