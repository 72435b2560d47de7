"""A lookup that the DHT does not answer in full in the time it has."""

from pathlib import Path

import trio
from trio.testing import MockClock

from kvnet.network.memory import World
from tests.simulated.telling import PROMPT, TOKENS, look_up, member
from tests.simulated.test_false_tables import ALONE


async def test_whom_the_dht_named_before_a_stopped_server_took_the_time_is_asked(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    hubs = [world.network(name) for name in ("hub", "stopped")]
    for hub in hubs:
        await nursery.start(hub.run)
    bootstrap = tuple(hub.address for hub in hubs)
    a, c = [await member(world, nursery, tmp_path, name, meet=ALONE, bootstrap=bootstrap) for name in "ac"]
    await a.add(TOKENS)
    await trio.sleep(60)
    world.hang(hubs[1])
    began_s = trio.current_time()
    found = await look_up(c, PROMPT)
    assert found.candidates[0].providers == (a.network.peer_id,)
    assert trio.current_time() - began_s < 3.0
