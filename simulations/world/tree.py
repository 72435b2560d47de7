"""The tree of all prompts as the world walks it: plain lists, and ends in tokens."""

from typing import Final

from kvnet.format.prefix import BLOCK_TOKENS
from simulations.workload.requests import RequestStream

NOWHERE: Final = -1

Path = list[tuple[int, int]]
"""Segments of a prompt, the deepest first, each with how many tokens of the prompt there are up to its end there."""


class PromptTree:
    """Where prompts run.

    Args:
        stream: whose prompts.

    Attributes:
        begin: for each segment, tokens of a prompt before it.
        first_block: for each segment, the first block of 256 tokens that has a token of it.
    """

    def __init__(self, stream: RequestStream) -> None:
        segments = stream.segments
        self._parent: list[int] = segments.parent.tolist()
        self.begin: list[int] = (segments.begin * stream.block_tokens).tolist()
        self.first_block: list[int] = (segments.begin * stream.block_tokens // BLOCK_TOKENS).tolist()

    def path(self, segment: int, n_tokens: int) -> Path:
        """The segments of a prompt of `n_tokens` tokens that ends in `segment`."""
        parts: Path = []
        parent, begin = self._parent, self.begin
        while segment >= 0:
            before = begin[segment]
            if before < n_tokens:
                parts.append((segment, n_tokens))
                n_tokens = before
            segment = parent[segment]
        return parts

    def longer(self, path: Path, segment: int, n_tokens: int) -> Path:
        """`path(segment, n_tokens)`, when `path` is that of a shorter prompt there."""
        if path and path[0][0] == segment:
            return [(segment, n_tokens), *path[1:]]
        return self.path(segment, n_tokens)

    @staticmethod
    def cut(path: Path, n_tokens: int) -> Path:
        """The beginning of a prompt's path, up to `n_tokens` tokens."""
        if path and path[0][1] <= n_tokens:
            return path
        parts: Path = []
        for at, (segment, _) in enumerate(path):
            before = path[at + 1][1] if at + 1 < len(path) else 0
            if before < n_tokens:
                parts.append((segment, n_tokens))
                parts += path[at + 1 :]
                break
        return parts
