"""The composition root: every part of a node, put together for one data directory.

A running node opens all of it and keeps it; a verb without a running node opens it for one operation.
"""

import secrets
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog
import trio

import kvnet
from kvnet.errors import KvnetError
from kvnet.exchange.admission import AdmissionPolicy
from kvnet.exchange.answers import Finished
from kvnet.exchange.completion import Completer, ask_peers
from kvnet.exchange.keeping import Keeper, KeeperHooks
from kvnet.exchange.lane import ThreadLane
from kvnet.exchange.meeting import Meetings
from kvnet.exchange.node import ExchangeNode, NodeOptions
from kvnet.exchange.prefix_reuse import PrefixReuse
from kvnet.exchange.publisher import Publisher
from kvnet.exchange.reuse import Lossy
from kvnet.exchange.revoking import RevocationGuard
from kvnet.exchange.tables import Tables
from kvnet.format.hashes import PrefixKey
from kvnet.network.bulk.endpoint import BulkEndpoint
from kvnet.network.interface import Network
from kvnet.network.libp2p.ports import parse_listen
from kvnet.protocol.announce import AnnounceLimits
from kvnet.protocol.provider_pages import PageLimits
from kvnet.protocol.serve import ServeLimits
from kvnet.store.disk import DiskStore
from kvnet.store.interface import ArtifactRecord
from kvnet.trust.envelope import StatementType
from kvnet_node.announce_store import AnnounceStore
from kvnet_node.api.aliases import parse_alias
from kvnet_node.api.front import Front, FrontOptions
from kvnet_node.guest.guest import Guest, this_machine
from kvnet_node.identity import NodeIdentity
from kvnet_node.model_matching import ModelMatching
from kvnet_node.neighbours import Surroundings
from kvnet_node.paths import note_private, remove_temporaries
from kvnet_node.prompts.normalise import Rules
from kvnet_node.ram_store import machine_ram_bytes, ram_directory, ram_quota_bytes, remove_left_behind
from kvnet_node.services import Services

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # the stubs that libp2p brings along replace trio's own types

    from kvnet_node.invocation import Settings

_log = structlog.get_logger(__name__)

SHORT_LIVED_LISTEN = ("127.0.0.1:0",)
"""A verb's own network is there to ask, not to be asked; dialling out does not need more."""


class _ListenFile(msgspec.Struct, frozen=True):
    port: int


@asynccontextmanager
async def open_services(settings: "Settings", *, network: bool, serving: bool) -> AsyncIterator[Services]:
    """The services of a data directory whose lock the caller holds.

    Args:
        settings: where and how.
        network: also open a network.
        serving: as a running node does it: on the configured addresses, announcing what it has.
    """
    identity = _loaded_identity(settings)
    async with _opened_store(settings, identity) as (store, store_dir), trio.open_nursery() as nursery:
        services = Services(settings, store, identity, store_dir)
        services.pause.load()
        await nursery.start(services.engines.run)
        await services.statements.load()
        await _finish_interrupted(services)
        await nursery.start(services.statements.run)
        if network:
            await _join_peers(settings, services, nursery, serving=serving)
        await nursery.start(services.memberships.run)
        await nursery.start(services.removals.run)
        try:
            yield services
        finally:
            nursery.cancel_scope.cancel()
            store.close()
            services.savings.close()
            services.statement_store.close()


async def _join_peers(settings: "Settings", services: Services, nursery: trio.Nursery, *, serving: bool) -> None:
    """Put together what is among peers, and start it."""
    opened = await _open_network(settings, services.bootstrap(), serving=serving)
    node = services.node = _exchange_node(settings, services, opened, serving=serving)
    services.statements.attach(node)
    services.memberships.attach(node)
    if not settings.config.ram_only:
        node.finder.wrote = services.writes.fetched
    await nursery.start(_open_company, services, node, serving)
    tables = _tables(services, node) if serving else None
    guard = RevocationGuard(
        services.store, services.lane, services.identity, services.statements, node, services.drop_live
    )
    await nursery.start(guard.run)
    await nursery.start(node.run)
    if tables is not None:
        await nursery.start(tables.run)
        await nursery.start(Meetings(opened, tables.members, node.open_session, dialer=tables.dialer).run)
        await _start_serving(settings, services, node, nursery)


def _exchange_node(settings: "Settings", services: Services, network: Network, *, serving: bool) -> ExchangeNode:
    config = settings.config
    options = NodeOptions(
        agent=f"kvnet/{kvnet.__version__}",
        serving=serving,
        exact_only=config.numerics == "exact",
        lossy=Lossy(config.lossy),
        announce=AnnounceLimits(reprovide_s=config.announce_interval_s),
        serve=ServeLimits(total_bytes_per_s=float(config.upload_bytes_s)),
        download_bytes_s=float(config.download_bytes_s),
    )
    return ExchangeNode(
        network,
        services.store,
        services.lane,
        services.identity,
        random=secrets.token_bytes,
        options=options,
        bulk=_bulk_endpoint(settings, serving=serving),
        announced=None if config.ram_only else AnnounceStore(settings.paths.announced_file),
    )


async def _start_serving(settings: "Settings", services: Services, node: ExchangeNode, nursery: trio.Nursery) -> None:
    """What only a running node has: neighbours, the HTTP endpoint, and what keeps the store in order."""
    _remember_port(settings, services)
    services.surroundings = Surroundings(settings, node)
    await nursery.start(services.surroundings.run)
    services.keeper, services.front = _front(services, node)
    await nursery.start(services.keeper.run)
    nursery.start_soon(services.scrub_now_and_then)
    nursery.start_soon(services.tidy_now_and_then)
    nursery.start_soon(services.watch_store)


def _loaded_identity(settings: "Settings") -> NodeIdentity:
    remove_temporaries(settings.paths)
    identity = NodeIdentity(settings.paths, settings.config.trust_policy, public=settings.config.public_enabled)
    identity.load()
    return identity


async def _finish_interrupted(services: Services) -> None:
    """Bring to an end what a process that was killed had begun."""
    try:
        services.identity.finish_rotation(services.statements.all(StatementType.KEY_ROTATION))
        await services.memberships.finish_leaving()
        await services.lane.run(services.names.tidy)
    except (KvnetError, OSError) as error:
        # Nothing depends on it: it is tried again at the next start.
        _log.warning("what was interrupted is not finished", reason=str(error))


@asynccontextmanager
async def _opened_store(settings: "Settings", identity: NodeIdentity) -> AsyncIterator[tuple[DiskStore, Path]]:
    """The store, and the folder for what is to last as long: on disk, or in RAM and gone afterwards."""
    config, paths = settings.config, settings.paths

    def open_in(directory: Path, quota_bytes: int, min_free_bytes: int) -> DiskStore:
        return DiskStore.open(
            directory, quota_bytes=quota_bytes, min_free_bytes=min_free_bytes, keys_of=identity.keys_of
        )

    if not config.ram_only:
        remove_left_behind(paths.data_dir)
        yield (
            await trio.to_thread.run_sync(open_in, paths.store_dir, config.quota_bytes, config.min_free_bytes),
            paths.data_dir,
        )
        return
    with ram_directory(paths.data_dir) as directory:
        free_bytes = shutil.disk_usage(directory).free
        quota_bytes = ram_quota_bytes(config.quota_bytes, ram_bytes=machine_ram_bytes(), free_bytes=free_bytes)
        yield await trio.to_thread.run_sync(open_in, directory / "store", quota_bytes, 0), directory


async def _open_company(
    services: Services, node: ExchangeNode, serving: bool, *, task_status: "TaskStatus[None]"
) -> None:
    """What members tell each other of models and of themselves; before the node is among them."""
    config = services.config
    lane = ThreadLane()
    numerics = services.identity.numerics
    services.matching = ModelMatching(services.paths, services.engines, numerics, node, lane, meet=serving)
    await services.matching.load()
    async with trio.open_nursery() as nursery:
        if serving:
            machine = this_machine(node, config.guest_metered)
            guest = Guest(node, services.pause, lane, machine, battery=config.guest_on_battery)
            services.guest = guest
            services.matching.exchange.unasked = lambda: guest.conduct.replicate
            await nursery.start(services.guest.run)
            await nursery.start(services.matching.run)
        task_status.started()
        await trio.sleep_forever()


def _tables(services: Services, node: ExchangeNode) -> Tables:
    """What a running node tells members that it holds, and is told."""
    tables = services.tables = Tables(
        node.network,
        services.identity,
        services.statements,
        node.fetcher.scores,
        now=time.time,
        random=secrets.token_bytes,
        pages=PageLimits(renew_s=services.config.announce_interval_s),
    )
    tables.attach(node)
    return tables


def _front(services: Services, node: ExchangeNode) -> tuple[Keeper, Front]:
    """What answers HTTP clients, and what keeps their conversations."""
    config = services.config

    def published(record: ArtifactRecord, keys: list[PrefixKey]) -> None:
        node.published(record, keys)
        loaded = [engine.info for engine in services.engines.engines() if engine.info.fingerprint is not None]
        model = next((i.name for i in loaded if i.fingerprint == record.manifest.fingerprint), "")
        services.savings.kept(record.hash, model=model, tokens=record.manifest.n_tokens)

    def used(finished: Finished) -> None:
        services.savings.note(finished)
        for source in finished.reuse.sources:
            node.used(source.artifact)

    hooks = KeeperHooks(published, node.removed, lambda: frozenset(services.names.by_artifact()))
    # A lane of its own: hashing and syncing what is kept holds up no request's lookup.
    lane = ThreadLane()
    publisher = Publisher(services.store, lane, services.identity)
    keeper = Keeper(
        services.store,
        lane,
        services.identity,
        publisher,
        policy=AdmissionPolicy(enabled=not config.ram_only),
        budget=services.writes.budget,
        hooks=hooks,
    )
    keeper.lossy = Lossy(config.lossy)
    reuse = PrefixReuse(
        services.store,
        services.lane,
        services.identity,
        ask_peers(node.finder, services.speeds),
        exact_only=config.numerics == "exact",
        lossy=Lossy(config.lossy),
    )
    completer = Completer(reuse, speeds=services.speeds, keeper=keeper, used=used)
    options = FrontOptions(
        max_tokens=config.api_max_tokens,
        queue_requests=config.api_queue_requests,
        rules=Rules(billing_line=config.remove_billing_line),
        aliases=tuple(parse_alias(text) for text in config.api_model_aliases),
    )
    front = Front(services.engines, services.names, services.lane, completer, services.request_log, options)
    return keeper, front


async def _open_network(settings: "Settings", bootstrap: tuple[str, ...], *, serving: bool) -> Network:
    from kvnet.network.libp2p.host import LibP2PNetwork
    from kvnet.network.libp2p.identity import load_or_create_seed

    config = settings.config
    seed = await load_or_create_seed(settings.paths.peer_key_file)
    if not serving:
        return LibP2PNetwork(seed, listen=SHORT_LIVED_LISTEN, bootstrap=bootstrap)
    if config.listen_asked:
        return LibP2PNetwork(seed, listen=config.listen, bootstrap=bootstrap)
    return LibP2PNetwork(seed, default_port=_remembered_port(settings), bootstrap=bootstrap)


def _bulk_endpoint(settings: "Settings", *, serving: bool) -> BulkEndpoint:
    """Where chunks come and go: by default on the hosts of the network's own addresses."""
    config = settings.config
    if not serving:
        return BulkEndpoint((), cipher=config.bulk_cipher)
    if config.bulk_listen:
        return BulkEndpoint(config.bulk_listen, cipher=config.bulk_cipher)
    hosts = tuple(host for text in config.listen for host in parse_listen(text).hosts) if config.listen_asked else None
    return BulkEndpoint(None, hosts=hosts, cipher=config.bulk_cipher)


def _remembered_port(settings: "Settings") -> int:
    """The port taken last time in place of the default one, so that addresses given out stay true."""
    from kvnet_node.settings import DEFAULT_PORT

    try:
        return msgspec.json.decode(settings.paths.listen_file.read_bytes(), type=_ListenFile).port
    except (FileNotFoundError, msgspec.DecodeError):
        return DEFAULT_PORT


def _remember_port(settings: "Settings", services: Services) -> None:
    if settings.config.listen_asked:
        return
    for address in services.addresses():
        parts = address.split("/")
        if "tcp" in parts:
            note_private(
                settings.paths.listen_file, msgspec.json.encode(_ListenFile(int(parts[parts.index("tcp") + 1])))
            )
            return
