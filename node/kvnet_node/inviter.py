"""Where an inviter is reached: the addresses in an invitation, and dialling them."""

from collections.abc import Sequence
from typing import Final

import trio

from kvnet.errors import NetworkError, PeerUnreachableError, UsageError, elsewhere
from kvnet.exchange.node import ExchangeNode
from kvnet.exchange.session import PeerSession
from kvnet.protocol.ids import PeerId, peer_text
from kvnet.trust.statement_bodies import MAX_ADDRESSES, Invitation

DIAL_TIMEOUT_S: Final = 10.0
INVITED_ADDRESSES: Final = 4
"""Addresses in an invitation: enough for two networks, a VPN and IPv6; each makes the text and the QR code longer."""


def shortened(addresses: Sequence[str], peer: PeerId) -> tuple[str, ...]:
    """Addresses for an invitation: without the peer id that it names anyway, loopback only when there is nothing else.

    Args:
        addresses: of the inviter, each ending in ``/p2p/`` and its peer id.
        peer: the inviter.
    """
    own = f"/p2p/{peer_text(peer)}"
    outside = [each for each in addresses if "/127.0.0.1/" not in each and "/ip6/::1/" not in each]
    chosen = sorted(outside, key=_likelihood)[: min(INVITED_ADDRESSES, MAX_ADDRESSES)] or list(addresses)[:1]
    return tuple(each.removesuffix(own) for each in chosen)


def _likelihood(address: str) -> int:
    """Home and office networks first; bridges of containers and link-local addresses, which lead nowhere else, last."""
    order = (
        "/ip4/192.168.",
        "/ip4/10.",
        "/ip4/100.",
        "/ip4/",
        "/ip6/2",
        "/ip6/",
        "/ip4/172.17.",
        "/ip6/fe80",
        "/ip4/169.254.",
    )
    return max(place for place, start in enumerate(order) if address.startswith(start) or start == order[0])


def full_addresses(invitation: Invitation) -> tuple[str, ...]:
    """The addresses of an invitation, each with the peer id of who is there."""
    own = f"/p2p/{peer_text(PeerId(invitation.peer))}"
    return tuple(each if "/p2p/" in each else each + own for each in invitation.addresses)


async def reach(node: ExchangeNode, invitation: Invitation) -> PeerSession:
    """An open session with the inviter, over whichever of its addresses answers first.

    Raises:
        PeerUnreachableError: none does.
    """
    peer = PeerId(invitation.peer)
    known = node.session_with(peer)
    if known is not None and not known.closed.is_set():
        return known
    reasons: list[str] = []
    addresses = [each for each in full_addresses(invitation) if each.endswith(f"/p2p/{peer_text(peer)}")]
    found: list[PeerSession] = []

    async def dial(address: str, scope: trio.CancelScope) -> None:
        try:
            session = await node.connect(address, timeout_s=DIAL_TIMEOUT_S)
        except (NetworkError, UsageError) as error:
            reasons.append(str(error))
            return
        if session is not None and session.peer == peer:
            found.append(session)
            scope.cancel()

    async with trio.open_nursery() as nursery:
        for address in addresses:
            nursery.start_soon(dial, address, nursery.cancel_scope)
    if not found:
        raise PeerUnreachableError(
            f"expected the inviter at {', '.join(addresses) or 'an address'}, found nobody there"
            + (f" ({reasons[0]})" if reasons else ""),
            hint=f"is {elsewhere('kvnet node start')} running on the other machine, and are both in one network? "
            "kvnet doctor --network looks",
        )
    return found[0]
