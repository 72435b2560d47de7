"""A replay of 50 recorded-shape requests over two nodes: no sharing, each node's own cache, and the two as one swarm.

``python -m benchmarks replay`` answers with SmolLM2; a test does the same with a tiny model. Requests go through the
endpoint, one after the other; what an answer leaves behind is kept before a request goes to the other node.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.replay_trace import Request, Scale, requests, shared
from kvnet_node.asking import Told, ask, decided
from kvnet_node.control_client import call_running_node
from kvnet_node.demonstration import Side, demo_model, pair, two_sides
from kvnet_node.operations.requests import StatusRequest, StatusResult

MAX_TOKENS = 4
SMOLLM2_SCALE = Scale(blocks=48, characters=280)
"""Prompts of 167 to 630 tokens: without any sharing, a CPU prefills them all in about two minutes."""
SETTLE_S = 300.0
POLL_S = 0.02
WARM_UP = {
    "messages": [{"role": "user", "content": "Name the months of the year in their usual order."}],
    "max_tokens": 2,
}

MODES = ("none", "own cache", "swarm")


@dataclass(frozen=True, slots=True)
class Replayed:
    """One way of answering all requests.

    Attributes:
        mode: one of ``MODES``.
        sent: in order.
    """

    mode: str
    sent: tuple[Told, ...]

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens not computed."""
        return sum(each.reused_tokens for each in self.sent)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(each.prompt_tokens for each in self.sent)

    def ttft_s(self, share: float) -> float:
        """The time to the first token that ``share`` of the requests kept, in seconds."""
        ordered = sorted(each.ttft_s for each in self.sent)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def by_source(self) -> dict[str, int]:
        """Tokens reused, by source."""
        found: dict[str, int] = {}
        for each in self.sent:
            if each.reused_tokens:
                found[each.source] = found.get(each.source, 0) + each.reused_tokens
        return found


def settle(side: Side, answered: int) -> None:
    """Wait until as many answers have been kept, or were not worth it, as were given.

    Raises:
        RuntimeError: that takes too long.
    """
    deadline = time.monotonic() + SETTLE_S
    while True:
        counters = _status(side.data_dir).counters
        if decided(counters) >= answered:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"expected {answered} answers kept or not within {SETTLE_S:.0f} s, found {counters}")
        time.sleep(POLL_S)


def _status(data_dir: Path) -> StatusResult:
    """What ``kvnet status`` says, without a process for it."""
    said = call_running_node(data_dir, "status", StatusRequest(), lambda _: None)
    if said is None:
        raise RuntimeError(f"expected a running node of {data_dir}, found none")
    return msgspec.json.decode(said, type=StatusResult)


@contextmanager
def nodes(model: Path, *, paired: bool) -> Iterator[tuple[Side, Side]]:
    """Two fresh nodes that answer with one model; paired they find each other's artifacts."""
    with two_sides(lambda _: None) as (first, second, _root):
        first.start("--model", str(model))
        second.start("--model", str(model))
        if paired:
            pair(first, second)
        yield first, second


def replay(model: Path, wanted: Sequence[Request], mode: str, say: Callable[[str], None] = lambda _: None) -> Replayed:
    """Send all requests in order.

    Args:
        model: folder of the model.
        wanted: the requests.
        mode: one of ``MODES``.
        say: told of every answer.
    """
    headers = {"x-kvnet-reuse": "off"} if mode == "none" else {}
    with nodes(model, paired=mode == "swarm") as sides:
        answered = [0, 0]
        found = []
        for side in sides:
            ask(side.endpoint, {"model": str(model), **WARM_UP}, {"x-kvnet-private": "1"})
        for number, request in enumerate(wanted, 1):
            side, other = sides[request.node], 1 - request.node
            if mode == "swarm":
                settle(sides[other], answered[other])
            body = {"model": str(model), "messages": request.as_json, "max_tokens": MAX_TOKENS}
            sent = ask(side.endpoint, body, headers)
            answered[request.node] += 1
            found.append(sent)
            say(
                f"{mode} {number}/{len(wanted)}: {sent.reused_tokens:,} of {sent.prompt_tokens:,} tokens from "
                f"{sent.source}, {sent.ttft_s:.3f} s"
            )
        return Replayed(mode, tuple(found))


def table(replays: Sequence[Replayed], wanted: Sequence[Request]) -> str:
    """Hit rate, saved tokens and times to the first token, one way beside the others, and what was possible at all."""
    lines = [f"{'':12}{'hit rate':>10}{'possible':>10}{'tokens saved':>14}{'p50 s':>9}{'p90 s':>9}{'mean s':>9}  from"]
    for each in replays:
        possible = shared(wanted, across_nodes=each.mode == "swarm") if each.mode != "none" else []
        share = sum(hit for hit, _ in possible) / max(1, sum(size for _, size in possible))
        sources = ", ".join(f"{source} {tokens:,}" for source, tokens in sorted(each.by_source().items())) or "-"
        mean = statistics.mean(sent.ttft_s for sent in each.sent)
        lines.append(
            f"{each.mode:12}{each.reused_tokens / each.prompt_tokens:>10.1%}{share:>10.1%}{each.reused_tokens:>14,}"
            f"{each.ttft_s(0.5):>9.3f}{each.ttft_s(0.9):>9.3f}{mean:>9.3f}  {sources}"
        )
    return "\n".join(lines)


def main() -> None:
    """Replay with SmolLM2 and print the table."""
    model = demo_model(lambda _: None)
    wanted = requests(SMOLLM2_SCALE)
    replays = [replay(model, wanted, mode, print) for mode in MODES]
    print(f"\n{len(wanted)} requests of {len({each.session for each in wanted})} sessions over two nodes")
    print(table(replays, wanted))
