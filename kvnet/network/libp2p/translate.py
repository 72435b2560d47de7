"""The one place where py-libp2p's exceptions become ours."""

import re

import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.host.exceptions import StreamFailure
from libp2p.io.exceptions import ConnectionClosedError, IOException
from libp2p.network.stream.exceptions import StreamClosed, StreamEOF, StreamError, StreamReset
from libp2p.peer.peerstore import PeerStoreError
from libp2p.protocol_muxer.exceptions import MultiselectClientError
from libp2p.stream_muxer.exceptions import MuxedStreamError

from kvnet.errors import NetworkError, PeerRefusedError, PeerUnreachableError, UsageError
from kvnet.protocol.ids import PeerId, parse_peer_text, peer_text

_PROVED = re.compile(r"remote_peer_id_from_pubkey=([1-9A-HJ-NP-Za-km-z]{1,58})")

FOREIGN = (
    BaseLibp2pError,
    IOException,
    OSError,
    PeerStoreError,
    ValueError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
)
"""What py-libp2p lets out of a dial or a stream. ValueError among them: some of its parsing errors are plain ones."""


def translate_dial(error: BaseException, address: str) -> NetworkError:
    """What a failed dial of `address` means."""
    text = _root_cause(error)
    if "Peer ID mismatch" in text or "does not correspond to the received pubkey" in text:
        answered_by = _answered_by(text)
        who = f"somebody else answers there{f': {peer_text(answered_by)}' if answered_by else ''}"
        return PeerUnreachableError(
            f"expected another peer at {address}, {who}",
            hint="A node with a new data directory is a new peer: use the address it shows now.",
            answered_by=answered_by,
        )
    return PeerUnreachableError(
        f"expected an answer at {address}, found: {text}",
        hint="Check that the other node runs, and that no firewall is between.",
    )


def _answered_by(text: str) -> PeerId | None:
    """The peer that proved to be there, from what py-libp2p says of the one expected; it has no better place for it."""
    found = _PROVED.search(text)
    try:
        return parse_peer_text(found[1]) if found else None
    except UsageError:
        return None


def translate_open(error: BaseException, protocol: str) -> NetworkError:
    """What a stream that could not be opened means."""
    if isinstance(error, StreamFailure) and isinstance(error.__cause__, MultiselectClientError):
        cause = str(error.__cause__)
        if "timed out" not in cause and "not supported" in cause.lower():
            return PeerRefusedError(f"expected the peer to speak {protocol}, it does not", reason="protocol")
    return PeerUnreachableError(f"expected the peer to answer a new stream, found: {_root_cause(error)}")


def translate_stream(error: BaseException) -> NetworkError:
    """What an error while reading or writing a stream means."""
    if isinstance(error, StreamEOF):
        return NetworkError("the peer ended the stream")
    if isinstance(error.__cause__, MuxedStreamError) and "window update" in str(error.__cause__):
        return NetworkError("expected the peer to read within 5 s, it did not; the stream is reset")
    if isinstance(error, StreamReset | StreamClosed):
        return NetworkError("the stream was reset")
    if isinstance(error, StreamError | ConnectionClosedError | OSError | trio.BrokenResourceError):
        return PeerUnreachableError(f"the connection to the peer was lost: {_root_cause(error)}")
    return NetworkError(f"the stream failed: {_root_cause(error)}")


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    nested = getattr(error, "exceptions", None) or getattr(error, "_exceptions", None)
    if nested:
        return _root_cause(nested[0])
    return str(error) or type(error).__name__
