"""mDNS in a thread of its own: says one announcement, and hands on what others say.

zeroconf runs on asyncio. Its loop lives in this thread; nothing of it is touched from elsewhere but through
`call_soon_threadsafe`, and nothing it does waits for anybody.

IPv4 and IPv6 have a zeroconf each: on macOS one socket for both hears no IPv4 multicast. Each says the addresses of its
own family; what is heard of both is put together.
"""

import asyncio
import ipaddress
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from zeroconf import IPVersion, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from kvnet.network.lan.records import MAX_NAME_CHARACTERS, SERVICE_TYPE, Announcement, Families, Heard

_log = logging.getLogger(__name__)

MAX_RESOLVING = 8
"""Service instances asked about at a time."""
MAX_WAITING = 256
"""Service instances that wait for it; further ones are passed over until they are heard of again."""
MAX_CACHED_RECORDS = 20_000
"""zeroconf keeps whatever it hears until it expires; beyond this it is begun anew."""
RESOLVE_TIMEOUT_MS = 3000
STOP_TIMEOUT_S = 3.0
CACHE_LOOK_S = 5.0

OnHeard = Callable[[Heard], None]
OnGone = Callable[[str], None]


class Responder:
    """One run of mDNS on fixed interfaces.

    Args:
        announcement: what to say; None only listens.
        addresses: texts of this machine's, one of each interface and family to be on; of IPv6 the link-local ones.
        on_heard: called in this thread with what an instance says of itself; must not block.
        on_gone: called in this thread with the name of one that said it goes, or fell silent; must not block.
    """

    def __init__(
        self, announcement: Announcement | None, addresses: Sequence[str], on_heard: OnHeard, on_gone: OnGone
    ) -> None:
        self._announcement = announcement
        self._addresses = {
            version: [each for each in addresses if ipaddress.ip_address(each).version == version] for version in (4, 6)
        }
        self._on_heard = on_heard
        self._on_gone = on_gone
        self._thread = threading.Thread(target=self._run, name="kvnet mDNS", daemon=True)
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._resolving: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(MAX_RESOLVING)
        self._families = Families()
        self.failure = ""
        self.heard_itself = False

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it still runs; why not is in `failure`."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Say goodbye and end. Blocks for `STOP_TIMEOUT_S` at the most."""
        self._ready.wait(STOP_TIMEOUT_S)
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:  # noqa: BLE001 — whatever a foreign library raises, only discovery ends
            self.failure = f"{type(error).__name__}: {error}"
            _log.debug("mDNS ended", exc_info=True)
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready.set()
        families: list[_Family] = []
        try:
            for version, addresses in self._addresses.items():
                if addresses:
                    families += await self._begin(version, addresses, alone=not families)
            await self._until_stopped([each.zeroconf.zeroconf for each in families])
            for family in families:
                await family.browser.async_cancel()
        finally:
            for task in self._resolving:
                task.cancel()
            await asyncio.gather(*self._resolving, return_exceptions=True)
            with suppress(TimeoutError):
                closing = asyncio.gather(*(each.zeroconf.async_close() for each in families))
                await asyncio.wait_for(closing, STOP_TIMEOUT_S / 2)

    async def _begin(self, version: int, addresses: list[str], *, alone: bool) -> list["_Family"]:
        """One family's mDNS; without the other one its failure is that of the whole.

        Args:
            version: 4 or 6.
            addresses: of the interfaces to be on.
            alone: no other family has begun.
        """
        zeroconf = None
        try:
            only = IPVersion.V4Only if version == 4 else IPVersion.V6Only
            zeroconf = AsyncZeroconf(interfaces=addresses, ip_version=only)
            service = _service(self._announcement, version) if self._announcement is not None else None
            if service is not None and service.addresses_by_version(only):
                # Names are random: nobody else has them, so nobody needs to be asked whether they are free.
                await zeroconf.async_register_service(service, cooperating_responders=True)
            browser = AsyncServiceBrowser(zeroconf.zeroconf, SERVICE_TYPE, handlers=[partial(self._changed, version)])
        except Exception:
            if zeroconf is not None:
                await zeroconf.async_close()
            if alone:
                raise
            _log.warning("no discovery over IPv%d", version, exc_info=True)
            return []
        return [_Family(zeroconf, browser)]

    async def _until_stopped(self, running: Sequence[Zeroconf]) -> None:
        while not self._stopping.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), CACHE_LOOK_S)
            n_records = sum(len(records) for each in running for records in each.cache.cache.values())
            if n_records > MAX_CACHED_RECORDS:
                raise OSError(f"expected at most {MAX_CACHED_RECORDS} records on the network, found {n_records}")

    def _changed(
        self, version: int, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        """Called by zeroconf, by keyword but for the version, whenever an instance came, changed or went."""
        if len(name) > MAX_NAME_CHARACTERS:
            return
        if state_change is ServiceStateChange.Removed:
            left = self._families.gone(name, version)
            if left is None:
                self._on_gone(name)
            else:
                self._on_heard(left)
            return
        if self._announcement is not None and name == self._announcement.instance:
            self.heard_itself = True
            return
        if len(self._resolving) < MAX_WAITING:
            task = asyncio.get_running_loop().create_task(self._resolve(version, zeroconf, service_type, name))
            self._resolving.add(task)
            task.add_done_callback(self._resolving.discard)

    async def _resolve(self, version: int, zeroconf: Zeroconf, service_type: str, name: str) -> None:
        async with self._places:
            info = AsyncServiceInfo(service_type, name)
            found = await info.async_request(zeroconf, RESOLVE_TIMEOUT_MS)
        if found:
            addresses = info.parsed_scoped_addresses(IPVersion.V4Only if version == 4 else IPVersion.V6Only)
            self._on_heard(self._families.heard(Heard(name, info.port, info.properties, addresses), version))


@dataclass(frozen=True, slots=True)
class _Family:
    zeroconf: AsyncZeroconf
    browser: AsyncServiceBrowser


def _service(announcement: Announcement, version: int) -> AsyncServiceInfo:
    addresses = [ipaddress.ip_address(each) for each in announcement.addresses]
    return AsyncServiceInfo(
        SERVICE_TYPE,
        announcement.instance,
        port=announcement.port,
        properties=dict(announcement.properties),
        server=announcement.host,
        addresses=[each.packed for each in addresses if each.version == version],
    )
