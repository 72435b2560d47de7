"""A member that says that somebody is anywhere makes nobody dial much, and honest members are dialled all the same."""

import trio
import trio.lowlevel
from trio.testing import MockClock

from kvnet.errors import PeerUnreachableError
from kvnet.exchange.meeting import Meetings
from kvnet.exchange.told_dialing import ToldDialer
from kvnet.network.interface import ProviderHint
from kvnet.network.memory import World
from kvnet.protocol.dialable import UNANSWERED_BURST, UNANSWERED_PER_S
from kvnet.protocol.ids import PeerId
from kvnet.protocol.tables import KnownMember

HOUR_S = 3600.0


async def test_member_that_invents_machines_all_over_the_local_network_has_few_addresses_dialled(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery
) -> None:
    network = world.network("a")
    await nursery.start(network.run)
    dialled: list[str] = []
    answering = {"/ip4/192.168.1.9/tcp/5864"}

    async def connect_hint(hint: ProviderHint, *, timeout_s: float = 5.0) -> PeerId:
        dialled.extend(hint.addresses)
        await trio.lowlevel.checkpoint()
        if answering.isdisjoint(hint.addresses):
            raise PeerUnreachableError("nobody")
        return hint.peer

    network.connect_hint = connect_hint  # type: ignore[method-assign]

    def known() -> dict[PeerId, KnownMember]:
        """32 ghosts of a bad member, each somewhere else every ten seconds, and one honest member."""
        turn = int(trio.current_time() // 10)
        ghosts = {
            PeerId(b"ghost %d" % number): KnownMember(
                PeerId(b"ghost %d" % number),
                b"bad",
                tuple(f"/ip4/192.168.{turn % 250}.{number * 8 + n}/tcp/{8000 + turn % 999}" for n in range(8)),
                0,
            )
            for number in range(31)
        }
        honest = KnownMember(PeerId(b"honest"), b"good", ("/ip4/192.168.1.9/tcp/5864",), 0)
        return {**ghosts, honest.peer: honest}

    met: list[PeerId] = []

    async def open_session(peer: PeerId) -> None:
        await trio.lowlevel.checkpoint()
        met.append(peer)

    await nursery.start(Meetings(network, known, open_session, dialer=ToldDialer(network)).run)
    await trio.sleep(HOUR_S)
    in_vain = [address for address in dialled if address not in answering]
    assert len(in_vain) <= UNANSWERED_BURST + HOUR_S * UNANSWERED_PER_S + 1
    assert len(in_vain) > UNANSWERED_BURST, "some are dialled: they might be there"
    assert PeerId(b"honest") in met
    assert PeerId(b"ghost 1") not in met
