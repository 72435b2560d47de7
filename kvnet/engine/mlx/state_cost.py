"""How much memory a sequence's state takes, for any kind of cache: also for those that cannot be shared."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlx.utils import tree_flatten


@dataclass(frozen=True, slots=True)
class StateCost:
    """Bytes of one sequence's state.

    Attributes:
        growing: bytes a token, and the number of tokens from which on they do not grow; None when there is none.
        constant_bytes: whatever the length.
    """

    growing: tuple[tuple[int, int | None], ...]
    constant_bytes: int = 0

    def bytes_for(self, n_tokens: int) -> int:
        """Bytes of ``n_tokens`` tokens."""
        grown = sum(each * (n_tokens if cap is None else min(n_tokens, cap)) for each, cap in self.growing)
        return grown + self.constant_bytes


def state_cost(caches: Sequence[Any], step_tokens: int) -> StateCost:
    """The cost of caches that have seen one token; evaluated.

    Args:
        caches: one per layer.
        step_tokens: of a prefill step, which a ring or a chunk holds beside its window while it runs.
    """
    growing: dict[int | None, int] = {}
    constant_bytes = 0
    for cache in _single(caches):
        rows = [array for name in ("keys", "values") for array in _arrays(getattr(cache, name, None))]
        if not rows:
            constant_bytes += sum(int(array.nbytes) for array in _arrays(getattr(cache, "cache", None)))
            continue
        window = getattr(cache, "max_size", None) or getattr(cache, "chunk_size", None)
        cap = None if window is None else int(window) + step_tokens
        # A buffer has more rows than tokens; all classes lay rows along the last axis but one.
        growing[cap] = growing.get(cap, 0) + sum(int(array.nbytes) // int(array.shape[-2]) for array in rows)
    return StateCost(tuple((each, cap) for cap, each in growing.items()), constant_bytes)


def _single(caches: Iterable[Any]) -> Iterator[Any]:
    for cache in caches:
        parts = getattr(cache, "caches", None)
        if parts is None:
            yield cache
        else:
            yield from _single(parts)


def _arrays(tree: Any) -> list[Any]:
    leaves: Any = tree_flatten(tree)
    return [leaf for _, leaf in leaves if getattr(leaf, "nbytes", 0)]
