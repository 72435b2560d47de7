import stat
from pathlib import Path

import pytest

from kvnet.errors import ConfigError, MalformedError, StoreError, UsageError
from kvnet.format.hashes import NamespaceId
from kvnet.trust.keys import PublisherKey, publisher_text
from kvnet.trust.statement_bodies import KeyRotation
from kvnet.trust.statements import SignedStatement, rotation_message, sign_statement
from kvnet_node.identity import NodeIdentity
from kvnet_node.paths import DataPaths
from kvnet_node.swarms import MAX_NAMESPACES


def none_held(namespace: NamespaceId) -> int:
    return 0


def some_held(namespace: NamespaceId) -> int:
    return 3


def opened(directory: Path) -> NodeIdentity:
    identity = NodeIdentity(DataPaths(directory), "trusted")
    identity.load()
    return identity


def exported(directory: Path, target: Path) -> NamespaceId:
    return opened(directory).export_namespace(target)


STRANGER = PublisherKey(bytes(range(32)))


def test_what_was_made_at_first_use_is_found_again(tmp_path: Path) -> None:
    first, again = opened(tmp_path), opened(tmp_path)
    assert first.signing_key().public == again.signing_key().public
    assert first.namespaces() == again.namespaces()
    assert [namespace.name for namespace in again.namespaces()] == ["mine"]


def test_two_data_directories_have_nothing_in_common(tmp_path: Path) -> None:
    one, two = opened(tmp_path / "1"), opened(tmp_path / "2")
    assert one.signing_key().public != two.signing_key().public
    assert one.namespaces()[0].id != two.namespaces()[0].id


def test_every_secret_file_is_for_the_owner_alone(tmp_path: Path) -> None:
    identity = opened(tmp_path)
    identity.new_key()
    identity.trust(publisher_text(STRANGER.public), "x")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_new_keys_sign_and_all_keys_are_own(tmp_path: Path) -> None:
    identity = opened(tmp_path)
    keys = [identity.publisher(), identity.new_key(), identity.new_key()]
    again = opened(tmp_path)
    assert again.publisher() == keys[-1]
    assert [key.publisher for key in again.own_keys()] == keys[::-1]
    assert len(again.policy().own) == 3


def rotation(old: PublisherKey, new: PublisherKey) -> SignedStatement:
    signature = new.sign(rotation_message(old.public, new.public, 1))
    return sign_statement(KeyRotation(sequence=1, issued=1, expires=0, new=new.public, new_signature=signature), old)


def test_the_next_key_signs_nothing_before_it_is_adopted_and_stays_the_same(tmp_path: Path) -> None:
    identity = opened(tmp_path)
    first = identity.publisher()
    following = identity.next_key()
    assert identity.publisher() == first
    again = opened(tmp_path)
    assert (again.publisher(), again.next_key().public) == (first, following.public)
    again.finish_rotation([rotation(STRANGER, following)])
    assert again.publisher() == first
    assert again.adopt_next_key() == publisher_text(following.public) == opened(tmp_path).publisher()
    assert opened(tmp_path).next_key().public != following.public


def test_a_key_that_the_last_one_has_given_way_to_is_adopted_after_a_restart(tmp_path: Path) -> None:
    identity = opened(tmp_path)
    following = identity.next_key()
    said = rotation(identity.signing_key(), following)
    again = opened(tmp_path)
    again.finish_rotation([said])
    assert again.publisher() == publisher_text(following.public)
    again.finish_rotation([said])
    assert len(again.own_keys()) == 2


def test_trust_counts_at_once_and_stays(tmp_path: Path) -> None:
    identity = opened(tmp_path)
    text = publisher_text(STRANGER.public)
    assert identity.trust(text.upper(), "studio") == (text, True)
    assert identity.policy().trusted == {STRANGER.public}
    assert opened(tmp_path).policy().trusted == {STRANGER.public}
    assert identity.untrust(text) == text
    assert identity.policy().trusted == frozenset()
    assert opened(tmp_path).trusted() == []


def test_a_label_of_two_publishers_does_not_choose_one(tmp_path: Path) -> None:
    identity = opened(tmp_path)
    for seed in (b"a" * 32, b"b" * 32):
        identity.trust(publisher_text(PublisherKey(seed).public), "same")
    with pytest.raises(UsageError, match=r"found 2: kvpub1.*, kvpub1"):
        identity.untrust("same")


def test_a_namespace_moves_with_its_file(tmp_path: Path) -> None:
    file = tmp_path / "x.kvns"
    wanted = exported(tmp_path / "a", file)
    other = opened(tmp_path / "b")
    assert other.import_namespace(file, keep_old=False, count=none_held) == (wanted, None)
    assert [namespace.id for namespace in other.namespaces()] == [wanted]
    assert other.namespaces() == opened(tmp_path / "a").namespaces() == opened(tmp_path / "b").namespaces()


def test_a_namespace_that_holds_artifacts_is_not_replaced_by_accident(tmp_path: Path) -> None:
    file = tmp_path / "x.kvns"
    exported(tmp_path / "a", file)
    other = opened(tmp_path / "b")
    before = other.namespaces()
    with pytest.raises(StoreError, match="3 artifacts") as raised:
        other.import_namespace(file, keep_old=False, count=some_held)
    assert "--keep-old" in raised.value.hint
    assert other.namespaces() == opened(tmp_path / "b").namespaces() == before


def test_a_kept_namespace_is_still_searched(tmp_path: Path) -> None:
    file = tmp_path / "x.kvns"
    wanted = exported(tmp_path / "a", file)
    other = opened(tmp_path / "b")
    old = other.namespaces()[0]
    assert other.import_namespace(file, keep_old=True, count=some_held) == (wanted, old.id)
    assert [namespace.id for namespace in opened(tmp_path / "b").namespaces()] == [wanted, old.id]


def test_importing_ones_own_namespace_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "x.kvns"
    own = exported(tmp_path, file)
    assert opened(tmp_path).import_namespace(file, keep_old=False, count=some_held) == (own, None)


def test_going_back_to_a_kept_namespace_does_not_list_it_twice(tmp_path: Path) -> None:
    first, second = tmp_path / "1.kvns", tmp_path / "2.kvns"
    identity = opened(tmp_path / "b")
    mine = identity.export_namespace(first)
    theirs = exported(tmp_path / "a", second)
    identity.import_namespace(second, keep_old=True, count=some_held)
    identity.import_namespace(first, keep_old=True, count=some_held)
    assert [namespace.id for namespace in identity.namespaces()] == [mine, theirs]


def test_a_node_is_in_a_limited_number_of_namespaces(tmp_path: Path) -> None:
    identity = opened(tmp_path / "b")
    for number in range(MAX_NAMESPACES):
        exported(tmp_path / str(number), tmp_path / f"{number}.kvns")
    for number in range(MAX_NAMESPACES - 1):
        identity.import_namespace(tmp_path / f"{number}.kvns", keep_old=True, count=some_held)
    assert len(identity.namespaces()) == MAX_NAMESPACES
    with pytest.raises(StoreError, match="at most"):
        identity.import_namespace(tmp_path / f"{MAX_NAMESPACES - 1}.kvns", keep_old=True, count=some_held)


def test_a_file_that_is_no_namespace_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"nonsense")
    identity = opened(tmp_path / "b")
    before = identity.namespaces()
    with pytest.raises(MalformedError):
        identity.import_namespace(tmp_path / "x", keep_old=False, count=none_held)
    assert opened(tmp_path / "b").namespaces() == before


@pytest.mark.parametrize("pattern", ["keys/*", "namespaces/*"])
def test_a_secret_that_others_may_read_is_refused(tmp_path: Path, pattern: str) -> None:
    opened(tmp_path)
    next(tmp_path.glob(pattern)).chmod(0o640)
    with pytest.raises(ConfigError, match="others may read"):
        opened(tmp_path)


def test_a_key_file_with_other_content_is_refused(tmp_path: Path) -> None:
    opened(tmp_path)
    next(tmp_path.glob("keys/*")).write_bytes(b"kvnet publisher key 1\n1234\n")
    with pytest.raises(ConfigError, match="publisher key"):
        opened(tmp_path)


def test_a_damaged_list_of_trusted_publishers_is_refused_not_emptied(tmp_path: Path) -> None:
    opened(tmp_path).trust(publisher_text(STRANGER.public), "x")
    (tmp_path / "trusted-publishers.json").write_text('{"publishers": [{"publisher": "kvpub1', encoding="utf-8")
    with pytest.raises(ConfigError, match="trusted publishers"):
        opened(tmp_path)


def test_secrets_are_not_in_what_python_shows(tmp_path: Path) -> None:
    identity = opened(tmp_path)
    namespace = identity.namespaces()[0]
    shown = repr(identity) + repr(namespace) + repr(identity.signing_key())
    assert namespace.prefix_secret.hex() not in shown
    assert repr(namespace.prefix_secret) not in shown
