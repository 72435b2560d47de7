"""What of a conversation is worth keeping on disk. Pure: figures in, a decision out.

The rule of now is deliberately plain: keep what fills at least one whole new block. The signals that a better rule
needs - where prompts part, what the client marked, which conversations come again - are all handed in already.
"""

from dataclasses import dataclass

from kvnet.engine.interface import Boundary
from kvnet.format.prefix import BLOCK_TOKENS


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
    """

    enabled: bool = True
    min_new_blocks: int = 1

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
        coming_again = signals.held_tokens
        if signals.stable_tokens < signals.prompt_tokens:
            coming_again = min(coming_again, signals.stable_tokens)
        blocks = coming_again // BLOCK_TOKENS
        new_blocks = blocks - signals.stored_tokens // BLOCK_TOKENS
        if new_blocks < self.min_new_blocks:
            return Decision(0, f"fewer than {self.min_new_blocks * BLOCK_TOKENS:,} tokens in whole blocks are new")
        return Decision(blocks * BLOCK_TOKENS, f"{new_blocks * BLOCK_TOKENS:,} tokens in whole blocks are new")

    def created_tokens(self, signals: Signals, reused_tokens: int) -> int:
        """Prompt tokens that will newly be kept once the prompt is computed, none of them counted as reused too."""
        keep = min(self.decide(signals).keep_tokens, signals.prompt_tokens)
        return max(0, keep - max(signals.stored_tokens, reused_tokens))
