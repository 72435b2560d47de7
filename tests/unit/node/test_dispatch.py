from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from kvnet.errors import UnsupportedVersionError
from kvnet.store.lock import DataDirLock
from kvnet_node.config import load_config
from kvnet_node.control import control_socket, serve_control
from kvnet_node.dispatch import run_operation
from kvnet_node.invocation import Settings
from kvnet_node.operations.registry import OPERATIONS
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
