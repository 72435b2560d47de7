"""Namespaces on disk: swarms, what is known of them, and former secrets."""

import stat
from pathlib import Path

import pytest

from kvnet.errors import ConfigError, StoreError, UsageError
from kvnet.trust.namespace import PUBLIC, Namespace, decode_namespace_file
from kvnet_node.namespace_files import FORMER_LIFE_S, MAX_FORMER, Known
from kvnet_node.paths import keep_private
from kvnet_node.swarms import MAX_NAMESPACES, SwarmFiles

NEW = b"n" * 32
TEAM = Namespace("team", b"t" * 32, b"l" * 32)


class Clock:
    """A time that a test sets."""

    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


def opened(directory: Path, clock: Clock | None = None, *, public: bool = False) -> SwarmFiles:
    files = SwarmFiles(directory, public=public, now=clock or Clock())
    files.load()
    return files


def test_a_swarm_lasts_and_nobody_else_reads_its_files(tmp_path: Path) -> None:
    files = opened(tmp_path / "n")
    made = files.make_swarm("team")
    files.know(made.id, Known(founder=b"f" * 32, addresses=("/ip4/192.0.2.1/tcp/1/p2p/x",)))
    again = opened(tmp_path / "n")
    assert again.named("team") == made
    assert again.all() == (again.mine, made)
    assert again.known(made.id).founder == b"f" * 32
    assert again.addresses() == ("/ip4/192.0.2.1/tcp/1/p2p/x",)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in (tmp_path / "n").iterdir())


@pytest.mark.parametrize("kept_bytes", [0, 40, -1], ids=["empty", "cut short", "changed"])
def test_a_damaged_file_of_secrets_is_named_and_moved_away_the_rest_is_here(tmp_path: Path, kept_bytes: int) -> None:
    made = opened(tmp_path).make_swarm("team")
    file = tmp_path / "swarm-team.kvns"
    whole = file.read_bytes()
    file.write_bytes(whole[:kept_bytes] + (bytes([whole[-1] ^ 1]) if kept_bytes < 0 else b""))
    with pytest.raises(ConfigError, match=r"swarm-team\.kvns") as refused:
        opened(tmp_path)
    assert "move it away" in refused.value.hint
    file.rename(tmp_path / "away")
    assert made not in opened(tmp_path).all()


def test_only_namespaces_with_a_founder_have_members_and_mine_is_of_devices(tmp_path: Path) -> None:
    files = opened(tmp_path)
    team = files.make_swarm("team")
    assert files.scopes() == ()
    for namespace in (files.mine, team):
        files.know(namespace.id, Known(founder=b"f" * 32))
    assert [(scope.namespace.name, scope.devices) for scope in files.scopes()] == [("mine", True), ("team", False)]


@pytest.mark.parametrize("name", ["mine", "public", "kept", "former", "", "Team", "a/b", "team"])
def test_names_that_are_taken_or_mean_something_else_are_refused(tmp_path: Path, name: str) -> None:
    files = opened(tmp_path)
    files.make_swarm("team")
    with pytest.raises(UsageError):
        files.make_swarm(name)


def test_there_is_no_room_for_a_ninth_namespace(tmp_path: Path) -> None:
    files = opened(tmp_path, public=True)
    for number in range(MAX_NAMESPACES - 2):
        files.make_swarm(f"team{number}")
    assert files.all()[-1] == PUBLIC
    assert len(files.all()) == MAX_NAMESPACES
    with pytest.raises(StoreError, match="at most 8"):
        files.make_swarm("one-more")


def test_a_replaced_secret_is_kept_among_the_former_for_its_time(tmp_path: Path) -> None:
    clock = Clock()
    files = opened(tmp_path, clock)
    team = files.join_swarm(TEAM, Known())
    files.rekey(team.id, NEW)
    files.rekey(team.id, NEW)
    clock.now_s += 1
    files.rekey(team.id, b"m" * 32)
    assert files.named("team") == Namespace("team", TEAM.prefix_secret, b"m" * 32)
    assert [each.lookup_secret for each in files.former()] == [NEW, TEAM.lookup_secret]
    assert all(each.former and each.id == team.id for each in files.former())
    clock.now_s += FORMER_LIFE_S - 0.5
    assert [each.lookup_secret for each in opened(tmp_path, clock).former()] == [NEW]
    clock.now_s += 2
    assert opened(tmp_path, clock).former() == ()


def test_a_clock_that_is_years_ahead_for_a_day_deletes_no_former_secret(tmp_path: Path) -> None:
    clock = Clock()
    files = opened(tmp_path, clock)
    team = files.join_swarm(TEAM, Known())
    files.rekey(team.id, NEW)
    before_s, clock.now_s = clock.now_s, clock.now_s + 10 * 365 * 86400
    ahead = opened(tmp_path, clock)
    assert ahead.former() == ()
    ahead.rekey(team.id, b"m" * 32)
    clock.now_s = before_s
    assert [each.lookup_secret for each in opened(tmp_path, clock).former()] == [NEW, TEAM.lookup_secret]


def test_no_more_former_secrets_are_kept_than_there_is_room_for(tmp_path: Path) -> None:
    clock = Clock()
    files = opened(tmp_path, clock)
    team = files.join_swarm(TEAM, Known())
    for number in range(1, MAX_FORMER + 4):
        clock.now_s += FORMER_LIFE_S + 1
        files.rekey(team.id, bytes([number]) * 32)
    assert len(list(tmp_path.glob("former-*"))) == MAX_FORMER
    # One is not over its time: that which was replaced last.
    assert [each.lookup_secret for each in files.former()] == [bytes([MAX_FORMER + 2]) * 32]


def test_leaving_forgets_the_secrets_the_former_ones_and_the_members(tmp_path: Path) -> None:
    files = opened(tmp_path)
    team = files.join_swarm(TEAM, Known(founder=b"f" * 32))
    files.rekey(team.id, NEW)
    files.leave("team")
    assert (files.named("team"), files.former(), files.known(team.id)) == (None, (), Known())
    left = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert TEAM.prefix_secret not in left
    for name in ("mine", "team"):
        with pytest.raises(UsageError):
            files.leave(name)


def test_joining_again_takes_the_secret_of_now(tmp_path: Path) -> None:
    files = opened(tmp_path)
    files.join_swarm(TEAM, Known())
    files.join_swarm(Namespace("whatever", TEAM.prefix_secret, NEW), Known(founder=b"f" * 32))
    assert files.named("team") == Namespace("team", TEAM.prefix_secret, NEW)
    assert len(files.swarms()) == 1


def test_mine_is_replaced_and_kept_when_something_is_in_it(tmp_path: Path) -> None:
    files = opened(tmp_path)
    old = files.mine
    with pytest.raises(StoreError, match="holds 2 artifacts"):
        files.join_mine(TEAM, Known(), keep_old=False, count=lambda _: 2)
    assert files.mine == old
    assert files.join_mine(TEAM, Known(founder=b"f" * 32), keep_old=True, count=lambda _: 2) == old.id
    assert files.mine == Namespace("mine", TEAM.prefix_secret, TEAM.lookup_secret)
    assert [each.id for each in files.all()] == [TEAM.id, old.id]
    assert decode_namespace_file((tmp_path / "mine.kvns").read_bytes()).name == "mine"


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 100_000, b'{"format": 1, "namespaces": {"a": 1}}'])
def test_a_damaged_file_of_what_is_known_is_named(tmp_path: Path, content: bytes) -> None:
    opened(tmp_path)
    (tmp_path / "scopes.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"scopes\.json"):
        opened(tmp_path)


def test_a_rekeying_that_fails_half_way_again_and_again_pushes_no_former_secret_out(tmp_path: Path) -> None:
    clock = Clock()
    files = opened(tmp_path / "n", clock)
    team = files.make_swarm("team")
    files.rekey(team.id, NEW)
    path = tmp_path / "n" / "swarm-team.kvns"
    data = path.read_bytes()
    path.unlink()
    path.mkdir()
    (path / "in the way").write_bytes(b"")
    for _ in range(20):
        clock.now_s += 30
        with pytest.raises(StoreError, match="cannot be"):
            files.rekey(team.id, b"m" * 32)
    (path / "in the way").unlink()
    path.rmdir()
    path.write_bytes(data)
    path.chmod(0o600)
    again = opened(tmp_path / "n", clock)
    again.rekey(team.id, b"m" * 32)
    assert [former.lookup_secret for former in again.former()] == [NEW, team.lookup_secret]


class KilledError(Exception):
    """Where a test ends a write."""


def kill_at(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """End the process, as it were, right before a file of this name is written."""

    def keep(path: Path, data: bytes) -> None:
        if path.name == name:
            raise KilledError
        keep_private(path, data)

    monkeypatch.setattr("kvnet_node.namespace_files.keep_private", keep)


@pytest.mark.parametrize(("swarm", "file"), [("team", "swarm-team.kvns"), ("mine", "mine.kvns")])
def test_whoever_was_killed_while_it_joined_founds_nothing_of_the_swarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swarm: str, file: str
) -> None:
    files, known = opened(tmp_path), Known(founder=b"f" * 32, inviter=b"i" * 32)
    before = files.all()
    with monkeypatch.context() as patched:
        kill_at(patched, file)
        with pytest.raises(KilledError):
            if swarm == "mine":
                files.join_mine(TEAM, known, keep_old=False, count=lambda _: 0)
            else:
                files.join_swarm(TEAM, known)
    again = opened(tmp_path)
    assert (again.all(), again.scopes()) == (before, ())
    again.drop_unknown()
    assert opened(tmp_path).known(TEAM.id) == Known()
    opened(tmp_path).join_swarm(TEAM, known)
    assert opened(tmp_path).known(TEAM.id) == known


def test_whoever_was_killed_while_it_left_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = opened(tmp_path)
    files.join_swarm(TEAM, Known(founder=b"f" * 32))
    with monkeypatch.context() as patched:
        kill_at(patched, "scopes.json")
        with pytest.raises(KilledError):
            files.leave("team")
    again = opened(tmp_path)
    again.drop_unknown()
    assert again.named("team") is None
    assert opened(tmp_path).known(TEAM.id) == Known()
