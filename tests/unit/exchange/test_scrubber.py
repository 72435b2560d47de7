from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from kvnet.exchange.lane import InlineLane
from kvnet.exchange.scrubber import Scrubber, ScrubPace
from kvnet.format.hashes import ArtifactHash
from kvnet.store.disk import DiskStore
from tests.unit.store.samples import publish, sample

NOW_S = 1_800_000_000.0
PACE = ScrubPace(interval_s=1000.0)


@pytest.mark.parametrize(
    ("last_s", "due_in_s"),
    [
        (NOW_S, 1000.0),
        (NOW_S - 400.0, 600.0),
        (NOW_S - 5000.0, 0.0),
        # The clock was years ahead when it was last done.
        (NOW_S + 400_000_000.0, 1000.0),
        # This one was wrong then.
        (0.0, 0.0),
    ],
)
def test_a_scrub_is_due_an_interval_after_the_last_whatever_the_clock_did(last_s: float, due_in_s: float) -> None:
    assert PACE.due_in_s(last_s, NOW_S) == due_in_s


@dataclass
class Mender:
    """Says what it was asked to get back, and whether that is here now."""

    whole: bool
    asked: list[tuple[ArtifactHash, list[int]]] = field(default_factory=list)

    async def __call__(self, artifact: ArtifactHash, indices: Sequence[int]) -> bool:
        await trio.lowlevel.checkpoint()
        self.asked.append((artifact, list(indices)))
        return self.whole


@pytest.mark.parametrize("whole", [True, False])
async def test_every_artifact_that_lacks_something_is_mended_in_what_it_lacks_and_counts_only_when_it_is_whole(
    tmp_path: Path, whole: bool
) -> None:
    store = DiskStore.open(tmp_path / "store", quota_bytes=1 << 30, min_free_bytes=0)
    sound, first, second = sample(range(5000, 5300)), sample(range(600)), sample(range(900))
    for artifact in (sound, first, second):
        publish(store, artifact)
    shared = first.manifest.plan().first_tile
    assert first.entries[shared] == second.entries[shared]
    (place,) = store.locate_all([first.entries[shared].hash])
    assert place is not None
    with place.path.open("r+b") as file:
        file.seek(place.offset)
        file.write(bytes([first.chunks[shared][0] ^ 1]))
    mender = Mender(whole)
    found = await Scrubber(store, InlineLane(), mender).scrub()
    assert found.bad == 1
    assert set(found.damaged) == {first.hash, second.hash}
    assert sorted(mender.asked) == sorted([(first.hash, [shared]), (second.hash, [shared])])
    assert set(found.repaired) == ({first.hash, second.hash} if whole else set())
    store.close()
