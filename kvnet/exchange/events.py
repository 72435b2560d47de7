"""What the use cases report when they are done."""

from dataclasses import dataclass

from kvnet.format.hashes import ArtifactHash
from kvnet.protocol.ids import PeerId


@dataclass(frozen=True, slots=True)
class PrefixFetched:
    """A prefix that peers had and that is in the store now.

    Attributes:
        artifact: its artifact hash.
        n_tokens: tokens that it shares with the prompt and whose K/V is here.
        peer: the peer that most of it came from; empty when nothing had to be fetched.
        n_bytes: bytes fetched.
        n_chunks: chunks fetched.
        seconds: from the first query to the last byte.
    """

    artifact: ArtifactHash
    n_tokens: int
    peer: PeerId
    n_bytes: int
    n_chunks: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PeerPart:
    """What one peer has brought of a fetch so far, and at what rate of late.

    Attributes:
        peer: who.
        n_bytes: verified bytes.
        n_chunks: in so many chunks.
        rate_bytes_s: what it delivers of late; 0 when it is asked for nothing.
        path: how chunks come from it: "bulk", "stream", or "" before a channel is open.
    """

    peer: PeerId
    n_bytes: int
    n_chunks: int
    rate_bytes_s: float
    path: str


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """``done_bytes`` of ``total_bytes`` have arrived and matched their hash; the last, chunk ``index``, from ``peer``.

    Attributes:
        held_chunks: chunks of what is wanted that are here and came otherwise; not among the others.
        held_bytes: their bytes.
        resumed_chunks: those of them that an earlier fetch of the same artifact brought.
        parts: what each peer has brought; only where the fetch is looked at in fixed intervals.
        waiting: nobody is asked just now: it waits for a provider to be back, or for another; only there too.
        silent_s: seconds since a byte last came; only there too.
        gives_way: nothing is asked for just now: prompts get what they need of the artifact first.
    """

    done_bytes: int
    total_bytes: int
    done_chunks: int
    total_chunks: int
    peer: PeerId
    index: int = -1
    held_chunks: int = 0
    held_bytes: int = 0
    resumed_chunks: int = 0
    parts: tuple[PeerPart, ...] = ()
    waiting: bool = False
    gives_way: bool = False
    silent_s: float = 0.0
