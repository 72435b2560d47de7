"""Members are called by their labels, and told apart where several have the same."""

import pytest

from kvnet.protocol.ids import PeerId, peer_text, short_peer_text
from kvnet.trust.keys import publisher_text
from kvnet.trust.roster import Member
from kvnet_node.calling import members_called, names_of, not_one, peer_names, signer_names
from tests.unit.trust.members import key


def peer(number: int) -> PeerId:
    return PeerId(bytes.fromhex("002408011220") + bytes([number]) * 32)


def member(name: str, label: str, *peers: int) -> Member:
    return Member(key(name).public, "device", label, tuple(peer(each) for each in peers))


STUDIO = member("a", "studio", 1)
MAC_2 = member("b", "MacBook", 2)
MAC_3 = member("c", "macbook ", 3)
MEMBERS = [STUDIO, MAC_2, MAC_3]


def test_only_labels_that_several_have_get_a_part_of_the_peer_id() -> None:
    assert names_of(MEMBERS) == {
        STUDIO.publisher: "studio",
        MAC_2.publisher: f"MacBook ({short_peer_text(peer(2))})",
        MAC_3.publisher: f"macbook ({short_peer_text(peer(3))})",
    }


def test_keys_of_one_machine_are_called_the_same_and_who_has_no_peer_id_by_its_publisher_id() -> None:
    rotated = member("d", "studio", 1)
    assert set(names_of([STUDIO, rotated]).values()) == {"studio"}
    gone = member("d", "studio")
    assert names_of([STUDIO, gone])[gone.publisher] == f"studio (…{publisher_text(gone.publisher)[-8:]})"


def test_who_has_no_label_is_called_by_its_publisher_id_and_controls_are_escaped() -> None:
    nameless, rude = member("a", " "), member("b", "mac\x1b[2J", 2)
    names = names_of([nameless, rude])
    shown = f"mac\\x1b[2J ({short_peer_text(peer(2))})"
    assert names == {nameless.publisher: publisher_text(nameless.publisher), rude.publisher: shown}
    assert peer_names([nameless, rude]) == {peer(2): shown}


def test_machines_are_told_apart_over_all_namespaces() -> None:
    elsewhere = member("d", "another name of the same machine", 2)
    assert peer_names([*MEMBERS, elsewhere]) == {
        peer(1): "studio",
        peer(2): f"MacBook ({short_peer_text(peer(2))})",
        peer(3): f"macbook ({short_peer_text(peer(3))})",
    }


@pytest.mark.parametrize(
    "wanted",
    [
        "MacBook",
        f"MacBook ({short_peer_text(peer(2))})",
        short_peer_text(peer(2)),
        peer_text(peer(2))[-12:],
        peer_text(peer(2)),
        publisher_text(MAC_2.publisher),
        f" {publisher_text(MAC_2.publisher)[-8:]}\n",
    ],
)
def test_a_member_is_meant_by_its_label_its_name_its_ids_and_their_ends(wanted: str) -> None:
    assert members_called(MEMBERS, wanted) == [MAC_2]


@pytest.mark.parametrize("wanted", ["", "  ", "…", "mac", peer_text(peer(2))[-7:], "nobody at all"])
def test_less_means_nobody(wanted: str) -> None:
    assert members_called(MEMBERS, wanted) == []
    assert "found none" in not_one(MEMBERS, [], wanted).message


def test_nobody_takes_anothers_place_by_calling_itself_like_its_id() -> None:
    liar = member("d", publisher_text(MAC_2.publisher), 4)
    assert members_called([liar, *MEMBERS], publisher_text(MAC_2.publisher)) == [MAC_2]


def test_nobody_is_called_what_tells_another_apart() -> None:
    liar = member("d", f"MacBook ({short_peer_text(peer(2))})", 4)
    names = names_of([*MEMBERS, liar])
    assert len(set(names.values())) == 4
    assert members_called([*MEMBERS, liar], names[liar.publisher]) == [liar]
    assert len(members_called([*MEMBERS, liar], names[MAC_2.publisher])) == 2


@pytest.mark.parametrize(
    "label",
    [
        "This Machine",
        "ram",
        publisher_text(STUDIO.publisher),
        peer_text(peer(1)),
        "bob, artifact of which nothing is verified",
        "studio (own)",
        "\u0455tud\u0456\u043e",  # in Cyrillic
        "mac\u202e",
    ],
)
def test_a_label_that_reads_as_something_else_has_a_part_of_its_peer_id(label: str) -> None:
    liar = member("d", label, 4)
    assert names_of([liar])[liar.publisher].endswith(f" ({short_peer_text(peer(4))})")


@pytest.mark.parametrize("label", ["studio", "Bobs-MacBook-Pro", "Bob’s Mac mini", "Büro", "ip-10-0-0-1", "a_b.c"])
def test_an_ordinary_label_is_the_name(label: str) -> None:
    one = member("d", label, 4)
    assert names_of([one]) == {one.publisher: label}


@pytest.mark.parametrize(("label", "other"), [("Büro", "buro"), ("mini1", "minil"), ("studio", "studi0")])
def test_labels_that_look_alike_are_told_apart(label: str, other: str) -> None:
    names = names_of([member("a", label, 1), member("b", other, 2)])
    assert all("…" in name for name in names.values())


def test_signers_are_called_by_label_own_keys_this_machine_and_the_unknown_not_at_all() -> None:
    team, unlabelled = member("a", "what the team calls it", 1), member("d", "")
    names = signer_names([STUDIO, team, MAC_2, unlabelled], [MAC_2.publisher, MAC_3.publisher])
    assert names == {
        STUDIO.publisher: "studio",
        MAC_2.publisher: "this machine",
        MAC_3.publisher: "this machine",
    }


def test_several_are_named_so_that_one_can_be_chosen() -> None:
    two = [STUDIO, member("b", "mac", 2), member("c", "mac", 3)]
    found = members_called(two, "mac")
    error = not_one(two, found, "mac")
    assert [members_called(two, part.split()[-1])[0] for part in error.message.split(": ", 1)[1].split("; ")] == found
    assert short_peer_text(peer(3)) in error.message
    assert "publisher id" in error.hint
