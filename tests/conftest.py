"""Settings shared by every test: a steady Hypothesis profile, and no test reads the user's own directories."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "steady",
    deadline=None,  # two shared cores make any time limit a coin toss
    derandomize=True,  # a red run is red again when it is repeated
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("nightly", deadline=None, max_examples=5000)
settings.load_profile(os.environ.get("KVNET_HYPOTHESIS_PROFILE", "steady"))


@pytest.fixture(autouse=True, scope="session")
def _own_directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Point the default data directory away from the user's own, in this process and in those it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVNET_DATA_DIR", str(tmp_path_factory.getbasetemp() / "unused-data-dir"))
        patch.delenv("KVNET_CONFIG", raising=False)
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("NO_COLOR", "1")
        yield


@pytest.fixture(autouse=True, scope="session")
def _default_interrupts() -> None:
    """A shell that runs the tests in the background has them ignore Ctrl-C, and so would the programs they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def repository_root() -> Path:
    """The root of the checkout."""
    return Path(__file__).parent.parent
