import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnet.errors import MalformedError
from kvnet.format import prefix
from kvnet.format.hashes import FingerprintHash, PrefixKey, keyed_hash
from kvnet.format.limits import MAX_TOKENS
from kvnet.format.prefix import BLOCK_TOKENS, NO_PARENT

ROOT = prefix.prefix_root(bytes(32), FingerprintHash(bytes(32)))
TOKEN_LISTS = st.lists(st.integers(0, (1 << 32) - 1), max_size=600)


@given(TOKEN_LISTS)
def test_tokens_survive_their_bytes(tokens: list[int]) -> None:
    data = prefix.tokens_to_bytes(tokens)
    assert len(data) == 4 * len(tokens)
    assert prefix.tokens_from_bytes(data) == tokens
    assert prefix.tokens_from_bytes(memoryview(data)) == tokens


def test_token_ids_are_little_endian() -> None:
    assert prefix.tokens_to_bytes([1, 0x01020304]).hex() == "0100000004030201"


@pytest.mark.parametrize("tokens", [[-1], [1 << 32], [1.5], ["1"], [None]])
def test_what_is_no_token_id_is_refused(tokens: list) -> None:
    with pytest.raises(MalformedError, match="token ids"):
        prefix.tokens_to_bytes(tokens)


@pytest.mark.parametrize("data", [b"\0", b"\0" * 5, bytes(MAX_TOKENS * 4 + 4)])
def test_bytes_that_are_no_token_ids_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedError, match="token ids"):
        prefix.tokens_from_bytes(data)


@given(TOKEN_LISTS)
def test_keys_chain_block_by_block(tokens: list[int]) -> None:
    keys = prefix.block_keys(ROOT, tokens)
    assert len(keys) == prefix.block_count(len(tokens)) == -(-len(tokens) // BLOCK_TOKENS)
    parent = NO_PARENT
    for number, key in enumerate(keys):
        parent = prefix.next_key(ROOT, parent, tokens[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS])
        assert key == parent


@given(TOKEN_LISTS.filter(bool), st.data())
def test_a_changed_token_changes_its_key_and_all_later_ones_only(tokens: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
    before, after = prefix.block_keys(ROOT, tokens), prefix.block_keys(ROOT, changed)
    block = at // BLOCK_TOKENS
    assert before[:block] == after[:block]
    assert all(one != other for one, other in zip(before[block:], after[block:], strict=True))


def test_full_block_keys_do_not_depend_on_what_follows() -> None:
    tokens = list(range(700))
    assert prefix.block_keys(ROOT, tokens)[:2] == prefix.block_keys(ROOT, tokens[:512])
    # The short block's key is its own: 600 tokens do not stand for 700.
    assert prefix.block_keys(ROOT, tokens)[2] != prefix.block_keys(ROOT, tokens[:600])[2]


def test_no_tokens_one_zero_token_and_a_missing_parent_are_three_things() -> None:
    zero_alone = prefix.block_keys(ROOT, [0])
    assert prefix.block_keys(ROOT, []) == []
    assert len(zero_alone) == 1
    assert zero_alone[0] not in (NO_PARENT, keyed_hash(ROOT, b""), keyed_hash(ROOT, NO_PARENT))
    assert zero_alone != prefix.block_keys(ROOT, [0, 0])
    for parent in (PrefixKey(b""), PrefixKey(bytes(31)), PrefixKey(bytes(33))):
        with pytest.raises(ValueError, match="parent key"):
            prefix.next_key(ROOT, parent, [0])
    for tokens in ([], [0] * (BLOCK_TOKENS + 1)):
        with pytest.raises(ValueError, match="block"):
            prefix.next_key(ROOT, NO_PARENT, tokens)


def test_roots_differ_by_namespace_and_by_fingerprint() -> None:
    secrets = [bytes(32), bytes(31) + b"\1", prefix.PUBLIC_PREFIX_SECRET]
    fingerprints = [FingerprintHash(bytes(32)), FingerprintHash(b"\1" + bytes(31))]
    assert len({prefix.prefix_root(secret, one) for secret in secrets for one in fingerprints}) == 6
    for secret, one in ((bytes(31), bytes(32)), (bytes(32), bytes(33))):
        with pytest.raises(ValueError, match="expected 32 bytes"):
            prefix.prefix_root(secret, FingerprintHash(one))


KEYS_PROGRAM = """
from kvnet.format.hashes import FingerprintHash
from kvnet.format.prefix import block_keys, prefix_root
print(*(key.hex() for key in block_keys(prefix_root(bytes(range(32)), FingerprintHash(bytes(32))), list(range(600)))))
"""


def test_four_processes_with_different_hash_seeds_derive_the_same_keys() -> None:
    found = set()
    for seed in ("0", "1", "random", None):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        if seed is not None:
            environment["PYTHONHASHSEED"] = seed
        done = subprocess.run(
            [sys.executable, "-c", KEYS_PROGRAM], env=environment, capture_output=True, text=True, check=True
        )
        found.add(done.stdout)
    assert len(found) == 1
    keys = found.pop().split()
    assert len(keys) == 3
    assert all(len(key) == 64 for key in keys)


@pytest.mark.parametrize(
    ("n_tokens", "expected"),
    [(1, [1]), (255, [1]), (256, [1]), (257, [1, 2]), (512, [1, 2]), (768, [1, 2, 3]), (1205, [1, 2, 4, 5])],
)
def test_checkpoints_are_powers_of_two_the_last_full_block_and_the_end(n_tokens: int, expected: list[int]) -> None:
    assert prefix.checkpoints(n_tokens) == expected


def test_a_long_prefix_has_few_checkpoints_and_no_tokens_have_none() -> None:
    assert prefix.checkpoints(0) == []
    assert len(prefix.checkpoints(1_000_000)) <= 14


@given(TOKEN_LISTS, TOKEN_LISTS, TOKEN_LISTS)
def test_the_common_prefix_is_what_both_begin_with(shared: list[int], one: list[int], other: list[int]) -> None:
    first, second = shared + one, tuple(shared + other)
    length = prefix.common_prefix(first, second)
    assert length >= len(shared)
    assert list(first[:length]) == list(second[:length])
    assert length == min(len(first), len(second)) or first[length] != second[length]
