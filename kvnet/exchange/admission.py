"""What of a conversation is worth keeping on disk. Pure: figures in, a decision out.

The rule is deliberately plain: keep what fills at least one whole new block, as long as the day's writes allow it;
when they run low, only as far as other prompts are likely to begin alike. Signals that a better rule needs - which
conversations come again - are handed in already.
"""

from dataclasses import dataclass
from typing import Final

from kvnet.engine.prompts import Boundary, BoundaryKind
from kvnet.format.prefix import BLOCK_TOKENS

COMES_AGAIN: Final = frozenset({BoundaryKind.TOOLS, BoundaryKind.SYSTEM, BoundaryKind.MARK})
"""Up to these boundaries, other prompts are likely to be the same."""

USED_UP: Final = "today's writes are used up"


@dataclass(frozen=True, slots=True)
class Signals:
    """What is known about a completion when it is decided what of it to keep.

    Attributes:
        prompt_tokens: tokens of the prompt.
        stable_tokens: tokens that the next turn of this conversation begins with, whatever the answer; fewer than the
            prompt where the template rewrites what lies behind them.
        held_tokens: tokens of prompt + answer, from the start, whose K/V a live cache holds: the most to keep.
        stored_tokens: of these, from the start, held on disk already by usable artifacts.
        boundaries: where other prompts may part from this one, ascending.
        marks: message counts after which the client asked for a cache breakpoint.
        mark_ttl_s: longest time the client asked them to be kept, in seconds; 0 when it did not ask.
        cache_key: what the client calls this conversation or kind of prompt; may be empty.
        private: the client wants nothing kept.
        token_bytes: what storing one more token writes, in bytes.
        left_bytes: what may still be written of the node's own accord; ``None`` for no limit.
        day_bytes: what may be written so in a day.
    """

    prompt_tokens: int
    stable_tokens: int
    held_tokens: int
    stored_tokens: int
    boundaries: tuple[Boundary, ...] = ()
    marks: tuple[int, ...] = ()
    mark_ttl_s: float = 0.0
    cache_key: str = ""
    private: bool = False
    token_bytes: int = 0
    left_bytes: int | None = None
    day_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """How many tokens, from the start, to keep as one artifact; 0 for nothing, and why."""

    keep_tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """The rule in force.

    Attributes:
        enabled: keep anything at all.
        min_new_blocks: whole new blocks that must be there for an artifact to be worth its files.
        low_share: with less than this share of a day's writes left, only what is likely to come again is kept.
    """

    enabled: bool = True
    min_new_blocks: int = 1
    low_share: float = 0.25

    def decide(self, signals: Signals) -> Decision:
        """What to keep: every whole block that comes again, when enough of them are new.

        The tokens after the last whole block are left out: the next turn would write them again, and peers cannot
        find them by a key.
        """
        if signals.private:
            return Decision(0, "the request was private")
        if not self.enabled:
            return Decision(0, "keeping is turned off")
        if signals.held_tokens <= 0:
            return Decision(0, "no live cache holds it")
        if signals.left_bytes is not None and not signals.day_bytes:
            return Decision(0, "nothing is to be written of the node's own accord")
        if signals.left_bytes is not None and signals.left_bytes <= 0:
            return Decision(0, USED_UP)
        blocks = _blocks_coming_again(signals)
        new_blocks = blocks - signals.stored_tokens // BLOCK_TOKENS
        if new_blocks < self.min_new_blocks:
            return Decision(0, f"fewer than {self.min_new_blocks * BLOCK_TOKENS:,} tokens in whole blocks are new")
        if self._low(signals) or not _fits(signals, new_blocks):
            return self._sparingly(signals, blocks)
        return _kept(blocks, new_blocks)

    def _low(self, signals: Signals) -> bool:
        return signals.left_bytes is not None and signals.left_bytes < self.low_share * signals.day_bytes

    def _sparingly(self, signals: Signals, blocks: int) -> Decision:
        """Little may be written: only up to a boundary that other prompts are likely to share."""
        shared = max((each.n_tokens for each in signals.boundaries if each.kind in COMES_AGAIN), default=0)
        blocks = min(blocks, shared // BLOCK_TOKENS)
        new_blocks = blocks - signals.stored_tokens // BLOCK_TOKENS
        if new_blocks < self.min_new_blocks:
            return Decision(0, "today's writes run low, and nothing new of it is likely to come again")
        if not _fits(signals, new_blocks):
            return Decision(0, "what is left of today's writes does not suffice")
        return _kept(blocks, new_blocks)

    def created_tokens(self, signals: Signals, reused_tokens: int) -> int:
        """Prompt tokens that will newly be kept once the prompt is computed, none of them counted as reused too."""
        keep = min(self.decide(signals).keep_tokens, signals.prompt_tokens)
        return max(0, keep - max(signals.stored_tokens, reused_tokens))


def _blocks_coming_again(signals: Signals) -> int:
    coming_again = signals.held_tokens
    if signals.stable_tokens < signals.prompt_tokens:
        coming_again = min(coming_again, signals.stable_tokens)
    return coming_again // BLOCK_TOKENS


def _fits(signals: Signals, new_blocks: int) -> bool:
    return signals.left_bytes is None or new_blocks * BLOCK_TOKENS * signals.token_bytes <= signals.left_bytes


def _kept(blocks: int, new_blocks: int) -> Decision:
    return Decision(blocks * BLOCK_TOKENS, f"{new_blocks * BLOCK_TOKENS:,} tokens in whole blocks are new")
