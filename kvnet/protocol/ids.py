"""Names of peers, apart from any transport."""

from typing import NewType

PeerId = NewType("PeerId", bytes)
"""Raw bytes of a libp2p peer id: for Ed25519 an identity multihash of 38 bytes that contains the public key."""
