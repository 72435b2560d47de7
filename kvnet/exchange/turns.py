"""Whose turn it is with an artifact: who waits for an answer gets what it needs before it is copied any further.

A copy that nobody waits for is put down where it is: what it has brought becomes visible in the store, and the prompt
fetches only what is still missing, in its own order and with its own patience. Then the copy goes on with what is
missing after that. So no chunk comes twice but those on their way at that moment, and each of them may be cancelled or
fail without the other.
"""

from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager

import trio

from kvnet.format.hashes import NamespaceId
from kvnet.network.news import News

Clear = Callable[[], Awaitable[None]]
"""Returns when no copy of the artifact runs."""


def turn_key(namespace: NamespaceId, keyed_artifact: bytes) -> Hashable:
    """What tells an artifact from others: known of a claim too, before its manifest is here."""
    return namespace, keyed_artifact


class _Artifact:
    """Who is at one artifact.

    Attributes:
        n_users: how many, in all.
        n_first: how many of them wait for an answer.
        copies: what ends the present stint of each copy that runs.
        changed: any of this has.
    """

    def __init__(self) -> None:
        self.n_users = self.n_first = 0
        self.copies: set[trio.CancelScope] = set()
        self.changed = News()

    async def until(self, what: Callable[[], bool]) -> None:
        while not what():
            await self.changed.wait()


class Turns:
    """The turns at every artifact that somebody fetches."""

    def __init__(self) -> None:
        self._artifacts: dict[Hashable, _Artifact] = {}

    @contextmanager
    def _at(self, key: Hashable) -> Iterator[_Artifact]:
        artifact = self._artifacts.setdefault(key, _Artifact())
        artifact.n_users += 1
        try:
            yield artifact
        finally:
            artifact.n_users -= 1
            if not artifact.n_users:
                del self._artifacts[key]

    @contextmanager
    def first(self, key: Hashable) -> Iterator[Clear]:
        """For whoever waits for an answer: copies of the artifact are put down, and go on when this is left."""
        with self._at(key) as artifact:
            artifact.n_first += 1
            for stint in artifact.copies:
                stint.cancel()

            async def clear() -> None:
                await artifact.until(lambda: not artifact.copies)

            try:
                yield clear
            finally:
                artifact.n_first -= 1
                artifact.changed.tell()

    async def copy(
        self, key: Hashable, work: Callable[[], Awaitable[None]], put_down: Callable[[], Awaitable[None]]
    ) -> None:
        """Do work that gives way to whoever waits for an answer, in as many stints as it takes.

        Args:
            key: of the artifact.
            work: begins with what is missing then; cancelled when it has to give way.
            put_down: makes what there is visible; called before it waits for its turn.
        """
        with self._at(key) as artifact:
            if artifact.n_first:
                await put_down()
            while True:
                await artifact.until(lambda: not artifact.n_first)
                stint = trio.CancelScope()
                artifact.copies.add(stint)
                try:
                    with stint:
                        await work()
                    if not stint.cancelled_caught:
                        return
                    await put_down()
                finally:
                    artifact.copies.discard(stint)
                    artifact.changed.tell()
