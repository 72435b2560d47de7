"""Revocations that are told of and have not arrived."""

import pytest

from kvnet.format.hashes import NamespaceId
from kvnet.trust import withheld
from kvnet.trust.withheld import Extent, Withheld

HOME, SWARM = NamespaceId(b"h" * 32), NamespaceId(b"s" * 32)
ANN, BOB = b"a" * 32, b"b" * 32


def test_a_revocation_that_is_told_of_and_not_known_is_missing_until_it_arrives() -> None:
    missing = Withheld()
    assert missing.told_of(SWARM, ANN, Extent(5, 1), Extent(3, 1))
    assert len(missing) == 1
    assert missing.publishers() == {SWARM: frozenset({ANN})}
    missing.arrived(ANN, lambda *_: Extent(4, 1))
    assert missing
    missing.arrived(BOB, lambda *_: Extent(9, 1))
    assert missing
    missing.arrived(ANN, lambda signer, namespace: Extent(5, 1) if (signer, namespace) == (ANN, SWARM) else Extent())
    assert not missing.publishers()


def test_what_is_known_or_known_to_be_missing_is_no_news() -> None:
    missing = Withheld()
    assert not missing.told_of(SWARM, ANN, Extent(5, 1), Extent(5, 1))
    assert not missing.told_of(SWARM, ANN, Extent(), Extent())
    assert missing.told_of(SWARM, ANN, Extent(6, 1), Extent(5, 1))
    assert not missing.told_of(SWARM, ANN, Extent(6, 1), Extent(5, 1))
    assert not missing.told_of(SWARM, ANN, Extent(5, 1), Extent(4, 1))
    assert missing.told_of(SWARM, ANN, Extent(7, 1), Extent(5, 1))


def test_what_is_missing_in_a_namespace_is_forgotten_with_it() -> None:
    missing = Withheld()
    missing.told_of(SWARM, ANN, Extent(5, 1), Extent(0, 1))
    missing.told_of(HOME, ANN, Extent(5, 1), Extent(0, 1))
    missing.told_of(HOME, BOB, Extent(5, 1), Extent(0, 1))
    missing.leave(SWARM)
    assert missing.publishers() == {HOME: frozenset({ANN, BOB})}


def test_no_more_are_remembered_than_memory_is_given_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(withheld, "MAX_WITHHELD", 1)
    missing = Withheld()
    assert missing.told_of(SWARM, ANN, Extent(5, 1), Extent(0, 1))
    assert not missing.told_of(SWARM, BOB, Extent(5, 1), Extent(0, 1))
    assert missing.told_of(SWARM, ANN, Extent(6, 1), Extent(0, 1))


def test_an_earlier_revocation_of_several_is_missed_by_their_number() -> None:
    missing = Withheld()
    assert missing.told_of(SWARM, ANN, Extent(7, 3), Extent(7, 2))
    # One more is told of than is there already; both have to come.
    assert missing.told_of(SWARM, ANN, Extent(9, 3), Extent(7, 2))
    missing.arrived(ANN, lambda *_: Extent(9, 2))
    missing.arrived(ANN, lambda *_: Extent(8, 3))
    assert missing
    missing.arrived(ANN, lambda *_: Extent(9, 3))
    assert not missing
