from dataclasses import replace

from kvnet.engine.toy_model import toy_fingerprint
from kvnet.exchange.measured import KEEP_S, MAX_FINDINGS, Finding, Measurements
from kvnet.format.fingerprint import Producer
from kvnet.protocol.ids import PeerId

HERE = Producer("toy", "1", "none", "any", 512)
THERE = Producer("toy", "2", "none", "any", 512)
MODEL = toy_fingerprint("model").hash


def finding(peer: bytes = b"a", *, difference: float = 0.0, tolerated: bool = True, found_s: float = 1.0) -> Finding:
    return Finding(peer, MODEL, HERE, THERE, b"ours", b"theirs", difference, "words", tolerated, found_s)


def test_a_finding_counts_for_the_two_samples_it_was_made_of() -> None:
    book = Measurements()
    book.note(finding(difference=0.5))
    found = book.find(PeerId(b"a"), MODEL, b"ours", b"theirs")
    assert found is not None
    assert found.difference == 0.5
    assert book.find(PeerId(b"a"), MODEL, b"ours", b"others") is None
    assert book.find(PeerId(b"b"), MODEL, b"ours", b"theirs") is None


def test_the_worst_finding_counts_for_a_kind_of_machine() -> None:
    book = Measurements()
    assert book.worst(MODEL, HERE, THERE) is None
    book.note(finding(b"a", difference=0.001))
    book.note(finding(b"b", difference=0.5, tolerated=False))
    book.note(finding(b"c", difference=0.0))
    worst = book.worst(MODEL, HERE, THERE)
    assert worst is not None
    assert (worst.difference, worst.tolerated) == (0.5, False)
    assert book.worst(MODEL, THERE, HERE) is None


def test_a_peer_that_computes_otherwise_now_is_judged_by_that() -> None:
    book = Measurements()
    changes: list[int] = []
    book.changed = lambda: changes.append(1)
    book.note(finding(difference=0.5, tolerated=False))
    book.note(finding(difference=0.0))
    worst = book.worst(MODEL, HERE, THERE)
    assert worst is not None
    assert worst.tolerated
    assert len(changes) == 2


def test_old_findings_are_not_taken_up_again_and_the_oldest_make_room() -> None:
    book = Measurements()
    book.load([finding(b"old", found_s=0.0), finding(b"new", found_s=KEEP_S)], now_s=KEEP_S + 1)
    assert [each.peer for each in book.all()] == [b"new"]
    for n in range(MAX_FINDINGS + 3):
        book.note(finding(n.to_bytes(4, "big"), found_s=KEEP_S + 2 + n))
    kept = book.all()
    assert len(kept) == MAX_FINDINGS
    assert kept[0].peer == (3).to_bytes(4, "big")
    assert replace(kept[0].measured, words="").words == ""
