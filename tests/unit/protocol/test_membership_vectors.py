"""What makes members, in bytes: another implementation, made from the documents alone, reads and writes the same."""

import json
from pathlib import Path
from typing import Any

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvnet.protocol.enrolment import OpenInvitation, check_enrolled, may_enrol
from kvnet.protocol.ids import PeerId
from kvnet.protocol.membership import Occasion, Role
from kvnet.protocol.messages.control import decode_message
from kvnet.protocol.messages.enrolment import Enrol, Enrolled
from kvnet.trust.invitation import parse_invitation_text
from kvnet.trust.keys import PublisherKey
from kvnet.trust.roster import build_roster
from kvnet.trust.statements import SignedStatement
from tests.unit.protocol import foreign_members as foreign
from tests.unit.trust.members import key, lets_in, rekeys, rotates
from tests.unit.trust.samples import MINE

FILE: Any = json.loads((Path(__file__).parents[2] / "vectors" / "membership.json").read_text())
SEEDS = {name: bytes.fromhex(seed) for name, seed in FILE["seeds"].items()}
PUBLISHERS = {name: bytes.fromhex(publisher) for name, publisher in FILE["publishers"].items()}
ROSTERS = pytest.mark.parametrize("vector", FILE["rosters"], ids=lambda vector: vector["name"])


def raw(section: str) -> dict[str, bytes]:
    """The fields of a section that are bytes."""
    found = {}
    for name, value in FILE[section].items():
        try:
            found[name] = bytes.fromhex(value)
        except ValueError:
            continue
    return found


def test_proofs_of_membership_and_the_session_are_what_the_document_says() -> None:
    session, secret = raw("session"), raw("namespace")["lookup_secret"]
    nonces = session["nonce_initiator"], session["nonce_responder"]
    one, other = session["initiator"], session["responder"]
    first = foreign.proof_message(b"initiator", one, other, *nonces)
    second = foreign.proof_message(b"responder", other, one, *nonces)
    assert (first, second) == (session["m_initiator"], session["m_responder"])
    assert foreign.keyed(secret, first) == session["entry_initiator"]
    assert foreign.keyed(secret, second) == session["entry_responder"]
    assert foreign.derive("kvnet 2026-11 control session", first)[:16] == session["id"]


def test_namespace_file_is_what_the_document_says() -> None:
    namespace = raw("namespace")
    file = foreign.read_namespace_file(namespace["file"])
    assert file["name"] == FILE["namespace"]["name"]
    assert (file["prefix_secret"], file["lookup_secret"]) == (namespace["prefix_secret"], namespace["lookup_secret"])
    assert foreign.derive("kvnet 2026-11 namespace id", file["prefix_secret"]) == namespace["id"]


def test_text_of_an_invitation_is_read_from_the_document_alone() -> None:
    text = FILE["invitation"]["text"]
    for written in (text, text.upper(), f"  {text[:300]}\n{text[300:]} "):
        invitation = foreign.read_invitation(written)
        assert (invitation.kind, invitation.signer) == ("invitation", PUBLISHERS["founder"])
        assert invitation.envelope == raw("invitation")["envelope"]
        assert parse_invitation_text(written)[0].envelope == invitation.envelope


def test_guest_made_from_the_document_is_let_in() -> None:
    invitation, m = foreign.read_invitation(FILE["invitation"]["text"]), raw("session")["m_initiator"]
    sent = foreign.enrol(invitation, m, SEEDS["ann"], FILE["enrolment"]["label"])
    assert (sent["proof"], sent["signature"]) == (raw("enrolment")["proof"], raw("enrolment")["signature"])
    assert cbor2.dumps(sent, canonical=True) == raw("enrolment")["enrol"]
    session, read = raw("session"), decode_message(raw("enrolment")["enrol"])
    occasion = Occasion(
        Role.INITIATOR,
        PeerId(session["initiator"]),
        PeerId(session["responder"]),
        session["nonce_initiator"],
        session["nonce_responder"],
    )
    body = invitation.body
    known = OpenInvitation(body["secret"], body["expires"], body["uses"])
    assert isinstance(read, Enrol)
    assert may_enrol(read, occasion, known, removed=(), now_s=body["issued"])


def test_answer_to_a_guest_is_read_from_the_document_alone() -> None:
    answer = cbor2.loads(raw("enrolment")["enrolled"])
    assert (answer["type"], answer["request_id"]) == ("enrolled", 0)
    namespace = foreign.read_namespace_file(answer["namespace"])
    invitation = foreign.read_invitation(FILE["invitation"]["text"])
    assert foreign.derive("kvnet 2026-11 namespace id", namespace["prefix_secret"]) == invitation.body["namespace"]
    told = [foreign.open_envelope(each) for each in answer["statements"]]
    assert foreign.roster(invitation.body["founder"], told, mine=False).members == {
        PUBLISHERS["founder"],
        PUBLISHERS["ann"],
    }
    read = decode_message(raw("enrolment")["enrolled"])
    assert isinstance(read, Enrolled)
    signed, body = parse_invitation_text(FILE["invitation"]["text"])
    admission = check_enrolled(read, body, signed.signer, PUBLISHERS["ann"], now_s=body.issued + 1)
    assert admission.roster.members.keys() == {PUBLISHERS["founder"], PUBLISHERS["ann"]}


def test_sealed_secret_is_opened_from_the_document_alone() -> None:
    sealed = raw("sealed")
    assert foreign.open_box(SEEDS["ann"], sealed["box"]) == sealed["secret"]
    assert PublisherKey(SEEDS["ann"]).open_sealed(sealed["box"]) == sealed["secret"]


@ROSTERS
def test_roster_follows_from_the_document_alone(vector: dict[str, Any]) -> None:
    told = [foreign.open_envelope(bytes.fromhex(envelope)) for envelope in vector["told"]]
    roster = foreign.roster(PUBLISHERS["founder"], told, mine=vector["mine"])
    names = {publisher: name for name, publisher in PUBLISHERS.items()}
    assert sorted(names[each] for each in roster.members) == vector["members"]
    assert {names[each]: at for each, at in roster.removed.items()} == vector["removed"]
    assert (roster.rekeying.envelope.hex() if roster.rekeying else "") == vector["rekeying"]
    boxes = {each["member"]: each["box"] for each in roster.rekeying.body["sealed"]} if roster.rekeying else {}
    opened = {names[who]: foreign.open_box(SEEDS[names[who]], box).hex() for who, box in boxes.items()}
    assert opened == vector["lookup_secret"]


STATEMENTS = st.one_of(
    st.builds(lets_in, st.sampled_from("abcd"), st.sampled_from("abcde"), st.integers(1, 12)),
    st.builds(rotates, st.sampled_from("bc"), st.just("f"), st.integers(1, 12)),
    st.builds(
        lambda signer, at, out, stay: rekeys(signer, at, out=out, stay=stay),
        st.sampled_from("abc"),
        st.integers(1, 12),
        st.sampled_from(["", "b", "c", "ad"]),
        st.sampled_from(["a", "ab", "abc", "abcde"]),
    ),
)


@settings(max_examples=60)
@given(st.lists(STATEMENTS, max_size=9), st.booleans())
def test_both_come_to_the_same_roster_whatever_was_said(told: list[SignedStatement], mine: bool) -> None:
    ours = build_roster(MINE.id, key("a").public, told, devices_remove=mine)
    read = [foreign.open_envelope(each.envelope) for each in dict.fromkeys(told)]
    theirs = foreign.roster(key("a").public, read, mine=mine)
    assert theirs.members == set(ours.members)
    assert theirs.removed == dict(ours.removed)
    assert (theirs.rekeying.envelope if theirs.rekeying else None) == (ours.rekey.envelope if ours.rekey else None)
