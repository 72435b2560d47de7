"""Which of several offers of the same prefix are tried, and in which order."""

import pytest

from kvnet.exchange.choosing import choose
from kvnet.exchange.planning import Weigher
from kvnet.exchange.reuse import Lossy
from kvnet.format.codecs import Codec
from kvnet.format.hashes import LookupKey
from kvnet.protocol.ids import PeerId
from kvnet.protocol.lookup import Candidate
from kvnet.protocol.speeds import Link, Machine, PrefillSpeed, SpeedPoint

N_TOKENS = 8000
PREFILL_TOKENS_S = 500.0
RAW_BYTES = 256
"""Bytes of a token."""
PEER = PeerId(b"peer")
WEIGHER = Weigher(
    Machine(PrefillSpeed([SpeedPoint(0, PREFILL_TOKENS_S)]), restore_bytes_s=1e9), N_TOKENS + 2, 0, 0, RAW_BYTES
)


def offer(codec: Codec, bytes_per_token: int, n_tokens: int = N_TOKENS) -> Candidate:
    return Candidate(
        LookupKey(codec.value.encode()),
        0,
        n_tokens // 256,
        n_tokens,
        n_tokens,
        codec,
        n_tokens * bytes_per_token,
        (PEER,),
    )


RAW, ZSTD, Q8 = offer(Codec.RAW, 256), offer(Codec.SHUFFLE_ZSTD1, 150), offer(Codec.Q8, 96)


def chosen(offers: list[Candidate], lossy: Lossy, share: float, weigher: Weigher | None = WEIGHER) -> list[Codec]:
    """Codecs in the order in which they are tried, over a link with a share of the rate at which raw is worth it."""
    link = Link(PEER, 0.005, share * PREFILL_TOKENS_S * RAW_BYTES)
    found, reasons = choose(offers, lossy, weigher, lambda _candidate, _weigher: link)
    assert len(found) + len(reasons) == len(offers)
    assert all("lossy codec q8" in reason for reason in reasons)
    return [each.codec for each in found]


@pytest.mark.parametrize("share", [0.6, 100.0])
@pytest.mark.parametrize("weigher", [WEIGHER, None])
def test_without_the_owners_word_nothing_lossy_is_tried(share: float, weigher: Weigher | None) -> None:
    assert chosen([Q8, RAW], Lossy.NEVER, share, weigher) == [Codec.RAW]
    assert chosen([Q8], Lossy.NEVER, share, weigher) == []


def test_on_slow_links_a_lossless_offer_of_as_many_tokens_is_tried_first_though_it_takes_longer() -> None:
    assert chosen([Q8, ZSTD], Lossy.SLOW_LINKS, 0.6) == [Codec.SHUFFLE_ZSTD1, Codec.Q8]
    assert chosen([Q8, ZSTD], Lossy.ALWAYS, 0.6) == [Codec.Q8, Codec.SHUFFLE_ZSTD1]
    shorter = offer(Codec.SHUFFLE_ZSTD1, 150, N_TOKENS // 2)
    assert chosen([shorter, Q8], Lossy.SLOW_LINKS, 0.6) == [Codec.Q8, Codec.SHUFFLE_ZSTD1]


def test_on_links_fast_enough_for_raw_nothing_lossy_is_tried_unless_it_always_is() -> None:
    assert chosen([Q8, RAW], Lossy.SLOW_LINKS, 100.0) == [Codec.RAW]
    assert chosen([Q8], Lossy.SLOW_LINKS, 100.0) == []
    assert chosen([RAW, Q8], Lossy.ALWAYS, 100.0) == [Codec.Q8, Codec.RAW]


def test_a_machine_that_was_not_measured_takes_nothing_lossy_on_slow_links() -> None:
    assert chosen([Q8, RAW], Lossy.SLOW_LINKS, 0.6, None) == [Codec.RAW]
