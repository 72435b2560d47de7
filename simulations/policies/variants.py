"""The swarm with one choice made otherwise."""

from dataclasses import replace
from typing import Final

from kvnet.exchange.admission import AdmissionPolicy
from kvnet.format.codecs import Codec
from kvnet.format.prefix import BLOCK_TOKENS
from simulations.policies.policy import DAY_S, Order, Policy, Replication
from simulations.policies.shipped import SWARM

GB: Final = 1_000_000_000


def every_fourth(n_tokens: int) -> list[int]:
    """A checkpoint every four blocks, and the last full block."""
    full = n_tokens // BLOCK_TOKENS
    return sorted({*range(4, full + 1, 4), full, -(-n_tokens // BLOCK_TOKENS)} - {0})


def ends_only(n_tokens: int) -> list[int]:
    """The last full block and the exact end."""
    return sorted({n_tokens // BLOCK_TOKENS, -(-n_tokens // BLOCK_TOKENS)} - {0})


def _swarm(name: str, title: str, **changes: object) -> Policy:
    return replace(SWARM, name=f"swarm-{name}", title=title, **changes)  # type: ignore[arg-type]


VARIANTS: Final[tuple[Policy, ...]] = (
    _swarm("q8", "stored and sent in 8 bits", codec=Codec.Q8),
    _swarm("zstd", "stored and sent shuffled and compressed", codec=Codec.SHUFFLE_ZSTD1),
    _swarm("every4", "a checkpoint every four blocks", checkpoints=every_fourth),
    _swarm("ends", "only the end of an artifact is announced", checkpoints=ends_only),
    _swarm("members", "connected members alone, no DHT", dht=False),
    _swarm("dht1s", "the DHT is asked from 1 s of prefill on", dht_worth_s=1.0),
    _swarm("dht10s", "the DHT is asked from 10 s of prefill on", dht_worth_s=10.0),
    _swarm("patient50ms", "others are waited for 50 ms once somebody offers something", patience_s=0.05),
    _swarm("min4", "kept from four new blocks on", admission=AdmissionPolicy(min_new_blocks=4)),
    _swarm("min16", "kept from sixteen new blocks on", admission=AdmissionPolicy(min_new_blocks=16)),
    _swarm("sparing", "only beginnings that come again are kept", admission=AdmissionPolicy(low_share=2.0)),
    _swarm(
        "no-reserve", "everything is kept until the day's writes are used up", admission=AdmissionPolicy(low_share=0.0)
    ),
    _swarm("write5", "5 GB written a day", write_budget_bytes_day=5 * GB),
    _swarm("write20", "20 GB written a day", write_budget_bytes_day=20 * GB),
    _swarm("write50", "50 GB written a day", write_budget_bytes_day=50 * GB),
    _swarm("write200", "200 GB written a day", write_budget_bytes_day=200 * GB),
    _swarm("keep1", "kept one day without use", keep_s=DAY_S),
    _swarm("keep3", "kept three days without use", keep_s=3 * DAY_S),
    _swarm("keep30", "kept thirty days without use", keep_s=30 * DAY_S),
    _swarm("lfu", "the least often used goes first", order=Order.LEAST_OFTEN),
    _swarm("fifo", "what was kept longest goes first", order=Order.OLDEST),
    _swarm("longest-first", "the longest goes first", order=Order.LONGEST),
    _swarm("replicated", "what two nodes fetched goes to four more", replication=Replication()),
    _swarm("doubt1h", "a measured rate may have doubled after an hour", doubt_s=3600.0),
    _swarm("doubt1d", "a measured rate may have doubled after a day", doubt_s=24 * 3600.0),
    _swarm("lookup10", "a lookup may take a tenth of the prefill", lookup_share=0.1),
    _swarm("lookup100", "a lookup may take as long as the prefill", lookup_share=1.0),
)
