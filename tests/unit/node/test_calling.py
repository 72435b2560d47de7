"""Members are called by their labels, and told apart where several have the same."""

import pytest

from kvnet.protocol.ids import PeerId, peer_text, short_peer_text
from kvnet.trust.keys import publisher_text
from kvnet.trust.roster import Member
from kvnet_node.calling import members_called, names_of, not_one, peer_names
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
    assert names == {nameless.publisher: publisher_text(nameless.publisher), rude.publisher: "mac\\x1b[2J"}
    assert peer_names([nameless, rude]) == {peer(2): "mac\\x1b[2J"}


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


def test_several_are_named_so_that_one_can_be_chosen() -> None:
    two = [STUDIO, member("b", "mac", 2), member("c", "mac", 3)]
    found = members_called(two, "mac")
    error = not_one(two, found, "mac")
    assert [members_called(two, part.split()[-1])[0] for part in error.message.split(": ", 1)[1].split("; ")] == found
    assert short_peer_text(peer(3)) in error.message
    assert "publisher id" in error.hint
