import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from kvnet.errors import DataDirLockedError, UnsupportedVersionError
from kvnet.store.lock import DataDirLock
from kvnet_node import dispatch
from kvnet_node.config import load_config
from kvnet_node.control import control_socket, serve_control
from kvnet_node.dispatch import run_operation
from kvnet_node.events import Event, Note
from kvnet_node.invocation import Settings
from kvnet_node.operations.registry import OPERATIONS
from kvnet_node.operations.requests import FetchRequest, PeersRequest
from kvnet_node.paths import prepare_data_dir


async def of_another_version(name: str, data: bytes, on_event: Callable[..., None]) -> Any:
    return {"artifacts": ["a name where an object is expected"]}


async def test_a_node_that_was_not_restarted_after_an_update_is_told_from_a_fault(tmp_path: Path) -> None:
    settings = Settings(prepare_data_dir(tmp_path), load_config(tmp_path))
    lock = DataDirLock(settings.paths.data_dir)
    lock.acquire()
    async with trio.open_nursery() as nursery, control_socket(settings.paths.control_socket) as (listener, path):
        lock.record_control_socket(path)
        nursery.start_soon(serve_control, listener, of_another_version)

        def ask() -> object:
            return run_operation(settings, "list", OPERATIONS["list"].request(), lambda _event: None)

        with pytest.raises(UnsupportedVersionError, match="the running node") as refused:
            await trio.to_thread.run_sync(ask)
        nursery.cancel_scope.cancel()
    lock.release()
    assert "kvnet node stop" in refused.value.hint


class SaidError(Exception):
    """Ends a wait as soon as it is spoken of."""


def test_a_verb_that_waits_for_another_one_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(prepare_data_dir(tmp_path), load_config(tmp_path))
    monkeypatch.setattr(dispatch, "SAY_AFTER_S", 0.0)
    lock = DataDirLock(settings.paths.data_dir)
    lock.acquire("add")

    def say(words: str) -> None:
        raise SaidError(words)

    with pytest.raises(SaidError, match=rf"the command add \(process {os.getpid()}\) is at work .* 5 s at most"):
        run_operation(settings, "list", OPERATIONS["list"].request(), lambda _event: None, say)
    monkeypatch.setattr(dispatch, "LOCK_WAIT_S", 0.0)
    with pytest.raises(DataDirLockedError) as refused:
        run_operation(settings, "list", OPERATIONS["list"].request(), lambda _event: None)
    lock.release()
    assert "the command add at work" in refused.value.hint


def test_a_program_is_told_by_an_event_that_a_patient_verb_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(prepare_data_dir(tmp_path), load_config(tmp_path))
    monkeypatch.setattr(dispatch, "LOCK_WAIT_S", 0.0)
    lock = DataDirLock(settings.paths.data_dir)
    lock.acquire("fetch")

    def told(event: Event) -> None:
        assert isinstance(event, Note)
        raise SaidError(event.text)

    with pytest.raises(SaidError, match=r"the command fetch .* waiting for it$"):
        run_operation(settings, "fetch", FetchRequest("bafyr4i"), told)
    lock.release()


@pytest.mark.parametrize(
    ("name", "bounded"),
    [("status", True), ("list", True), ("peers", True), ("node stop", True), ("add", False), ("fetch", False),
     ("generate", False), ("ask", False), ("explain", False)],
)  # fmt: skip
def test_only_what_asks_for_things_at_hand_is_cut_off_by_silence(name: str, bounded: bool) -> None:
    assert OPERATIONS[name].quick == bounded


def test_peers_that_are_asked_first_may_be_slow() -> None:
    peers = OPERATIONS["peers"]
    assert dispatch._limit_s(peers, PeersRequest()) == dispatch.ANSWER_S
    assert dispatch._limit_s(peers, PeersRequest(models=True)) is None
