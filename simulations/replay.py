"""How much of a trace an infinite store at one node would have saved: the ceiling of any cache without prediction.

Every prompt is kept for ever. Of the next one, the blocks from its beginning that an earlier prompt had are hit, up to
the first that none had. Tokens of a short last block count as those that are there: a prompt that was seen before, is
hit whole.
"""

import time
from pathlib import Path

import numpy as np
from blake3 import blake3
from msgspec import Struct

from simulations.results import DIGEST_CHARACTERS, Array
from simulations.workload.recorded import native_stream
from simulations.workload.requests import RequestStream
from simulations.workload.traces import Report, silent

REPORT_EVERY = 1024
"""Requests between two reports of progress."""


class ReplayResult(Struct, frozen=True, tag="replay", tag_field="type"):
    """What an infinite store would have saved.

    Attributes:
        requests: how many.
        hit_token_fraction: of all prompts' tokens, those hit.
        hit_block_fraction: of all prompts' blocks, those hit.
        seconds: real time.
        digest: over what was hit of each request.
        tokens, blocks: all prompts' together.
        block_tokens: tokens of a block.
    """

    requests: int
    hit_token_fraction: float
    hit_block_fraction: float
    seconds: float
    digest: str
    tokens: int
    blocks: int
    block_tokens: int


def replay_file(path: Path, reading: Report = silent, counting: Report = silent) -> ReplayResult:
    """Replay a trace in its own block size.

    Args:
        path: of the trace.
        reading: told how many bytes of how many are read.
        counting: told now and then how many requests of how many are counted.

    Raises:
        MalformedError: a line that does not fit.
    """
    began_s = time.perf_counter()
    stream = native_stream(path, reading)
    hit_blocks = prefix_hits(stream, counting)
    n_input = stream.n_input
    hit_tokens = np.minimum(hit_blocks * stream.block_tokens, n_input)
    blocks = int((-(-n_input // stream.block_tokens)).sum())
    tokens = int(n_input.sum())
    return ReplayResult(
        requests=len(stream),
        hit_token_fraction=int(hit_tokens.sum()) / tokens if tokens else 0.0,
        hit_block_fraction=int(hit_blocks.sum()) / blocks if blocks else 0.0,
        seconds=time.perf_counter() - began_s,
        digest=_digest(n_input, hit_blocks),
        tokens=tokens,
        blocks=blocks,
        block_tokens=stream.block_tokens,
    )


def prefix_hits(stream: RequestStream, report: Report = silent) -> Array:
    """Of each prompt, how many blocks from its beginning an earlier prompt had."""
    known: list[int] = stream.segments.begin.tolist()
    hits = np.zeros(len(stream), dtype=np.int64)
    for request in stream:
        hit = 0
        for part in stream.path(request):
            if hit == part.begin:
                hit = min(part.end, known[part.segment])
            known[part.segment] = max(known[part.segment], part.end)
        hits[request.number] = hit
        if request.number % REPORT_EVERY == 0:
            report(request.number, len(stream))
    return hits


def _digest(n_input: Array, hit_blocks: Array) -> str:
    hasher = blake3(np.ascontiguousarray(n_input, dtype="<i8").tobytes())
    hasher.update(np.ascontiguousarray(hit_blocks, dtype="<i8").tobytes())
    return hasher.hexdigest()[:DIGEST_CHARACTERS]
