"""Where an operation runs: in the running node of the data directory, or here under its lock."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from kvnet.errors import DataDirLockedError, NodeGoneError, UnsupportedVersionError
from kvnet.store.lock import DataDirLock, LockOwner
from kvnet_node.control_client import ENDLESS, SAY_AFTER_S, Patience, Say, call_running_node
from kvnet_node.events import Event, Note
from kvnet_node.operations.registry import Operation, operation
from kvnet_node.operations.requests import PeersRequest, Request, Result, StopRequest, StopResult
from kvnet_node.paths import is_writable, not_writable

if TYPE_CHECKING:
    from kvnet_node.invocation import Settings

LOCK_WAIT_S = 5.0
"""How long a verb waits for another verb to finish before it says who owns the data directory."""
LOCK_POLL_S = 0.05
ANSWER_S = 15.0
"""Silence after which a running node that was asked for what is at hand is taken for hung."""
EXIT_WAIT_S = 2.0
STOP_WAIT_S = 30.0
"""A node that has not gone by then, and by the time its running requests get, is reported, not killed."""

OnEvent = Callable[[Event], None]


def run_operation(
    settings: "Settings", name: str, request: Request, on_event: OnEvent, say: Say | None = None
) -> Result:
    """Run an operation and return its result.

    Args:
        settings: of the data directory.
        name: the operation.
        request: its request.
        on_event: takes what it reports.
        say: told in words what is waited for, when nothing has happened for a second.

    Raises:
        NodeSilentError: the running node gives no answer about what it has at hand.
        DataDirLockedError: another process owns the data directory and answers on no control socket.
        ConfigError: the data directory cannot be written to, no node runs, and the operation does more than look.
        KvnetError: whatever the operation raises, of the same class wherever it ran.
    """
    wanted = operation(name)
    lock = DataDirLock(settings.paths.data_dir)
    began, said = time.monotonic(), False
    patience = Patience(_limit_s(wanted, request), say)
    while (result := _run_remotely(settings, wanted, request, on_event, patience)) is None:
        if not is_writable(settings.paths.data_dir):
            return _run_on_a_copy(settings, wanted, request, on_event)
        try:
            lock.acquire(wanted.name)
        except DataDirLockedError:
            waited_s = time.monotonic() - began
            if waited_s >= LOCK_WAIT_S and not wanted.patient:
                raise
            if not said and waited_s >= (LOCK_WAIT_S if say is None else SAY_AFTER_S):
                # A program hears of a long wait too: as an event.
                tell = say or (lambda text: on_event(Note(text)))
                tell(_waiting(lock.owner(), wanted))
                said = True
            time.sleep(LOCK_POLL_S)
            continue
        try:
            return _run_here(settings, wanted, request, on_event)
        finally:
            lock.release()
    return result


def _limit_s(wanted: Operation, request: Request) -> float | None:
    if isinstance(request, PeersRequest) and (request.connect or request.models):
        # Those peers are asked first, and may be slow.
        return None
    return ANSWER_S if wanted.quick else None


def _waiting(owner: LockOwner | None, wanted: Operation) -> str:
    who = f"the command {owner.verb}" if owner is not None and owner.verb else "another kvnet command"
    process = f" (process {owner.pid})" if owner is not None else ""
    most = "" if wanted.patient else f", {LOCK_WAIT_S:.0f} s at most"
    return f"{who}{process} is at work in this data directory; waiting for it{most}"


def _run_on_a_copy(settings: "Settings", wanted: Operation, request: Request, on_event: OnEvent) -> Result:
    if not wanted.reads:
        raise not_writable(settings.paths.data_dir)
    from kvnet_node.read_only import copied_for_reading

    with copied_for_reading(settings.paths) as paths:
        return _run_here(replace(settings, paths=paths), wanted, request, on_event)


def _run_remotely(
    settings: "Settings", wanted: Operation, request: Request, on_event: OnEvent, patience: Patience = ENDLESS
) -> Result | None:
    """The result from the running node; None when no node answers.

    Raises:
        UnsupportedVersionError: it says something else than a node of this version does.
    """
    answer = call_running_node(settings.paths.data_dir, wanted.name, request, on_event, patience)
    if answer is None:
        return None
    try:
        return msgspec.json.decode(answer, type=wanted.result)
    except msgspec.MsgspecError as error:
        raise UnsupportedVersionError(
            f"expected the running node to answer {wanted.name} as this kvnet does, found: {error}",
            hint="it was started before this version was installed: `kvnet node stop`, then `kvnet node start`",
        ) from error


def _run_here(settings: "Settings", wanted: Operation, request: Request, on_event: OnEvent) -> Result:
    # Loaded by those alone that do the work themselves.
    import trio

    with _ended_like_ctrl_c():
        return trio.run(run_locally, settings, wanted, request, on_event, strict_exception_groups=True)


@contextmanager
def _ended_like_ctrl_c() -> Iterator[None]:
    """`kill`, and a terminal that is closed, end a verb as Ctrl-C does: with time to keep what it has done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ends = (signal.SIGTERM, signal.SIGHUP)
    before = {each: signal.getsignal(each) for each in ends}
    try:
        for each in ends:
            # One that is ignored, as by nohup, stays so.
            if before[each] is signal.SIG_DFL:
                signal.signal(each, lambda _number, _frame: signal.raise_signal(signal.SIGINT))
        yield
    finally:
        for each in ends:
            signal.signal(each, before[each])


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
        NodeSilentError: the node gives no answer.
        DataDirLockedError: something else owns the data directory, or the node does not go.
    """
    owner = DataDirLock(settings.paths.data_dir).owner()
    pid = _ask_to_stop(settings, owner)
    if pid is None:
        if owner is not None and _is_locked(settings):
            raise DataDirLockedError(
                f"process {owner.pid} owns {settings.paths.data_dir} and is no node that could be asked to stop",
                hint=f"wait for it, or see what it is: ps -p {owner.pid}",
            )
        return StopResult(pid=0)
    _wait_until_gone(settings, pid)
    return StopResult(pid)


def _ask_to_stop(settings: "Settings", owner: LockOwner | None) -> int | None:
    """Ask the running node to stop; returns its process id, None when no node answers."""
    try:
        result = _run_remotely(settings, operation("node stop"), StopRequest(), lambda _event: None, Patience(ANSWER_S))
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
