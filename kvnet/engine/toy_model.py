"""The toy's model: what it makes of text, of tokens and of K/V, and the tiles that it writes and reads.

K/V rows are a function of the token prefix, and the text is one of *all K/V rows*: whoever restores one wrong byte gets
another text.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from kvnet.engine.kv_state import ExportRequest, RestorePlan, WrittenChunk
from kvnet.engine.prompts import JsonObject
from kvnet.engine.tiles import decode_tile, encode_tile
from kvnet.errors import CompatibilityError, IntegrityError
from kvnet.format.chunks import ChunkKind, ChunkPlan, ChunkSpec, layer_groups
from kvnet.format.fingerprint import Fingerprint, LayerLayout
from kvnet.format.hashes import blake3_hash
from kvnet.format.manifest import Manifest
from kvnet.format.tensor import DType, LayerKind

N_LAYERS, HEADS, DIM = 2, 2, 8
"""Shape of the toy's K/V: 256 bytes a token."""

PREFILL_STEP = 512
"""Tokens between two progress events, at absolute multiples, as the real engine's on a CPU."""

BOS, EOS, TURN, FIRST_BYTE = 0, 1, 2, 3
"""Token ids: start of text, end of a message, start of a message, and the byte 0 of UTF-8."""

VOCABULARY = FIRST_BYTE + 256
"""Token ids there are."""

Rows = NDArray[np.float32]
"""(tokens, layers, K or V, heads, dim)."""

ROW_SHAPE = (N_LAYERS, 2, HEADS, DIM)
"""Of one token: layer, K or V, head, element."""

NO_ROWS: Rows = np.zeros((0, *ROW_SHAPE), np.float32)


def toy_fingerprint(name: str) -> Fingerprint:
    """The fingerprint of the toy model of that name."""
    kind = LayerKind(cache="kv", heads=HEADS, k_dim=DIM, v_dim=DIM, dtype=DType.FLOAT32)
    return Fingerprint(
        weights=blake3_hash(b"toy weights " + name.encode()),
        config=blake3_hash(b"toy config"),
        adapters=(),
        architecture="toy",
        layers=LayerLayout(kinds=(kind,), order=bytes(N_LAYERS)),
    )


def text_tokens(text: str) -> list[int]:
    """A token a byte of UTF-8."""
    return [FIRST_BYTE + byte for byte in text.encode()]


def tokens_text(tokens: Sequence[int]) -> str:
    """The reverse of `text_tokens`; special tokens are left out."""
    return bytes(token - FIRST_BYTE for token in tokens if token >= FIRST_BYTE).decode("utf-8", "replace")


def rendered(messages: Sequence[JsonObject], inputs: JsonObject, *, answer: bool) -> list[int]:
    """Messages under the toy's chat template, which prints every input at the head; ready for the `answer`."""
    tokens = [BOS, *text_tokens("".join(f"{key}={inputs[key]}\n" for key in sorted(inputs)))]
    for message in messages:
        tokens += [TURN, *text_tokens(f"{message['role']}\n{message['content']}"), EOS]
    return [*tokens, TURN, *text_tokens("assistant\n")] if answer else tokens


def step_begins(start: int, end: int) -> list[int]:
    """Where steps from ``start`` to ``end`` begin."""
    multiples = range((start // PREFILL_STEP + 1) * PREFILL_STEP, end, PREFILL_STEP)
    return [start, *multiples] if end > start else []


def extended(rows: Rows, tokens: Sequence[int]) -> Rows:
    """Rows of all tokens: given ones first, each further one from the row before it and its token."""
    out = np.zeros((len(tokens), *ROW_SHAPE), np.float32)
    out[: len(rows)] = rows
    before = rows[-1].tobytes() if len(rows) else b""
    for i in range(len(rows), len(tokens)):
        digest = blake3(before + int(tokens[i]).to_bytes(4, "little")).digest(length=out[i].size)
        out[i] = np.frombuffer(digest, np.uint8).reshape(out[i].shape)
        before = out[i].tobytes()
    return out


def answer_tokens(rows: Rows, max_tokens: int) -> Iterator[int]:
    """Tokens that follow from all rows; the first is never the end."""
    state = blake3(rows.tobytes())
    for n in range(max_tokens):
        token = next_token(state.digest())
        token = FIRST_BYTE + ord("a") if token == EOS and not n else token
        state.update(token.to_bytes(4, "little"))
        yield token


def next_token(digest: bytes) -> int:
    """The token that a state's digest stands for."""
    # One in 32 ends the text; the others are letters and spaces.
    choice = digest[0] % 32
    return EOS if choice == 31 else FIRST_BYTE + b"abcdefghijklmnopqrstuvwxyz     "[choice]


def write_tiles(
    request: ExportRequest, layers: LayerLayout, rows: Rows, earlier: Sequence[WrittenChunk] = ()
) -> tuple[WrittenChunk, ...]:
    """Write the tiles of every block that is whole in these rows, as an export asks for them.

    Args:
        request: the export.
        layers: the model's layer layout.
        rows: of the first tokens, or of all.
        earlier: what was written of them before.

    Returns:
        What was written now.
    """
    n_tokens = len(request.tokens)
    plan = ChunkPlan(
        n_tokens=n_tokens, layers=layers, groups=layer_groups(layers), context_size_bytes=request.context_size_bytes
    )
    written: list[WrittenChunk] = []
    offset = earlier[-1].offset + earlier[-1].length_bytes if earlier else request.pack_offset
    first_block = plan[earlier[-1].index].block + 1 if earlier else request.first_block
    whole_blocks = len(rows) // 256 if len(rows) < n_tokens else -(-n_tokens // 256)
    handle = os.open(request.pack_path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for block in range(first_block, whole_blocks):
            for index in plan.tiles_of_block(block):
                stored = encode_tile(request.codec, layers, plan[index], _raw(plan[index], rows))
                os.pwrite(handle, stored, offset)
                written.append(WrittenChunk(index, offset, len(stored), blake3_hash(stored)))
                offset += len(stored)
    finally:
        os.close(handle)
    return tuple(written)


def _raw(spec: ChunkSpec, rows: Rows) -> bytes:
    tokens = slice(spec.first_token, spec.first_token + spec.n_tokens)
    layers = range(spec.first_layer, spec.first_layer + spec.n_layers)
    parts = [rows[tokens, layer, which].transpose(1, 0, 2) for layer in layers for which in (0, 1)]
    return b"".join(np.ascontiguousarray(part, dtype="<f4").tobytes() for part in parts)


def _put(spec: ChunkSpec, raw: bytes, rows: Rows) -> None:
    values = np.frombuffer(raw, "<f4").reshape(spec.n_layers, 2, HEADS, spec.n_tokens, DIM)
    tokens = slice(spec.first_token, spec.first_token + spec.n_tokens)
    layers = slice(spec.first_layer, spec.first_layer + spec.n_layers)
    rows[tokens, layers] = values.transpose(3, 0, 1, 2, 4)


def read_rows(plan: RestorePlan, manifest: Manifest, n_tokens: int) -> Rows:
    """The first `n_tokens` rows of an artifact, from where the plan says that its tiles lie.

    Raises:
        CompatibilityError: the plan lacks a tile.
        IntegrityError: a tile does not match its hash.
    """
    rows = np.zeros((manifest.n_tokens, *ROW_SHAPE), np.float32)
    layout = manifest.plan()
    held = {chunk.index: chunk for chunk in plan.chunks}
    for index in layout.needed_for(n_tokens):
        spec = layout[index]
        if spec.kind != ChunkKind.TILE:
            continue
        if index not in held:
            raise CompatibilityError(f"restore needs tile {index}; the plan does not say where it lies")
        chunk = held[index]
        stored = _read(chunk.path, chunk.offset, chunk.length_bytes)
        if blake3_hash(stored) != chunk.hash:
            raise IntegrityError(f"chunk {index} does not match its hash")
        _put(spec, decode_tile(manifest.codec, manifest.fingerprint.layers, spec, stored), rows)
    return rows[:n_tokens]


def _read(path: Path, offset: int, length_bytes: int) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(handle, length_bytes, offset)
    finally:
        os.close(handle)
