"""Where reused tokens came from, with what those are called who held and signed them."""

from kvnet.exchange.prefix_reuse import Source
from kvnet.format.hashes import artifact_text
from kvnet.protocol.ids import peer_text
from kvnet.trust.keys import publisher_text
from kvnet_node.calling import Names
from kvnet_node.operations import requests as r


def told_source(source: Source, names: Names) -> r.Source:
    """As it is told."""
    return r.Source(
        source=source.source,
        tokens=source.tokens,
        bytes=source.n_bytes,
        seconds=source.seconds,
        peer=peer_text(source.peer) if source.peer else "",
        signer=publisher_text(source.signer),
        artifact=artifact_text(source.artifact),
        peer_name=names.peers.get(source.peer, "") if source.peer else "",
        signer_name=names.signers.get(source.signer, ""),
    )
