"""Where an operation runs: in the running node of the data directory, or here under its lock."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from kvnet.errors import DataDirLockedError
from kvnet.store.lock import DataDirLock
from kvnet_node.control import NodeGoneError, call_node, connect_control
from kvnet_node.events import Event, Note
from kvnet_node.logs import configure_logs
from kvnet_node.operations.registry import Operation, operation
from kvnet_node.operations.requests import Request, Result, StopRequest, StopResult

if TYPE_CHECKING:
    from kvnet_node.invocation import Settings

LOCK_WAIT_S = 5.0
"""How long a verb waits for another verb to finish before it says who owns the data directory."""
LOCK_POLL_S = 0.05
EXIT_WAIT_S = 2.0
STOP_WAIT_S = 30.0
"""A node that has not gone by then, and by the time its running requests get, is reported, not killed."""

OnEvent = Callable[[Event], None]


def run_operation(
    settings: "Settings", name: str, request: Request, on_event: OnEvent, *, verbose: bool = False
) -> Result:
    """Run an operation and return its result.

    Args:
        settings: of the data directory.
        name: the operation.
        request: its request.
        on_event: takes what it reports.
        verbose: a local run logs to stderr.

    Raises:
        DataDirLockedError: another process owns the data directory and answers on no control socket.
        KvnetError: whatever the operation raises, of the same class wherever it ran.
    """
    configure_logs(None, verbose=verbose)
    return trio.run(_run, settings, operation(name), request, on_event, strict_exception_groups=True)


async def _run(settings: "Settings", wanted: Operation, request: Request, on_event: OnEvent) -> Result:
    lock = DataDirLock(settings.paths.data_dir)
    deadline = trio.current_time() + LOCK_WAIT_S
    said = False
    while True:
        result = await _run_remotely(lock, wanted, request, on_event)
        if result is not None:
            return result
        try:
            lock.acquire()
            break
        except DataDirLockedError:
            late = trio.current_time() >= deadline
            if late and not wanted.patient:
                raise
            if late and not said:
                on_event(Note("another kvnet command is at work in this data directory; waiting for it"))
                said = True
        await trio.sleep(LOCK_POLL_S)
    try:
        return await run_locally(settings, wanted, request, on_event)
    finally:
        lock.release()


async def _run_remotely(lock: DataDirLock, wanted: Operation, request: Request, on_event: OnEvent) -> Result | None:
    """The result from the running node; None when no node answers."""
    import msgspec

    owner = lock.owner()
    if owner is None or not owner.control_socket:
        return None
    stream = await connect_control(Path(owner.control_socket))
    if stream is None:
        return None
    return msgspec.json.decode(await call_node(stream, wanted.name, request, on_event), type=wanted.result)


async def run_locally(settings: "Settings", wanted: Operation, request: Request, on_event: OnEvent) -> Result:
    """Run an operation with services opened for it alone; the caller owns the lock."""
    from kvnet_node.logs import configure_logs
    from kvnet_node.operations.context import OperationContext
    from kvnet_node.wiring import open_services

    # A verb's own process keeps no log; unconfigured, records would land on stdout, among the results.
    configure_logs(None, verbose=settings.verbose)
    async with open_services(settings, network=wanted.needs_network, serving=False) as services:
        return await wanted.load()(OperationContext(services, on_event), request)


def stop_node(settings: "Settings") -> StopResult:
    """Stop the running node and wait until its process has let go of the data directory.

    Returns:
        The result with the process id; 0 when no node was running.

    Raises:
        DataDirLockedError: something else owns the data directory, or the node does not go.
    """
    owner = DataDirLock(settings.paths.data_dir).owner()
    pid = trio.run(_ask_to_stop, settings, strict_exception_groups=True)
    if pid is None:
        if owner is not None and _is_locked(settings):
            raise DataDirLockedError(
                f"process {owner.pid} owns {settings.paths.data_dir} and is no node that could be asked to stop",
                hint=f"wait for it, or see what it is: ps -p {owner.pid}",
            )
        return StopResult(pid=0)
    _wait_until_gone(settings, pid)
    return StopResult(pid)


async def _ask_to_stop(settings: "Settings") -> int | None:
    """Ask the running node to stop; returns its process id, None when no node answers."""
    lock = DataDirLock(settings.paths.data_dir)
    owner = lock.owner()
    try:
        result: Any = await _run_remotely(lock, operation("node stop"), StopRequest(), lambda _event: None)
    except NodeGoneError:
        # It went before its answer was out.
        return owner.pid if owner is not None else None
    return result.pid if isinstance(result, StopResult) else None


def _wait_until_gone(settings: "Settings", pid: int) -> None:
    wait_s = STOP_WAIT_S + settings.config.api_drain_s
    deadline = time.monotonic() + wait_s
    while _is_locked(settings):
        if time.monotonic() > deadline:
            raise DataDirLockedError(
                f"the node (process {pid}) was asked to stop and is still there after {wait_s:.0f} s",
                hint=f"look at {settings.paths.log_file}; kill {pid} ends it",
            )
        time.sleep(LOCK_POLL_S)
    # The lock is the last thing it lets go of; what is left is the end of the interpreter. A process whose parent has
    # not asked for its exit code stays visible, so this wait has an end of its own.
    deadline = time.monotonic() + EXIT_WAIT_S
    while _is_alive(pid) and time.monotonic() < deadline:
        time.sleep(LOCK_POLL_S)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_locked(settings: "Settings") -> bool:
    lock = DataDirLock(settings.paths.data_dir)
    try:
        lock.acquire()
    except DataDirLockedError:
        return True
    lock.release()
    return False
