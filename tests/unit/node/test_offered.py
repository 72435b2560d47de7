"""What is known of artifacts that members hold, also where none of them is there to show it."""

from kvnet.store.memory import MemoryStore
from kvnet.trust.envelope import open_manifest
from kvnet.trust.statement_bodies import HeldEntry
from kvnet_node.operations.offered import Offer, know_held
from tests.unit.store.samples import MINE, OTHER, Sample, publish, sample


def offered(made: Sample) -> Offer:
    keyed = bytes(MINE.keyed_artifact(made.hash))
    return Offer(MINE, keyed, HeldEntry(artifact=keyed, n_tokens=600, codec="raw", size_bytes=1, keys=()))


def test_what_is_here_too_is_known_while_its_holders_are_away() -> None:
    here, elsewhere, foreign = sample(), sample(range(1000, 1600)), sample(range(2000, 2600), namespace=OTHER)
    store = MemoryStore()
    for each in (here, foreign):
        publish(store, each)
    known, unknown, of_another = offered(here), offered(elsewhere), offered(foreign)
    know_held([known, unknown, of_another], store.artifacts())
    store.close()
    assert (known.artifact, known.manifest) == (here.hash, here.manifest)
    assert (unknown.artifact, unknown.manifest) == (None, None)
    assert (of_another.artifact, of_another.manifest) == (None, None), "the other namespace's is not this one's"


def test_what_a_member_has_shown_is_not_looked_for_in_the_store() -> None:
    here = sample()
    store = MemoryStore()
    publish(store, here)
    shown = offered(here)
    shown.signed = open_manifest(here.envelope)
    know_held([shown], store.artifacts())
    store.close()
    assert shown.manifest is None
