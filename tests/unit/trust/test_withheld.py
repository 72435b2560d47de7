"""Revocations that are told of and have not arrived."""

import pytest

from kvnet.format.hashes import NamespaceId
from kvnet.trust import withheld
from kvnet.trust.withheld import Withheld

HOME, SWARM = NamespaceId(b"h" * 32), NamespaceId(b"s" * 32)
ANN, BOB = b"a" * 32, b"b" * 32


def test_a_revocation_that_is_told_of_and_not_known_is_missing_until_it_arrives() -> None:
    missing = Withheld()
    assert missing.told_of(SWARM, ANN, latest=5, known=3)
    assert len(missing) == 1
    assert missing.publishers() == {SWARM: frozenset({ANN})}
    missing.arrived(ANN, lambda *_: 4)
    assert missing
    missing.arrived(BOB, lambda *_: 9)
    assert missing
    missing.arrived(ANN, lambda signer, namespace: 5 if (signer, namespace) == (ANN, SWARM) else 0)
    assert not missing.publishers()


def test_what_is_known_or_known_to_be_missing_is_no_news() -> None:
    missing = Withheld()
    assert not missing.told_of(SWARM, ANN, latest=5, known=5)
    assert not missing.told_of(SWARM, ANN, latest=0, known=0)
    assert missing.told_of(SWARM, ANN, latest=6, known=5)
    assert not missing.told_of(SWARM, ANN, latest=6, known=5)
    assert not missing.told_of(SWARM, ANN, latest=5, known=4)
    assert missing.told_of(SWARM, ANN, latest=7, known=5)


def test_what_is_missing_in_a_namespace_is_forgotten_with_it() -> None:
    missing = Withheld()
    missing.told_of(SWARM, ANN, latest=5, known=0)
    missing.told_of(HOME, ANN, latest=5, known=0)
    missing.told_of(HOME, BOB, latest=5, known=0)
    missing.leave(SWARM)
    assert missing.publishers() == {HOME: frozenset({ANN, BOB})}


def test_no_more_are_remembered_than_memory_is_given_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(withheld, "MAX_WITHHELD", 1)
    missing = Withheld()
    assert missing.told_of(SWARM, ANN, latest=5, known=0)
    assert not missing.told_of(SWARM, BOB, latest=5, known=0)
    assert missing.told_of(SWARM, ANN, latest=6, known=0)
