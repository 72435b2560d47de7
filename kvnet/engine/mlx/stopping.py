"""Stop texts: where an answer ends because of what it says.

mlx-lm stops on the token ids that a stop text has by itself. A model that writes the same text with other tokens (two
line ends in one token, where one ends the answer) would run on, so the text is watched as well.
"""


class StopText:
    """Watches a growing text for the first stop text in it.

    Args:
        texts: none of them empty.
    """

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._texts = texts
        self._keep = max((len(text) for text in texts), default=1) - 1
        self._tail = ""

    def cut(self, text: str) -> int | None:
        """Adds ``text``; where in it the stop text ends that is complete first, or ``None``."""
        if not self._texts or not text:
            return None
        seen = self._tail + text
        ends = [place + len(stop) for stop in self._texts if (place := seen.find(stop)) >= 0]
        if ends:
            return min(ends) - len(self._tail)
        self._tail = seen[-self._keep :] if self._keep else ""
        return None
