"""``kvnet bench ttft``: time to first token of one question over a document, each way beside the others.

Two nodes on loopback, paired and used by the commands a person would type, and mlx-lm alone. Every round runs every row
once, so that whatever else the machine does meets all of them alike; medians count.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvnet.errors import EngineError
from kvnet_node.asking import ask, decided
from kvnet_node.demonstration import (
    ANSWER_TOKENS,
    DEMO_QUESTION,
    Say,
    Side,
    Timing,
    chat_about,
    cut,
    demo_document,
    pair,
    two_sides,
)

FAST_LENGTHS = (256, 1024)
SLOW_LENGTHS = (256,)
"""Where prefill is slow, a length more takes minutes."""
ROUNDS = 3
PLAIN_TIMEOUT_S = 600.0
KEEP_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Bench:
    """What rows measure with.

    Attributes:
        holder, asker: the two nodes; ``asker`` is the one that is timed.
        model: folder of the model.
        document: the shared prefix, as a file.
        chat: the question about it, as a file.
        prefix_tokens: tokens of the artifact, once ``holder`` has added it.
        artifact: its hash text, "" while nobody has it.
        asked: requests that were sent to the asker's endpoint.
    """

    holder: Side
    asker: Side
    model: Path
    document: Path
    chat: Path
    prefix_tokens: int = 0
    artifact: str = ""
    asked: int = 0

    def share(self) -> None:
        """Have the holder add the document."""
        added = self.holder.run("add", str(self.document), "--name", self.document.stem, "--model", str(self.model))
        self.prefix_tokens, self.artifact = int(added["tokens"]), str(added["artifact"])

    def forget(self) -> None:
        """Have both nodes let go of it, so that the next round begins like the first."""
        if self.artifact:
            self.holder.run("rm", self.artifact)
            self.asker.run("rm", self.artifact)
            self.artifact = ""
        if self.asked:
            self._forget_conversations()

    def _forget_conversations(self) -> None:
        """What the endpoint keeps of its answers goes too, once it is there; pinned is nothing any more."""
        deadline = time.monotonic() + KEEP_TIMEOUT_S
        while (found := decided(self.asker.run("status")["counters"])) < self.asked:
            if time.monotonic() > deadline:
                raise EngineError(f"expected {self.asked} answers kept or not, found {found}")
        self.asker.run("gc", "--all")

    def answer(self, *flags: str, source: str = "") -> Timing:
        """The asker's answer, which must have reused the whole prefix from ``source``, or nothing without one.

        Raises:
            EngineError: it did not; the row would show something else than it says.
        """
        if source == "peer":
            timing = self.asker.answer_from_peer(self.chat, self.model)
        else:
            timing = self.asker.answer(self.chat, self.model, *flags)
        found = sum(each["tokens"] for each in timing.sources if each["source"] == source)
        wanted = self.prefix_tokens if source else 0
        if (found if source else timing.reused_tokens) != wanted:
            places = (
                ", ".join(f"{each['tokens']:,} from {each['source']}" for each in timing.sources) or "nothing reused"
            )
            raise EngineError(
                f"expected {wanted:,} tokens from {source or 'nowhere'}, found {places}",
                hint="try another length: kvnet bench ttft --prefix-tokens N",
            )
        return timing


@dataclass(frozen=True, slots=True)
class Row:
    """One way to the first token.

    Attributes:
        key: its name in JSON, in seconds.
        title: in words.
        measure: one timing; rows run in the order of the table, and each finds what those before it left.
        needs_endpoint: it asks the node over HTTP, as clients do; left out where the endpoint is turned off.
    """

    key: str
    title: str
    measure: Callable[[Bench], Timing]
    needs_endpoint: bool = False


def _plain(bench: Bench) -> Timing:
    """Mlx-lm alone, as somebody without kvnet runs it."""
    command = [sys.executable, "-m", "kvnet.engine.mlx.plain", str(bench.model), str(bench.chat), str(ANSWER_TOKENS)]
    done = subprocess.run(command, capture_output=True, timeout=PLAIN_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise EngineError(f"mlx-lm alone failed: {done.stderr.decode('utf-8', 'replace').strip()[-200:]}")
    result = msgspec.json.decode(done.stdout.splitlines()[-1])
    return Timing(result["ttft_s"], result["text"], 0, [], result["prompt_tokens"])


def _from_peer(bench: Bench) -> Timing:
    bench.share()
    return bench.answer(source="peer")


def _from_ram(bench: Bench) -> Timing:
    """The same request twice: the second one continues from the caches that the first one left in memory."""
    body = {
        "model": str(bench.model),
        "messages": msgspec.json.decode(bench.chat.read_bytes()),
        "max_tokens": ANSWER_TOKENS,
    }
    ask(bench.asker.endpoint, body)
    told = ask(bench.asker.endpoint, body)
    bench.asked += 2
    if told.source != "ram" or told.reused_tokens < bench.prefix_tokens:
        raise EngineError(
            f"expected {bench.prefix_tokens:,} tokens from memory, found {told.reused_tokens:,} from {told.source}",
            hint="a model that needs more memory than there is keeps no caches",
        )
    return Timing(told.ttft_s, told.text, told.reused_tokens, [], told.prompt_tokens)


ROWS: tuple[Row, ...] = (
    Row("plain_mlx_lm_s", "mlx-lm alone", _plain),
    Row("cold_s", "kvnet, no reuse", lambda bench: bench.answer("--no-reuse")),
    Row("empty_network_s", "kvnet, peer has nothing", lambda bench: bench.answer()),
    Row("peer_s", "kvnet, from a peer", _from_peer),
    Row("local_store_s", "kvnet, from disk", lambda bench: bench.answer(source="disk")),
    Row("ram_s", "kvnet, from memory", _from_ram, needs_endpoint=True),
)
"""In the order in which a round runs them: first what knows nothing, then what a peer has, then what that left."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One length.

    Attributes:
        asked_tokens: the length asked for.
        prefix_tokens: tokens of the shared prefix, as the model counts them.
        prompt_tokens: of the whole prompt.
        times_s: seconds to the first token of every round, by row.
        texts: greedy texts, by row.
    """

    asked_tokens: int
    prefix_tokens: int
    prompt_tokens: int
    times_s: dict[str, list[float]]
    texts: dict[str, set[str]]

    def median_s(self, key: str) -> float:
        """The median of a row, in seconds."""
        return statistics.median(self.times_s[key])

    @property
    def same_text(self) -> bool:
        """Whether every answer of every row is the same text, and not an empty one."""
        texts = set().union(*self.texts.values())
        return len(texts) == 1 and texts != {""}

    def record(self, model: str) -> dict[str, object]:
        """The line of ``--json``."""
        first = ("cold_s", "plain_mlx_lm_s", "local_store_s", "peer_s", "empty_network_s")
        rest = [key for key in self.times_s if key not in first]
        return {
            "type": "ttft",
            "prefix_tokens": self.prefix_tokens,
            **{key: round(self.median_s(key), 4) for key in first},
            "same_text": self.same_text,
            **{key: round(self.median_s(key), 4) for key in rest},
            "asked_tokens": self.asked_tokens,
            "prompt_tokens": self.prompt_tokens,
            "rounds": len(self.times_s["cold_s"]),
            "model": model,
            "all_s": {key: [round(each, 4) for each in times] for key, times in self.times_s.items()},
        }


@dataclass(slots=True)
class _Collected:
    times_s: dict[str, list[float]] = field(default_factory=dict)
    texts: dict[str, set[str]] = field(default_factory=dict)

    def take(self, row: Row, timing: Timing) -> None:
        self.times_s.setdefault(row.key, []).append(timing.ttft_s)
        self.texts.setdefault(row.key, set()).add(timing.text)


def measure_ttft(model: Path, lengths: tuple[int, ...], rounds: int, say: Say) -> Iterator[Measured]:
    """Measure each length in turn, with the same two nodes.

    Args:
        model: folder of the model.
        lengths: tokens of shared prefix, about.
        rounds: how often every row runs.
        say: told what is done.

    Raises:
        KvnetError: whatever a command reported, or a row that did not do what it is named after.
    """
    with two_sides(lambda _: None) as (holder, asker, root):
        holder.start()
        asker.start()
        pair(holder, asker)
        asked = 0
        for length in lengths:
            document, chat = root / f"handbook-{length}.txt", root / "question.json"
            document.write_text(text_of(length), encoding="utf-8")
            chat.write_bytes(msgspec.json.encode(chat_about(document, DEMO_QUESTION)))
            bench = Bench(holder, asker, model, document, chat, asked=asked)
            yield _measure(bench, length, rounds, say)
            asked = bench.asked


def _measure(bench: Bench, length: int, rounds: int, say: Say) -> Measured:
    collected = _Collected()
    prompt_tokens = 0
    for number in range(1, rounds + 1):
        for row in ROWS:
            if row.needs_endpoint and not bench.asker.endpoint:
                continue
            timing = row.measure(bench)
            collected.take(row, timing)
            prompt_tokens = timing.prompt_tokens
            say(f"{length:,} tokens, round {number} of {rounds}: {row.title}, {timing.ttft_s:.3f} s")
        bench.forget()
    return Measured(length, bench.prefix_tokens, prompt_tokens, collected.times_s, collected.texts)


def text_of(n_tokens: int) -> str:
    """About ``n_tokens`` tokens of prose; a longer one than the demo's document goes through it again and again."""
    document = demo_document()
    parts: list[str] = []
    while not parts or cut("".join(parts), n_tokens) == "".join(parts):
        parts.append(f"Part {len(parts) + 1}.\n\n{document}" if parts else document)
    return cut("".join(parts), n_tokens)
