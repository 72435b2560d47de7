"""Recorded requests: Mooncake's traces and coding-agent sessions, from plain or gzipped JSON lines.

Two formats are known, and told apart by their first line:

* *Mooncake*: a request a line, with its time in ms and the ids of its blocks of 512 tokens; the last id stands for what
  is left, however short. An id is the same wherever the same beginning of a prompt is.
* *Agent sessions*: a session a line, with its requests; ids of whole blocks of 64 tokens mean something within their
  session alone. What lies behind the last whole block has no id, and is taken to be new every time. Requests of
  subagents, which run other models, are left out.

A trace is read line by line. A line that is too long or does not fit is an error that names the file and the line.
"""

import codecs
import gzip
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from itertools import chain
from pathlib import Path
from typing import IO, Annotated, NamedTuple, TypeVar, cast

import msgspec
from msgspec import Meta, Struct

from kvnet.errors import MalformedError, UsageError

T = TypeVar("T", bound=Struct)

Report = Callable[[int, int], None]
"""Told how much of how much is done."""

EXCERPTS = Path(__file__).parent.parent / "traces"
"""A little of each trace, which comes with the simulator."""

MAX_LINE_BYTES = 1 << 24
"""The longest session recorded takes 4 MB."""
MAX_REQUESTS = 10_000_000
MAX_BLOCKS = 1 << 20
MAX_TOKENS = 1 << 26
MOONCAKE_BLOCK_TOKENS = 512

_Id = Annotated[int, Meta(ge=0, lt=1 << 48)]
_Ids = Annotated[list[_Id], Meta(max_length=MAX_BLOCKS)]
_Run = tuple[_Id, Annotated[int, Meta(ge=1, le=MAX_BLOCKS)]]
_Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
_Time = Annotated[float, Meta(ge=0, le=1e12)]


class TraceRequest(NamedTuple):
    """One recorded request.

    Attributes:
        line: of the file.
        arrival_s: seconds from the beginning of the trace, or of the session.
        session: of a trace that has sessions; empty otherwise.
        n_input, n_output: tokens of prompt and answer.
        n_shared: leading tokens of tools and system prompt, where the trace tells.
        ids: of its blocks.
        whole: whether the ids are of whole blocks alone; the rest of the prompt then has none.
    """

    line: int
    arrival_s: float
    session: str
    n_input: int
    n_output: int
    n_shared: int
    ids: Sequence[int]
    whole: bool


class Trace(NamedTuple):
    """A trace that can be read once.

    Attributes:
        block_tokens: tokens of a block.
        requests: in the file's order, which is that of time only within a session.
    """

    block_tokens: int
    requests: Iterator[TraceRequest]


class _MooncakeLine(Struct, frozen=True):
    timestamp: _Time
    input_length: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    output_length: _Tokens
    hash_ids: _Ids


_MOONCAKE_KEYS = tuple(key.encode() for key in _MooncakeLine.__struct_fields__)


class _Turn(Struct, frozen=True, rename={"at_s": "t", "kind": "type", "n_input": "in", "n_output": "out"}):
    at_s: _Time
    kind: str = "n"
    n_input: _Tokens = 0
    n_output: _Tokens = 0
    hash_ids: _Ids | None = None
    blocks: list[_Run] | None = None


class _SessionLine(Struct, frozen=True, rename={"name": "id"}):
    name: Annotated[str, Meta(min_length=1, max_length=200)]
    block_size: Annotated[int, Meta(ge=1, le=1 << 16)]
    requests: list[_Turn]
    tool_tokens: _Tokens = 0
    system_tokens: _Tokens = 0


class _AnyLine(Struct, frozen=True):
    """Enough of a line to tell the formats apart."""

    timestamp: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    requests: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def silent(done: int, total: int) -> None:
    """Nobody wants to know."""


def find(name: str) -> Path:
    """Where a trace is: a path, or the name of an excerpt that comes with the simulator.

    Raises:
        UsageError: there is no such file.
    """
    path = Path(name)
    if not path.is_file() and (EXCERPTS / name).exists():
        path = EXCERPTS / name
    if not path.is_file():
        known = ", ".join(sorted(each.name for each in EXCERPTS.glob("*.jsonl")))
        raise UsageError(f"expected a trace, found no file {name}", hint=f"Give a path, or one of {known}.")
    return path


def read(path: Path, report: Report = silent) -> Trace:
    """Begin to read a trace.

    Args:
        path: of the trace.
        report: told with each line how many bytes of how many of the file are read.

    Raises:
        MalformedError: the first line fits no format; any other line raises when it is reached.
    """
    lines = _lines(path, report)
    first = next(lines, None)
    if first is None:
        raise MalformedError(f"{path}: expected a trace, found no line")
    head = _decode(path, *first, _AnyLine)
    every = chain([first], lines)
    if head.requests is not msgspec.UNSET:
        block_tokens = _decode(path, *first, _SessionLine).block_size
        return Trace(block_tokens, _sessions(path, every, block_tokens))
    if head.timestamp is not msgspec.UNSET:
        return Trace(MOONCAKE_BLOCK_TOKENS, _mooncake(path, every))
    raise MalformedError(
        f"{path}:1: expected a request with `timestamp` or a session with `requests`, found neither",
        hint="Mooncake's traces and coding-agent sessions can be read.",
    )


def _lines(path: Path, report: Report) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers; those that are empty are left out."""
    number = 0
    try:
        n_bytes = path.stat().st_size
        with path.open("rb") as raw, _text(raw) as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise MalformedError(f"{path}:{number}: expected at most {MAX_LINE_BYTES:,} bytes in a line")
                report(raw.tell(), n_bytes)
                if number == 1:
                    # Editors on Windows begin a file with it.
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield number, line
    except (OSError, EOFError) as error:
        raise MalformedError(f"{path}:{number + 1}: expected text, plain or gzipped, found: {error}") from error


def _text(raw: IO[bytes]) -> AbstractContextManager[IO[bytes]]:
    """The lines of a file, unpacked where it is gzipped."""
    zipped = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    return closing(cast(IO[bytes], gzip.GzipFile(fileobj=raw))) if zipped else nullcontext(raw)


def _decode(path: Path, number: int, line: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError as error:
        raise MalformedError(f"{path}:{number}: {_plain(str(error))}") from error


def _plain(message: str) -> str:
    begins_with_a_word = message[1:2].islower()
    return (message[:1].lower() if begins_with_a_word else message[:1]) + message[1:].replace("`$.", "`")


def _mooncake(path: Path, lines: Iterator[tuple[int, bytes]]) -> Iterator[TraceRequest]:
    for count, (number, line) in enumerate(lines):
        _check_count(path, number, count)
        one = _decode(path, number, line, _MooncakeLine)
        if twice := next((key for key in _MOONCAKE_KEYS if line.count(b'"%b"' % key) > 1), None):
            raise MalformedError(f"{path}:{number}: {twice.decode()}: expected once, found it twice")
        n_blocks = -(-one.input_length // MOONCAKE_BLOCK_TOKENS)
        if len(one.hash_ids) != n_blocks:
            raise MalformedError(
                f"{path}:{number}: hash_ids: expected {n_blocks:,} ids for {one.input_length:,} tokens, "
                f"found {len(one.hash_ids):,}"
            )
        yield TraceRequest(
            number, one.timestamp / 1000, "", one.input_length, one.output_length, 0, one.hash_ids, whole=False
        )


def _sessions(path: Path, lines: Iterator[tuple[int, bytes]], block_tokens: int) -> Iterator[TraceRequest]:
    count = 0
    for number, line in lines:
        session = _decode(path, number, line, _SessionLine)
        if session.block_size != block_tokens:
            raise MalformedError(
                f"{path}:{number}: block_size: expected {block_tokens} as in the first line, found {session.block_size}"
            )
        n_shared = session.tool_tokens + session.system_tokens
        for turn in session.requests:
            if turn.kind == "subagent" or turn.n_input == 0:
                continue
            _check_count(path, number, count)
            count += 1
            ids = _turn_ids(path, number, turn, block_tokens)
            yield TraceRequest(
                number, turn.at_s, session.name, turn.n_input, turn.n_output, min(n_shared, turn.n_input), ids, True
            )


def _turn_ids(path: Path, number: int, turn: _Turn, block_tokens: int) -> Sequence[int]:
    whole = turn.n_input // block_tokens
    ids = turn.hash_ids
    if ids is None:
        runs = turn.blocks or []
        if sum(count for _, count in runs) > MAX_BLOCKS:
            raise MalformedError(f"{path}:{number}: blocks: expected at most {MAX_BLOCKS:,} in a request")
        ids = [first + step for first, count in runs for step in range(count)]
    if len(ids) < whole or len(ids) > whole + 1:
        raise MalformedError(
            f"{path}:{number}: the request at t={turn.at_s:g}: expected {whole:,} ids for {turn.n_input:,} tokens, "
            f"found {len(ids):,}"
        )
    return ids[:whole]


def _check_count(path: Path, number: int, count: int) -> None:
    if count >= MAX_REQUESTS:
        raise MalformedError(f"{path}:{number}: expected at most {MAX_REQUESTS:,} requests")
