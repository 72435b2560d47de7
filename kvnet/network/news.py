"""Waking whoever waits for something to have happened."""

import trio


class News:
    """Something that happens again and again, for tasks that look at what they wait for themselves.

    ``while not there: await news.wait()`` loses nothing, as long as no checkpoint lies between the look and the wait:
    between two checkpoints no other task runs that could tell. Where the look has checkpoints in it, take `next` before
    it, and wait for that.

    Attributes:
        next: set when it is told the next time; there is a new one then.
    """

    def __init__(self) -> None:
        self.next = trio.Event()

    def tell(self) -> None:
        """It has happened: wake whoever waits. To be called where trio runs."""
        told, self.next = self.next, trio.Event()
        told.set()

    async def wait(self) -> None:
        """Return when it is told the next time."""
        await self.next.wait()


async def any_of(*events: trio.Event) -> None:
    """Return when one of them is set."""
    async with trio.open_nursery() as nursery:

        async def wait(event: trio.Event) -> None:
            await event.wait()
            nursery.cancel_scope.cancel()

        for event in events:
            nursery.start_soon(wait, event)
