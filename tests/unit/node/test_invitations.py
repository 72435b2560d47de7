"""The open invitations of a node."""

import stat
from pathlib import Path

import pytest

from kvnet.errors import ConfigError, StoreError
from kvnet.format.hashes import NamespaceId
from kvnet.trust.statement_bodies import Invitation
from kvnet_node.invitations import MAX_OPEN, InvitationBook, new_secrets

NOW_S = 1_800_000_000
TEAM = NamespaceId(b"t" * 32)


def invitation(*, uses: int = 1, lifetime_s: int = 60, namespace: bytes = TEAM) -> Invitation:
    id_, secret = new_secrets()
    return Invitation(
        sequence=1,
        issued=NOW_S,
        expires=NOW_S + lifetime_s,
        id=id_,
        secret=secret,
        role="colleague",
        swarm="team",
        namespace=namespace,
        founder=b"f" * 32,
        peer=b"p",
        addresses=(),
        uses=uses,
    )


def opened(file: Path, now_s: float = NOW_S) -> InvitationBook:
    book = InvitationBook(file, now=lambda: now_s)
    book.load()
    return book


def test_a_use_is_on_disk_before_it_counts_and_the_same_guest_uses_none_twice(tmp_path: Path) -> None:
    file = tmp_path / "invitations.json"
    made = invitation(uses=2)
    opened(file).add(made, signer=b"s" * 32, label="bob")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert opened(file).use(made.id, b"a" * 32)
    assert opened(file).use(made.id, b"a" * 32)
    assert opened(file).use(made.id, b"b" * 32)
    book = opened(file)
    assert not book.use(made.id, b"c" * 32)
    held = book.find(made.id)
    assert held is not None
    assert list(held.opens.used_by) == [b"a" * 32, b"b" * 32]
    assert (held.label, held.signer, held.namespace, held.issued_s) == ("bob", b"s" * 32, TEAM, NOW_S)
    assert book.count(TEAM) == 0


def test_nothing_is_found_of_an_invitation_of_somebody_else(tmp_path: Path) -> None:
    book = opened(tmp_path / "invitations.json")
    assert book.find(b"x" * 16) is None
    assert not book.use(b"x" * 16, b"a" * 32)


def test_invitations_are_withdrawn_by_namespace_and_by_who_used_them(tmp_path: Path) -> None:
    book = opened(tmp_path / "invitations.json")
    used, unused, other = invitation(uses=5), invitation(), invitation(namespace=b"o" * 32)
    for each in (used, unused, other):
        book.add(each, signer=b"s" * 32, label="")
    book.use(used.id, b"a" * 32)
    assert book.withdraw(TEAM, [b"b" * 32]) == 0
    assert book.withdraw(TEAM, [b"a" * 32, b"b" * 32]) == 1
    assert (book.find(used.id), book.count(TEAM)) == (None, 1)
    assert book.withdraw_all(TEAM) == 1
    assert book.find(other.id) is not None


def test_open_invitations_are_limited_and_expired_ones_make_room(tmp_path: Path) -> None:
    file = tmp_path / "invitations.json"
    book = opened(file)
    for _ in range(MAX_OPEN):
        book.add(invitation(), signer=b"s" * 32, label="")
    with pytest.raises(StoreError, match="at most 256"):
        book.add(invitation(), signer=b"s" * 32, label="")
    later = opened(file, NOW_S + 61)
    assert later.count(TEAM) == 0
    later.add(invitation(lifetime_s=1000), signer=b"s" * 32, label="")
    assert len(file.read_bytes()) < 2000


def test_a_file_that_others_may_read_or_that_is_damaged_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "invitations.json"
    opened(file).add(invitation(), signer=b"s" * 32, label="")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="others may read it"):
        opened(file)
    file.chmod(0o600)
    file.write_bytes(b"[" * 10_000)
    with pytest.raises(ConfigError, match="open invitations"):
        opened(file)


def test_a_use_that_cannot_be_written_does_not_count(tmp_path: Path) -> None:
    folder = tmp_path / "n"
    book = opened(folder / "invitations.json")
    made = invitation()
    book.add(made, signer=b"s" * 32, label="")
    (folder / "invitations.json").unlink()
    folder.rmdir()
    folder.write_bytes(b"")
    with pytest.raises(StoreError, match="cannot be written"):
        book.use(made.id, b"a" * 32)
    held = book.find(made.id)
    assert held is not None
    assert list(held.opens.used_by) == []


def test_invitations_to_what_this_node_has_left_are_given_up(tmp_path: Path) -> None:
    book = opened(tmp_path / "invitations.json")
    stays, goes = invitation(), invitation(namespace=b"o" * 32)
    for each in (stays, goes):
        book.add(each, signer=b"s" * 32, label="")
    assert book.withdraw_others({TEAM}) == 1
    again = opened(tmp_path / "invitations.json")
    assert again.find(stays.id) is not None
    assert again.find(goes.id) is None
    assert again.withdraw_others({TEAM}) == 0
