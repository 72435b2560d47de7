"""The running node: ``kvnet node start``, from the lock to the clean end."""

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import structlog
import trio

import kvnet
from kvnet.errors import DataDirLockedError, KvnetError, UsageError, elsewhere
from kvnet.store.lock import DataDirLock
from kvnet_node.control import control_socket, serve_control
from kvnet_node.control_frames import OnEvent
from kvnet_node.dispatch import LOCK_POLL_S, LOCK_WAIT_S
from kvnet_node.failures import leaf_of
from kvnet_node.logs import configure_logs
from kvnet_node.open_files import raise_open_files_limit
from kvnet_node.operations.context import OperationContext
from kvnet_node.operations.registry import operation
from kvnet_node.operations.requests import Result
from kvnet_node.operations.shared import tell_names
from kvnet_node.output import Output, pairs
from kvnet_node.paths import default_data_dir
from kvnet_node.services import Services
from kvnet_node.wiring import open_services

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # the stubs that libp2p brings along replace trio's own types

    from kvnet_node.invocation import Settings

_log = structlog.get_logger(__name__)


def run_node(settings: "Settings", output: Output) -> int:
    """Run the node of a data directory until it is told to stop.

    Returns:
        The exit code: 0 after a clean stop, by whatever it was asked for.

    Raises:
        DataDirLockedError: another process owns the data directory.
        PortInUseError: a port that was asked for is taken.
    """
    lock = DataDirLock(settings.paths.data_dir)
    _take(lock)
    try:
        configure_logs(settings.paths.log_file, verbose=output.verbose)
        raise_open_files_limit()
        trio.run(_serve, settings, output, lock, strict_exception_groups=True)
    finally:
        lock.release()
    output.message("stopped")
    return 0


def _take(lock: DataDirLock) -> None:
    """Take the lock, waiting a little for a verb that is at work, not for a node.

    Raises:
        DataDirLockedError: a node has it, or whoever has it keeps it.
    """
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            lock.acquire()
        except DataDirLockedError:
            owner = lock.owner()
            if (owner is not None and owner.control_socket) or time.monotonic() >= deadline:
                raise
            time.sleep(LOCK_POLL_S)
        else:
            return


async def _serve(settings: "Settings", output: Output, lock: DataDirLock) -> None:
    async with open_services(settings, network=True, serving=True) as services, trio.open_nursery() as nursery:
        if settings.config.origins["model.default"] == "flag":
            # A name that was typed just now and means nothing is said at once, not at the first request.
            await services.engines.choose(settings.config.model_default)
        model = await services.engines.default()
        # Before anybody is told that the node runs, a signal must already mean a clean stop.
        await nursery.start(_stop_on_signal, services)
        async with control_socket(settings.paths.control_socket) as (listener, path):
            lock.record_control_socket(path)
            nursery.start_soon(serve_control, listener, _Handler(services))
            moved = await _open_endpoint(settings, services, nursery)
            _announce(settings, services, output, _Said(path, moved, *model))
            nursery.start_soon(_tell_names, services)
            if services.surroundings is not None:
                nursery.start_soon(services.surroundings.tell, output.message)
            await services.stop_requested.wait()
            _log.info("stopping")
            if services.guest is not None:
                await services.guest.leave()
            await _drain(settings, services)
            nursery.cancel_scope.cancel()


async def _tell_names(services: Services) -> None:
    """What was named before this node told names, or by a process that was killed before it could, is told now."""
    if services.config.ram_only:
        return
    try:
        await tell_names(OperationContext(services, lambda _event: None, serving=True))
    except KvnetError as error:
        _log.warning("names are not told to the other machines", reason=str(error))


async def _open_endpoint(settings: "Settings", services: Services, nursery: trio.Nursery) -> str:
    """Serve HTTP clients; returns why that is on another port than the default one, "" when it is not."""
    config = settings.config
    if not config.api_enabled or services.front is None:
        return ""
    from kvnet_node.api.app import AppOptions, build_app
    from kvnet_node.api.guard import GuardRules
    from kvnet_node.api.listening import open_endpoint
    from kvnet_node.api.server import HttpServer

    listening = open_endpoint(config.api_listen, asked=config.api_listen_asked, token=config.api_token)
    rules = GuardRules(config.api_token, config.api_allowed_hosts, config.api_allowed_origins)
    options = AppOptions(rules, config.api_max_body_bytes, services.engines.failure)
    await nursery.start(HttpServer(build_app(services.front, options), listening.sockets).run)
    services.endpoint = listening.urls
    return listening.moved


async def _drain(settings: "Settings", services: Services) -> None:
    """Turn new requests away, and give those that run their time; what was computed is kept if it can be by then."""
    if services.front is None:
        return
    services.front.draining = True
    with trio.move_on_after(settings.config.api_drain_s) as scope:
        await services.front.wait_idle()
    if scope.cancelled_caught:
        _log.warning("requests cut off", running=services.front.running)
    if services.keeper is not None:
        await services.keeper.drain()


class _Handler:
    """Runs what arrives on the control socket."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, name: str, data: bytes, on_event: OnEvent) -> Result:
        wanted = operation(name)
        try:
            request = msgspec.json.decode(data, type=wanted.request)
        except msgspec.MsgspecError as error:
            raise UsageError(
                f"not a request for {name}: {error}", hint="is the running node another kvnet? restart it"
            ) from error
        try:
            return await wanted.load()(OperationContext(self._services, on_event, serving=True), request)
        except Exception as error:
            leaf = leaf_of(error)
            if isinstance(leaf, KvnetError):
                _log.info("operation refused", operation=name, code=leaf.code)
            else:
                _log.exception("operation failed", operation=name)
            raise


async def _stop_on_signal(services: Services, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
    wanted = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        # A closed terminal stops the node, unless nohup said that it should not.
        wanted.append(signal.SIGHUP)
    with trio.open_signal_receiver(*wanted) as signals:
        task_status.started()
        async for _ in signals:
            if services.stop_requested.is_set():
                # Asked a second time: whatever hangs is left behind; the store recovers at the next start.
                os._exit(130)
            services.stop_requested.set()


class _Said(NamedTuple):
    """What a start says that neither settings nor services know."""

    control: Path
    moved: str
    model: str
    no_model: str


def _announce(settings: "Settings", services: Services, output: Output, said: _Said) -> None:
    addresses = services.addresses()
    record: dict[str, Any] = {
        "type": "node start",
        "addresses": addresses,
        "endpoint": services.endpoint,
        "endpoint_moved": said.moved,
        "data_dir": str(settings.paths.data_dir),
        "publisher": services.identity.publisher(),
        "peer": services.peer_text,
        "model": said.model,
        "no_model": said.no_model,
        "policy": settings.config.trust_policy,
        "pid": os.getpid(),
        "control_socket": str(said.control),
        "alone": _is_alone(services),
        "discovery": services.surroundings.discovery if services.surroundings is not None else "",
        "version": kvnet.__version__,
    }
    _log.info("started", peer=services.peer_text, addresses=len(addresses))
    if Path(record["data_dir"]) != default_data_dir().absolute() or os.environ.get("KVNET_DATA_DIR"):
        # The next command is typed into another terminal, where no variable of this one is set.
        output.suggestions.use(Path(record["data_dir"]))
    output.result(record, lambda _: _screen(record))
    if said.moved:
        _log.warning("endpoint moved", reason=said.moved)
        output.message(f"the endpoint is at another port than usual, {services.endpoint[0]}: {said.moved}")


def _is_alone(services: Services) -> bool:
    """Whether no other machine shares anything with this one yet."""
    files, rosters = services.identity.swarms, services.memberships.rosters
    known = (rosters.roster(namespace.id) for namespace in (files.mine, *files.swarms()))
    return not files.swarms() and not any(roster is not None and len(roster.members) > 1 for roster in known)


def _model_text(record: dict[str, Any]) -> str:
    if record["model"]:
        return f"{record['model']}, loaded at the first request"
    return f"none: {record['no_model']}"


def _screen(record: dict[str, Any]) -> str:
    steps = ["kvnet add PATH --name NAME"] if record["model"] else ["kvnet model list"]
    if record["endpoint"] and record["model"]:
        steps.append("kvnet connect CLIENT")
    if record["alone"]:
        steps.append(f"kvnet invite --device, which pairs another machine of yours: {elsewhere('kvnet join -')} there")
    lines = pairs(
        [
            ("kvnet", f"{record['version']}, process {record['pid']}; Ctrl-C or kvnet node stop ends it"),
            *(("address", address) for address in record["addresses"]),
            *(("endpoint", f"{url}/v1") for url in record["endpoint"]),
            ("neighbours", f"discovery {record['discovery']}; kvnet peers lists them"),
            ("data dir", record["data_dir"]),
            ("publisher", record["publisher"]),
            ("policy", record["policy"]),
            ("model", _model_text(record)),
            *(("next", step) for step in steps),
        ]
    )
    return f"{lines}"
