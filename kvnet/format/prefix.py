"""Token ids to chained prefix keys, one per block; where keys are announced; the longest match.

Keys are 256-bit keyed BLAKE3, never truncated, and depend on nothing but their inputs: no built-in ``hash()``, no
process state.
"""

import sys
from array import array
from collections.abc import Sequence
from typing import Final

from kvnet.errors import MalformedError
from kvnet.format.hashes import (
    PREFIX_ROOT_CONTEXT,
    PUBLIC_NAMESPACE_CONTEXT,
    BytesLike,
    FingerprintHash,
    PrefixKey,
    derive_key,
    keyed_hash,
)
from kvnet.format.limits import HASH_SIZE_BYTES, MAX_TOKEN_ID, MAX_TOKENS

BLOCK_TOKENS: Final = 256
"""Tokens of a block, the unit of reuse; equal to the step in which mlx-lm's caches grow."""

NO_PARENT: Final = PrefixKey(bytes(HASH_SIZE_BYTES))
"""The key before the first block."""

PUBLIC_PREFIX_SECRET: Final = derive_key(PUBLIC_NAMESPACE_CONTEXT, b"")
"""The public namespace's prefix secret: a constant that everybody can compute."""

TOKEN_SIZE_BYTES: Final = 4
"""A token id is a u32, little-endian."""


def prefix_root(prefix_secret: bytes, fingerprint_hash: FingerprintHash) -> bytes:
    """The 32-byte key under which all prefix keys of one namespace and one fingerprint are chained.

    Raises:
        ValueError: either is not 32 bytes.
    """
    for what, value in (("prefix secret", prefix_secret), ("fingerprint hash", fingerprint_hash)):
        if len(value) != HASH_SIZE_BYTES:
            raise ValueError(f"{what}: expected {HASH_SIZE_BYTES} bytes, found {len(value)}")
    return derive_key(PREFIX_ROOT_CONTEXT, prefix_secret + fingerprint_hash)


def next_key(root: bytes, parent: PrefixKey, tokens: Sequence[int]) -> PrefixKey:
    """The key of one block, given that of the block before it (:data:`NO_PARENT` for the first).

    Raises:
        ValueError: no tokens, more than a block of them, or a parent that is not 32 bytes.
        MalformedError: a token id that is not a u32.
    """
    if not 0 < len(tokens) <= BLOCK_TOKENS:
        raise ValueError(f"block: expected 1 to {BLOCK_TOKENS} tokens, found {len(tokens)}")
    if len(parent) != HASH_SIZE_BYTES:
        raise ValueError(f"parent key: expected {HASH_SIZE_BYTES} bytes, found {len(parent)}")
    return PrefixKey(keyed_hash(root, parent + tokens_to_bytes(tokens)))


def block_keys(root: bytes, tokens: Sequence[int]) -> list[PrefixKey]:
    """The prefix key at the end of every block; the last block may be short. No tokens have no key.

    Raises:
        MalformedError: a token id that is not a u32.
    """
    data = tokens_to_bytes(tokens)
    step = BLOCK_TOKENS * TOKEN_SIZE_BYTES
    keys: list[PrefixKey] = []
    key = NO_PARENT
    for start in range(0, len(data), step):
        key = PrefixKey(keyed_hash(root, key + data[start : start + step]))
        keys.append(key)
    return keys


def block_count(n_tokens: int) -> int:
    """Blocks that hold ``n_tokens`` tokens, a short last one included."""
    return -(-n_tokens // BLOCK_TOKENS)


def checkpoints(n_tokens: int) -> list[int]:
    """Block counts at which a prefix key is announced, ascending: powers of two, the last full block, the exact end."""
    full = n_tokens // BLOCK_TOKENS
    counts = {1 << exponent for exponent in range(full.bit_length())}
    counts |= {full, block_count(n_tokens)}
    return sorted(counts - {0})


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading tokens two sequences share."""
    low, high = 0, min(len(first), len(second))
    if list(first[:high]) == list(second[:high]):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if list(first[low:middle]) == list(second[low:middle]):
            low = middle
        else:
            high = middle
    return low


def tokens_to_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as u32 little-endian.

    Raises:
        MalformedError: a token id that is not a u32.
    """
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise MalformedError(f"token ids: expected integers from 0 to {MAX_TOKEN_ID}") from error
    if sys.byteorder == "big":  # pragma: no cover - no such machine here
        packed.byteswap()
    return packed.tobytes()


def tokens_from_bytes(data: BytesLike) -> list[int]:
    """Token ids from u32 little-endian.

    Raises:
        MalformedError: a length that is no multiple of 4, or more tokens than an artifact may have.
    """
    if len(data) % TOKEN_SIZE_BYTES or len(data) > MAX_TOKENS * TOKEN_SIZE_BYTES:
        raise MalformedError(
            f"token ids: expected at most {MAX_TOKENS} of {TOKEN_SIZE_BYTES} bytes each, found {len(data)} bytes"
        )
    packed = array("I")
    packed.frombytes(data)
    if sys.byteorder == "big":  # pragma: no cover - no such machine here
        packed.byteswap()
    return packed.tolist()
