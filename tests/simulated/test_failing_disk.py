"""A disk that fails while an artifact is added or fetched: nothing half-made is listed, offered or left behind."""

import errno
import os
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from kvnet.errors import StoreError
from kvnet.format.hashes import BytesLike
from kvnet.network.memory import World
from kvnet.store.disk import DiskStore
from kvnet.store.osfile import OsFiles
from tests.simulated.nodes import Node, identity, start_node

FIRST = [9, *(3 + (i * 7919) % 251 for i in range(599))]
SECOND = [3 + (i * 104_729) % 251 for i in range(1500)]
PROMPT = [*SECOND, 5, 6, 7]


class FaultyFiles(OsFiles):
    """The real operations, of which the how-manieth of one kind fails once it is armed."""

    def __init__(self) -> None:
        self._operation = ""
        self._left = 0
        self._code = 0

    def arm(self, operation: str, number: int, code: int) -> None:
        self._operation, self._left, self._code = operation, number, code

    @property
    def waiting(self) -> bool:
        """Whether the failure is still to come."""
        return self._left > 0

    def disarm(self) -> None:
        self._left = 0

    def _count(self, operation: str) -> None:
        if operation == self._operation and self._left > 0:
            self._left -= 1
            if self._left == 0:
                raise OSError(self._code, os.strerror(self._code))

    def write(self, handle: int, data: BytesLike, offset: int) -> None:
        self._count("write")
        super().write(handle, data, offset)

    def sync(self, handle: int) -> None:
        self._count("sync")
        super().sync(handle)

    def rename(self, source: Path, target: Path) -> None:
        self._count("rename")
        super().rename(source, target)


def files_of(node: Node, directory: Path) -> set[Path]:
    """Every file of a node's store but its index."""
    return {path for path in (directory / node.name).rglob("*") if path.is_file() and "index" not in path.name}


def not_partial(found: set[Path]) -> set[Path]:
    """Without what an interrupted fetch left to be gone on with."""
    return {path for path in found if path.parent.name != "partial"}


def chunks_of(node: Node, artifact: bytes) -> int:
    """How many chunks of an artifact a node's store reads back sound."""
    record = node.store.get(artifact)  # type: ignore[arg-type]
    assert record is not None
    assert record.complete
    return sum(len(node.store.read_chunk(entry.hash)) > 0 for entry in record.entries)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["no space", "input/output error"])
@pytest.mark.parametrize("operation", ["write", "sync", "rename"])
async def test_an_add_that_the_disk_fails_leaves_no_entry_no_advert_and_no_file_and_the_prompt_is_answered(
    autojump_clock: MockClock,
    world: World,
    nursery: trio.Nursery,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    operation: str,
    code: int,
) -> None:
    files = FaultyFiles()
    a = await start_node(world, nursery, tmp_path, "a", files=files)
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]))
    await b.meet(a)
    first = await a.add(FIRST)
    cold = await a.generate(PROMPT, reuse=False)
    before, announced = files_of(a, tmp_path), a.exchange.announcing().keys
    number = 0
    while True:
        number += 1
        caplog.clear()
        files.arm(operation, number, code)
        if await _adds(a, files):
            break
        assert len(caplog.records) <= 1
        assert [record.hash for record in a.store.artifacts()] == [first.record.hash]
        assert files_of(a, tmp_path) == before
        assert a.exchange.announcing().keys == announced
        answer = await a.generate(PROMPT)
        assert (answer.reused_tokens, answer.text) == (0, cold.text)
        assert (await b.generate(PROMPT)).reused_tokens == 0
        assert chunks_of(a, first.record.hash) == len(first.record.entries)
    # The number before was the last of its kind, so every one of them has failed once; now nothing did.
    assert number > 1
    assert (await b.generate(PROMPT)).reused_tokens == len(SECOND)


async def _adds(node: Node, files: FaultyFiles) -> bool:
    """Whether an add got through before the armed failure came."""
    try:
        await node.add(SECOND)
    except StoreError:
        assert not files.waiting
        return False
    assert files.waiting
    files.disarm()
    return True


@pytest.mark.parametrize("operation", ["write", "sync", "rename"])
async def test_a_fetch_that_the_disk_fails_ends_as_a_miss_and_can_be_repeated(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path, operation: str
) -> None:
    files = FaultyFiles()
    a = await start_node(world, nursery, tmp_path, "a")
    b = await start_node(world, nursery, tmp_path, "b", who=identity("b", trusts=["a"]), files=files)
    added = await a.add(SECOND)
    await b.meet(a)
    before = files_of(b, tmp_path)
    files.arm(operation, 1, errno.ENOSPC)
    cold = await b.generate(PROMPT, reuse=False)
    answer = await b.generate(PROMPT)
    assert not files.waiting
    assert (answer.reused_tokens, answer.text) == (0, cold.text)
    assert not_partial(files_of(b, tmp_path)) == before
    assert not b.store.artifacts()
    files.arm(operation, 1, errno.EIO)
    with pytest.raises(StoreError):
        await b.fetch(added.record.hash)
    assert not_partial(files_of(b, tmp_path)) == before
    assert (await b.fetch(added.record.hash)).record.complete
    assert files_of(b, tmp_path) == not_partial(files_of(b, tmp_path))


async def test_a_use_that_cannot_be_noted_is_a_use_all_the_same(
    autojump_clock: MockClock, world: World, nursery: trio.Nursery, tmp_path: Path
) -> None:
    a = await start_node(world, nursery, tmp_path, "a")
    tokens = list(range(3, 253)) * 2
    await a.add(tokens)
    assert isinstance(a.store, DiskStore)
    a.store._parts.index._db.execute("PRAGMA query_only = ON")
    assert (await a.generate([*tokens, 9])).reused_tokens == len(tokens)
    a.store._parts.index._db.execute("PRAGMA query_only = OFF")
