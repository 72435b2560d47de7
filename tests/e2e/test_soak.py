"""Three nodes of one person, driven at random through what happens to nodes: every answer is one computed alone would
be, no node ends unasked, no command fails in a way nobody meant, and nothing bad is left in a store.

The draws are those of a seed, what happens between processes is not: an assertion here holds however they interleave.
"""

import json
import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.e2e.conftest import TIMEOUT_S, Kvnet, Ran
from tests.mlx.tinymodels import LLAMA, write_model

pytestmark = [pytest.mark.e2e, pytest.mark.loopback, pytest.mark.mlx, pytest.mark.nightly]

TINY: Final = "tiny"
N_STEPS: Final = 40
CLEAR: Final = 0.01
"""The least lead of every token of an answer over the next, in log probability: rounding is hundreds of times less."""
DOCUMENTS: Final = tuple(
    f"Rules of harbour {number}. " + f"The keeper of light {number} notes wind, tide and rope. " * (6 * number)
    for number in range(1, 5)
)
QUESTIONS: Final = ("What?", "Why is it so?", "Who keeps the light? " * 15)
QUOTAS_BYTES: Final = ("1000000", "4000000", "100000000")
PROTECTED: Final = ("keys", "namespaces", "models")
"""Secrets have no second copy: a node whose keys are damaged is told so, and does not start."""
UNMEANT: Final = ("Traceback", "Exception in thread", "never awaited", "never retrieved", '"unexpected"')


class Drive:
    """Three nodes, what may be asked of them, and what is drawn."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.draw = random.Random(seed)
        self.folder = folder
        self.nodes = [self._made(name) for name in "abc"]
        self.alone = self._made("alone")
        self.processes: dict[Kvnet, subprocess.Popen[str]] = {}
        self.urls: dict[Kvnet, str] = {}
        self.hurt: set[Kvnet] = set()
        self.errors: dict[Kvnet, str] = dict.fromkeys([*self.nodes, self.alone], "")
        self.expected: dict[tuple[str, str], str] = {}

    def _made(self, name: str) -> Kvnet:
        (self.folder / name).mkdir()
        kvnet = Kvnet(self.folder / name / "data")
        write_model(kvnet.data_dir / "models" / TINY, {**LLAMA, "max_position_embeddings": 4096})
        return kvnet

    # --- nodes ---

    def start(self, node: Kvnet) -> None:
        started, self.processes[node] = node.start("--model", TINY)
        (self.urls[node],) = started["endpoint"]

    def ended(self, node: Kvnet, number: signal.Signals) -> int:
        process = self.processes.pop(node)
        process.send_signal(number)
        code = process.wait(timeout=TIMEOUT_S)
        assert process.stderr is not None
        self.errors[node] += process.stderr.read()
        return code

    def check(self) -> None:
        for node, process in self.processes.items():
            assert process.poll() is None, f"{node.data_dir} ended by itself"
            assert node.asked("status")["running"] is True
        for node in self.nodes:
            logged = (node.data_dir / "node.log").read_text("utf-8", "replace") if self._has_log(node) else ""
            said = self.errors[node] + logged
            assert not any(words in said for words in UNMEANT), said[-4000:]

    @staticmethod
    def _has_log(node: Kvnet) -> bool:
        return (node.data_dir / "node.log").is_file()

    # --- prompts ---

    def learn(self) -> None:
        """What each prompt is answered by a node that shares with nobody and reuses nothing; those nearly drawn by lot
        are left out."""
        for document in DOCUMENTS:
            for question in QUESTIONS:
                body = _body(document, question) | {"logprobs": True, "top_logprobs": 2}
                said = self._post(self.alone, body, {"x-kvnet-reuse": "off", "x-kvnet-private": "1"}).json()
                (choice,) = said["choices"]
                leads = [
                    token["top_logprobs"][0]["logprob"] - token["top_logprobs"][1]["logprob"]
                    for token in choice["logprobs"]["content"]
                ]
                if min(leads) >= CLEAR:
                    self.expected[document, question] = choice["message"]["content"]
        assert len(self.expected) >= len(DOCUMENTS)

    def prompt(self, node: Kvnet, number: int) -> None:
        """Ask, now and then going away in the middle; only who was killed meanwhile may answer with an error."""
        chance = random.Random(number)
        document, question = chance.choice(sorted(self.expected))
        body = _body(document, question)
        try:
            if chance.random() < 0.3:
                with httpx.stream("POST", _chat(self.urls[node]), json=body | {"stream": True}, timeout=TIMEOUT_S) as s:
                    next(s.iter_bytes(), None)
                return
            answer = self._post(node, body, {})
        except httpx.TransportError:
            assert node in self.hurt
            return
        said = answer.json()
        if answer.status_code == 200:
            assert said["choices"][0]["message"]["content"] == self.expected[document, question]
        else:
            assert node in self.hurt, said
            assert said["error"]["message"]
            assert said["error"]["code"]

    def _post(self, node: Kvnet, body: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
        return httpx.post(_chat(self.urls[node]), json=body, headers=headers, timeout=TIMEOUT_S)

    # --- commands ---

    def run(self, node: Kvnet, *arguments: str) -> Ran:
        ran = node("--json", "--quiet", *arguments)
        assert ran.code not in {1, -signal.SIGSEGV, -signal.SIGABRT}, (arguments, ran.stderr)
        assert not any(words in ran.stdout + ran.stderr for words in UNMEANT), (arguments, ran.stderr)
        return ran

    def pair(self, guest: Kvnet) -> None:
        made = self.run(self.nodes[0], "invite", "--device", "--no-qr", "--name", guest.data_dir.parent.name)
        joined = self.run(guest, "join", made.result["invitation"], "--yes", "--keep-old")
        assert joined.code == 0, joined.stderr

    def target(self, node: Kvnet) -> str:
        held = node.asked("list")["artifacts"]
        if not held:
            return "nothing"
        chosen = self.draw.choice(held)
        name: str = self.draw.choice([*chosen["names"], chosen["artifact"]])
        return name

    def add(self, node: Kvnet) -> None:
        number = self.draw.randrange(len(DOCUMENTS))
        file = self.folder / f"rules {number}.txt"
        file.write_text(DOCUMENTS[number])
        self.run(node, "add", str(file), "--name", f"rules{number}-{node.data_dir.parent.name}")

    def add_interrupted(self, node: Kvnet) -> None:
        file = self.folder / "long.txt"
        file.write_text("".join(f"Line {self.draw.random()} of the log.\n" for _ in range(60)))
        process = node.popen("--json", "add", str(file), "--name", "long")
        assert process.stdout is not None
        process.stdout.readline()  # from its first word on, a Ctrl-C is an end it knows
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=TIMEOUT_S) in {0, 130}

    def fetch(self, node: Kvnet) -> None:
        offered = self.run(node, "list", "--peers", "--all")
        found = offered.result["offered"] if offered.code == 0 else []
        if found:
            chosen = self.draw.choice(found)
            self.run(node, "fetch", self.draw.choice([chosen["artifact"], chosen.get("name") or chosen["artifact"]]))

    def remove(self, node: Kvnet) -> None:
        self.run(node, "rm", self.target(node), *self.draw.choice([[], ["--everywhere", "--yes"]]))

    def pin(self, node: Kvnet) -> None:
        self.run(node, self.draw.choice(["pin", "unpin"]), self.target(node))

    def collect(self, node: Kvnet) -> None:
        self.run(node, "gc", *self.draw.choice([[], ["--all"]]))

    def scrub(self, node: Kvnet) -> None:
        self.run(node, "store", "scrub")

    # --- harm ---

    def kill(self, node: Kvnet) -> None:
        self.hurt.add(node)
        self.ended(node, signal.SIGKILL)
        for _ in range(self.draw.randrange(3)):
            self.damage(node)
        self.start(node)

    def restart(self, node: Kvnet) -> None:
        self.hurt.add(node)
        assert self.ended(node, signal.SIGTERM) == 0
        node.environment["KVNET_STORE_QUOTA_BYTES"] = self.draw.choice(QUOTAS_BYTES)
        self.start(node)

    def damage(self, node: Kvnet) -> None:
        inside = sorted(path for path in node.data_dir.rglob("*") if path.is_file())
        file = self.draw.choice([p for p in inside if p.relative_to(node.data_dir).parts[0] not in PROTECTED])
        content = file.read_bytes()
        at = self.draw.randrange(len(content) + 1)
        changed = content[:at] + bytes([self.draw.randrange(256)]) + content[at + 1 :]
        how = self.draw.choice(["changed", "cut", "gone"])
        if how == "gone":
            file.unlink()
        else:
            file.write_bytes(changed if how == "changed" else content[:at])

    def kill_engine(self, node: Kvnet) -> None:
        self.hurt.add(node)
        for engine in _children(self.processes[node].pid):
            os.kill(engine, signal.SIGKILL)

    def stop_for_a_while(self, node: Kvnet) -> None:
        self.processes[node].send_signal(signal.SIGSTOP)
        try:
            self.run(next(each for each in self.nodes if each is not node), "peers")
        finally:
            self.processes[node].send_signal(signal.SIGCONT)

    def oust(self, node: Kvnet) -> None:
        guest = self.draw.choice(self.nodes[1:])
        self.run(self.nodes[0], "swarm", "remove", guest.data_dir.parent.name, "--yes")
        self.pair(guest)


def _body(document: str, question: str) -> dict[str, Any]:
    said = [{"role": "system", "content": document}, {"role": "user", "content": question}]
    return {"model": TINY, "messages": said, "max_tokens": 8, "temperature": 0}


def _chat(url: str) -> str:
    return f"{url}/v1/chat/completions"


def _children(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    return [child for child, parent in pairs if parent == pid]


@pytest.fixture
def drive(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Drive]:
    made = Drive(tmp_path, request.param)
    yield made
    for node in [*made.nodes, made.alone]:
        node.end()


@pytest.mark.parametrize("drive", [int(os.environ.get("KVNET_SOAK_SEED", "1"))], indirect=True, ids=["seed"])
def test_whatever_happens_to_nodes_answers_are_right_and_nothing_ends_unasked(drive: Drive) -> None:
    for node in [*drive.nodes, drive.alone]:
        drive.start(node)
    drive.learn()
    for guest in drive.nodes[1:]:
        drive.pair(guest)
    ways: list[Callable[[Kvnet], None]] = [
        drive.add, drive.add, drive.add_interrupted, drive.fetch, drive.fetch, drive.remove, drive.pin, drive.collect,
        drive.scrub, drive.kill, drive.kill, drive.restart, drive.kill_engine, drive.stop_for_a_while, drive.oust,
    ]  # fmt: skip
    with ThreadPoolExecutor(4) as pool:
        for step in range(N_STEPS):
            asked: list[Future[None]] = [
                pool.submit(drive.prompt, drive.draw.choice(drive.nodes), step * 10 + i)
                for i in range(drive.draw.randrange(4))
            ]
            way, node = drive.draw.choice(ways), drive.draw.choice(drive.nodes)
            print(step, way.__name__, node.data_dir.parent.name)  # noqa: T201 - shown with a failure
            way(node)
            for each in asked:
                each.result()
            drive.hurt.clear()
            drive.check()
    for node in drive.nodes:
        drive.run(node, "store", "scrub")
        assert json.loads(drive.run(node, "verify").stdout.splitlines()[-1])["bad_chunks"] == []
        assert drive.ended(node, signal.SIGTERM) == 0
        assert not list((node.data_dir / "store" / "tmp").iterdir())
    drive.check()
