"""A process that is killed in the middle of an add: what it had noted is there when the store opens next."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import trio

from kvnet.engine.toy import ToyCosts, ToyEngine
from kvnet.engine.toy_model import PREFILL_STEP
from kvnet.exchange.lane import InlineLane
from kvnet.exchange.publisher import Added, AddRequest, Publisher
from kvnet.exchange.reuse import find_local
from kvnet.exchange.unfinished import NOTE_TOKENS, EarlyEnd
from kvnet.format.codecs import Codec
from kvnet.format.hashes import PrefixKey
from kvnet.format.manifest import Manifest
from kvnet.format.prefix import BLOCK_TOKENS, block_keys
from kvnet.store.beginnings import NOTE_SUFFIX
from kvnet.store.disk import DiskStore
from tests.simulated.nodes import MINE, identity

TOKENS = [1, *(3 + n % 251 for n in range(3 * NOTE_TOKENS + 100))]
CONTEXT = b'{"messages":[]}'

VICTIM = """
import sys
from pathlib import Path
from tests.simulated.test_killed_add import killed_after
killed_after(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
print("survived", flush=True)
"""


def keys_of(manifest: Manifest, tokens: list[int]) -> list[PrefixKey]:
    return block_keys(MINE.prefix_root(manifest.fingerprint.hash), tokens)


def opened(directory: Path) -> DiskStore:
    return DiskStore.open(directory / "store", quota_bytes=1 << 30, min_free_bytes=0, keys_of=keys_of)


def engine_of(directory: Path) -> ToyEngine:
    return ToyEngine(directory / "toy-model", ToyCosts(), 1 << 20, 1 << 40)


async def add(store: DiskStore, directory: Path, codec: Codec, killed_at: int = sys.maxsize) -> Added:
    """Add the text; the process dies once so many tokens are computed."""

    async def progress(done: int, _total: int) -> None:
        if done >= killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    request = AddRequest(TOKENS, CONTEXT, codec, pinned=True, created_s=1_800_000_000)
    early = EarlyEnd(lambda _: None, lambda _: None, lambda _: None)
    publisher = Publisher(store, InlineLane(), identity("a"))
    return await publisher.add(engine_of(directory), request, progress, early)


def killed_after(directory: Path, n_tokens: int, codec: str) -> None:
    trio.run(partial(add, opened(directory), directory, Codec(codec), n_tokens))


def kill(repository_root: Path, directory: Path, n_tokens: int, codec: Codec = Codec.RAW) -> None:
    """Runs an add in another process, which dies of it."""
    found = subprocess.run(
        [sys.executable, "-c", VICTIM, str(directory), str(n_tokens), codec.value],
        cwd=repository_root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == -signal.SIGKILL, found.stderr
    assert "survived" not in found.stdout


def check(store: DiskStore) -> None:
    """Everything listed is there and matches its hash, and nothing else takes room."""
    for record in store.artifacts():
        found = store.verify(record.hash)
        assert (found.bad, found.missing) == ((), ())
        assert record.complete
    assert list(store._paths.temporary.iterdir()) == []


@pytest.mark.parametrize("codec", list(Codec))
async def test_an_add_that_was_killed_is_gone_on_with_and_ends_as_if_it_had_not_been(
    repository_root: Path, tmp_path: Path, codec: Codec
) -> None:
    kill(repository_root, tmp_path, 2 * NOTE_TOKENS + BLOCK_TOKENS, codec)
    store = opened(tmp_path)
    (kept,) = store.artifacts()
    assert (kept.manifest.n_tokens, kept.manifest.codec, kept.pinned) == (2 * NOTE_TOKENS, codec, False)
    assert store.context_of(kept.hash) is None
    check(store)

    added = await add(store, tmp_path, codec)
    assert (added.reused_tokens, added.superseded) == (2 * NOTE_TOKENS, kept.hash)
    assert [record.hash for record in store.artifacts()] == [added.record.hash]
    (tmp_path / "straight").mkdir()
    straight = opened(tmp_path / "straight")
    at_once = (await add(straight, tmp_path, codec)).record
    # What is computed after lossy state is other state.
    n_tiles = 2 * NOTE_TOKENS // BLOCK_TOKENS
    n_equal = len(at_once.entries) if codec.lossless else at_once.manifest.plan().first_tile + n_tiles
    assert at_once.entries[:n_equal] == added.record.entries[:n_equal]
    check(store)
    straight.close()
    store.close()


async def test_a_prompt_that_begins_with_what_a_killed_add_computed_finds_it(
    repository_root: Path, tmp_path: Path
) -> None:
    kill(repository_root, tmp_path, NOTE_TOKENS)
    store, who = opened(tmp_path), identity("a")
    prompt = [*TOKENS[: NOTE_TOKENS - 100], 7, 7, 7]
    found = find_local(store, engine_of(tmp_path).info, who, prompt, limit_tokens=len(prompt) - 1)
    assert found.hit is not None
    assert found.hit.n_tokens == NOTE_TOKENS - 100
    store.close()


async def test_an_add_that_is_killed_again_leaves_the_longer_beginning_alone(
    repository_root: Path, tmp_path: Path
) -> None:
    kill(repository_root, tmp_path, NOTE_TOKENS)
    kill(repository_root, tmp_path, 2 * NOTE_TOKENS)
    store = opened(tmp_path)
    (kept,) = store.artifacts()
    assert kept.manifest.n_tokens == 2 * NOTE_TOKENS
    check(store)
    store.pin(kept.hash)
    store.close()
    kill(repository_root, tmp_path, 3 * NOTE_TOKENS)
    store = opened(tmp_path)
    assert {record.manifest.n_tokens for record in store.artifacts()} == {2 * NOTE_TOKENS, 3 * NOTE_TOKENS}
    check(store)
    store.close()


async def test_an_add_that_was_killed_before_the_first_note_leaves_nothing(
    repository_root: Path, tmp_path: Path
) -> None:
    kill(repository_root, tmp_path, NOTE_TOKENS - PREFILL_STEP)
    store = opened(tmp_path)
    assert store.artifacts() == []
    check(store)
    store.close()


async def test_bytes_that_are_not_those_the_engine_had_told_of_are_not_kept(
    repository_root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kill(repository_root, tmp_path, 2 * NOTE_TOKENS)
    (note,) = (tmp_path / "store" / "tmp").glob(f"*{NOTE_SUFFIX}")
    pack = note.with_suffix(".part")
    data = bytearray(pack.read_bytes())
    data[len(data) // 4] ^= 1
    pack.write_bytes(data)
    store = opened(tmp_path)
    assert store.artifacts() == []
    assert "does not match its hash" in caplog.text
    check(store)
    assert (await add(store, tmp_path, Codec.RAW)).reused_tokens == 0
    store.close()


async def test_an_add_that_ends_by_itself_leaves_no_note(tmp_path: Path) -> None:
    store = opened(tmp_path)
    await add(store, tmp_path, Codec.RAW)
    check(store)
    store.close()
