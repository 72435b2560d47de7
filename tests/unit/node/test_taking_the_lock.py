import time
from pathlib import Path

import pytest

from kvnet.errors import DataDirLockedError
from kvnet.store.lock import DataDirLock
from kvnet_node import serving


def test_a_node_waits_for_a_verb_that_is_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verb, node = DataDirLock(tmp_path), DataDirLock(tmp_path)
    verb.acquire()
    monkeypatch.setattr(time, "sleep", lambda _: verb.release())
    serving._take(node)
    assert node.held


def test_a_node_that_runs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = DataDirLock(tmp_path), DataDirLock(tmp_path)
    first.acquire()
    first.record_control_socket(tmp_path / "control.sock")
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("waited"))
    with pytest.raises(DataDirLockedError) as refused:
        serving._take(second)
    assert "kvnet node stop" in refused.value.hint


def test_a_verb_that_keeps_the_directory_is_named_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verb, node = DataDirLock(tmp_path), DataDirLock(tmp_path)
    verb.acquire()
    monkeypatch.setattr(serving, "LOCK_WAIT_S", 0.0)
    with pytest.raises(DataDirLockedError) as refused:
        serving._take(node)
    assert "a kvnet command at work" in refused.value.hint
    assert "node stop" not in refused.value.hint
