"""Time to first token of one question over a document of about 1,024 tokens, side by side.

mlx-lm alone is what everything is compared with. Beside it: kvnet without reuse, kvnet asking a peer that has nothing,
kvnet fetching from a peer on loopback, and kvnet reading its own disk. Rounds are interleaved; medians count.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvnet_node.demonstration import DEMO_QUESTION, Side, chat_about, cut, demo_document, demo_model, pair, two_sides

ROUNDS = 3
PREFIX_TOKENS = 1024
EMPTY_DOCUMENT = "This peer holds another text."

Times = dict[str, list[float]]


def main() -> None:
    """Run the rounds and print medians and ratios."""
    model = demo_model(lambda _: None)
    with two_sides(lambda _: None) as (holder, asker, root):
        document = root / "handbook.txt"
        document.write_text(cut(demo_document(), PREFIX_TOKENS), encoding="utf-8")
        chat = root / "question.json"
        chat.write_text(json.dumps(chat_about(document, DEMO_QUESTION)), encoding="utf-8")
        pair(holder, asker, root)
        holder.start()
        asker.start("--bootstrap", holder.addresses[0])
        asker.run("peers", holder.addresses[0])
        times, added = _rounds(holder, asker, model, document, chat)
    _print(times, added)


def _rounds(holder: Side, asker: Side, model: Path, document: Path, chat: Path) -> tuple[Times, dict[str, Any]]:
    times: Times = {}
    added: dict[str, Any] = {}
    for _ in range(ROUNDS):
        if added:
            holder.run("rm", added["artifact"])
            asker.run("rm", added["artifact"])
        _note(times, "mlx-lm alone", lambda: _plain(model, chat))
        _note(times, "kvnet, no reuse", lambda: asker.answer(chat, model, "--no-reuse").ttft_s)
        _note(times, "kvnet, peer has nothing", lambda: asker.answer(chat, model).ttft_s)
        added = holder.run("add", str(document), "--name", "handbook", "--model", str(model))
        fetched = asker.answer(chat, model)
        times.setdefault("kvnet, from a peer", []).append(fetched.ttft_s)
        if fetched.reused_tokens != added["tokens"]:
            raise SystemExit(f"expected {added['tokens']} tokens from the peer, found {fetched.reused_tokens}")
        _note(times, "kvnet, from disk", lambda: asker.answer(chat, model).ttft_s)
    return times, added


def _note(times: Times, what: str, measure: Callable[[], float]) -> None:
    times.setdefault(what, []).append(measure())


def _plain(model: Path, chat: Path) -> float:
    command = [sys.executable, "-m", "benchmarks.plain", str(model), str(chat), "1"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    times: list[float] = json.loads(done.stdout)["ttft_s"]
    return times[0]


def _print(times: Times, added: dict[str, Any]) -> None:
    medians = {what: statistics.median(each) for what, each in times.items()}
    plain = medians["mlx-lm alone"]
    print(f"\ntime to first token, {added['tokens']:,} tokens of shared prefix, median of {ROUNDS} rounds")
    for what, each in times.items():
        spread = f"{min(each):.3f} to {max(each):.3f}"
        median = medians[what]
        print(f"  {what:28} {median:8.3f} s  ({spread:>16})  {plain / median:6.2f}x as soon as mlx-lm alone")
    peer, disk = medians["kvnet, from a peer"], medians["kvnet, from disk"]
    print(f"  from a peer takes {peer / disk:.2f} times as long as from disk")
    print(json.dumps({"type": "ttft", "prefix_tokens": added["tokens"], "median_s": medians}))
