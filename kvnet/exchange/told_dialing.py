"""Dialling peers at addresses that somebody else has told."""

from collections.abc import Sequence

import trio

from kvnet.errors import PeerUnreachableError
from kvnet.network.interface import Network, ProviderHint
from kvnet.protocol.dialable import Unanswered, plausible
from kvnet.protocol.ids import PeerId


class ToldDialer:
    """Dials only where a node may be, and on nobody's word more than so often in vain.

    Args:
        network: to dial with.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._unanswered = Unanswered()

    async def connect(self, peer: PeerId, addresses: Sequence[str], signer: bytes, *, timeout_s: float) -> PeerId:
        """Connect to a peer; at once when it is connected already.

        Args:
            peer: whom; its key is proved in the handshake.
            addresses: where it is said to be.
            signer: publisher id of who says so; empty when nobody has signed it, as in a DHT, where what failed is
                remembered by address and only so many are dialled in one lookup.
            timeout_s: for all of it.

        Raises:
            PeerUnreachableError: nobody is there, or it is not dialled.
        """
        chosen = plausible(addresses, self._network.addresses())
        if signer:
            chosen = self._unanswered.take(signer, chosen, trio.current_time())
        if not chosen and not any(info.peer == peer for info in self._network.connected()):
            raise PeerUnreachableError(
                f"expected an address to dial, all {len(addresses)} told are no place for a node or were told too often"
            )
        found = await self._network.connect_hint(ProviderHint(peer, chosen), timeout_s=timeout_s)
        self._unanswered.answered(signer, len(chosen))
        return found
