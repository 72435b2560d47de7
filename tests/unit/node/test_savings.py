import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from kvnet.engine.completions import Completed
from kvnet.engine.prompts import PreparedPrompt
from kvnet.exchange.answers import Finished, Reuse
from kvnet.exchange.generation import Answer
from kvnet.exchange.prefix_reuse import Source
from kvnet.format.fingerprint import Verdict
from kvnet.format.hashes import ArtifactHash, artifact_text
from kvnet.protocol.ids import PeerId
from kvnet_node import savings as module
from kvnet_node.commands.savings import paid_off, render
from kvnet_node.operations.requests import SavingsEntry, SavingsResult
from kvnet_node.operations.savings import break_even_uses, entry
from kvnet_node.savings import LIVE, OLDER, Made, Savings, Totals

A, B = ArtifactHash(bytes([1] * 32)), ArtifactHash(bytes([2] * 32))
PROMPT = (77_001, 77_002)
ANSWER = (88_001,)


@pytest.fixture
def ledger(tmp_path: Path) -> Savings:
    return Savings(tmp_path / "savings.sqlite3", now=lambda: 1000.0)


def source(artifact: ArtifactHash, where: str, tokens: int) -> Source:
    return Source(where, PeerId(b""), tokens, tokens * 10, 0.1, bytes(32), artifact)


def finished(*sources: Source, live: int = 0, saved_s: float = 0.0, prompt: int = 1000) -> Finished:
    reused = live + sum(each.tokens for each in sources)
    reuse = Reuse(
        prompt, reused, 0, "ram" if live else sources[0].source if sources else "none", sources, saved_s, 0.0, 0.0, 0,
        Verdict.EXACT, (), (), PreparedPrompt(PROMPT, (), 0, live),
    )  # fmt: skip
    return Finished(Completed(ANSWER, "stop", 0, 0.1, prompt - reused, 2.0, 0.1), reuse, 0.1, 0.2)


def test_uses_of_one_artifact_add_up_by_source(ledger: Savings) -> None:
    ledger.note(finished(source(A, "disk", 600), saved_s=3.0))
    ledger.note(finished(source(A, "disk", 500), saved_s=2.0))
    ledger.note(finished(source(A, "peer", 600), saved_s=1.0))
    uses = {(use.artifact, use.source): (use.uses, use.tokens, use.saved_s, use.n_bytes) for use in ledger.uses()}
    assert uses == {
        (artifact_text(A), "disk"): (2, 1100, 5.0, 11_000),
        (artifact_text(A), "peer"): (1, 600, 1.0, 6000),
    }
    assert ledger.totals() == Totals(3, 3, 3000, 1300, 6.0, 1000)


def test_seconds_of_an_answer_go_to_its_sources_by_their_tokens(ledger: Savings) -> None:
    ledger.note(finished(source(A, "disk", 300), source(B, "peer", 100), saved_s=8.0))
    assert {use.artifact: use.saved_s for use in ledger.uses()} == {artifact_text(A): 6.0, artifact_text(B): 2.0}


def test_what_was_still_in_memory_is_counted_without_an_artifact(ledger: Savings) -> None:
    ledger.note(finished(live=900, saved_s=4.0))
    assert [(use.artifact, use.source, use.tokens) for use in ledger.uses()] == [(LIVE, "ram", 900)]


def test_an_answer_without_reuse_counts_in_the_totals_alone(ledger: Savings) -> None:
    ledger.note(finished())
    assert ledger.uses() == []
    assert (ledger.totals().requests, ledger.totals().reused_requests) == (1, 0)


def test_answers_of_the_commands_are_noted_too(ledger: Savings) -> None:
    answer = Answer(
        "text", ANSWER, "stop", 700, 600, 100, (source(A, "disk", 600),), 0.2, 0.1, 0.1, 0.1, Verdict.EXACT, "trusted"
    )
    ledger.note_answer(answer, 2.5)
    assert [(use.tokens, use.saved_s) for use in ledger.uses()] == [(600, 2.5)]


def test_prefill_is_paid_once_and_an_added_artifact_keeps_its_name(ledger: Savings) -> None:
    ledger.added(A, name="handbook", model="m", tokens=1000, prefilled_tokens=1000, prefill_s=12.0, n_bytes=5)
    ledger.added(A, name="handbook", model="m", tokens=1000, prefilled_tokens=0, prefill_s=0.0, n_bytes=0)
    assert ledger.artifacts() == [Made(artifact_text(A), "handbook", "m", "add", 1000, 1000, 12.0, 0.0, 5, 1000)]


def test_the_file_is_its_owners_alone_and_so_are_its_companions(tmp_path: Path) -> None:
    before = os.umask(0o000)
    try:
        ledger = Savings(tmp_path / "savings.sqlite3")
        ledger.note(finished())
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert modes
    assert set(modes.values()) == {0o600}
    assert len(modes) > 1


def test_no_prompt_token_or_text_gets_into_the_file(ledger: Savings, tmp_path: Path) -> None:
    ledger.note(finished(source(A, "disk", 300), saved_s=8.0))
    database = sqlite3.connect(tmp_path / "savings.sqlite3")
    cells = [
        cell
        for table in ("artifacts", "uses", "totals")
        for row in database.execute(f"SELECT * FROM {table}")
        for cell in row
    ]
    database.close()
    assert cells
    assert not {*PROMPT, *ANSWER, "text"} & set(cells)


def test_reading_creates_nothing(ledger: Savings, tmp_path: Path) -> None:
    assert (ledger.artifacts(), ledger.uses(), ledger.totals()) == ([], [], Totals())
    assert list(tmp_path.iterdir()) == []


def test_notes_survive_the_death_of_the_process(tmp_path: Path) -> None:
    file = tmp_path / "savings.sqlite3"
    program = (
        "import os, signal, sys; from pathlib import Path; from kvnet_node.savings import Savings, Made; "
        "ledger = Savings(Path(sys.argv[1])); ledger.made(Made('x', 'n', 'm', 'add', 7)); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    completed = subprocess.run([sys.executable, "-c", program, str(file)], check=False)
    assert completed.returncode == -signal.SIGKILL
    assert [made.tokens for made in Savings(file).artifacts()] == [7]


def test_a_damaged_ledger_is_set_aside_and_a_new_one_begins(tmp_path: Path) -> None:
    file = tmp_path / "savings.sqlite3"
    file.write_bytes(b"this is no database, and it is long enough to be read as one" * 20)
    ledger = Savings(file)
    ledger.note(finished())
    assert ledger.totals().requests == 1
    assert (tmp_path / "savings.sqlite3.damaged").exists()


def test_a_ledger_that_cannot_be_written_costs_no_answer(tmp_path: Path) -> None:
    Savings(tmp_path / "missing" / "savings.sqlite3").note(finished())


def test_old_conversations_are_added_up_and_named_contexts_stay(
    ledger: Savings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ARTIFACTS", 4)
    ledger.added(A, name="handbook", model="m", tokens=9, prefilled_tokens=9, prefill_s=1.0, n_bytes=1)
    for index in range(10, 16):
        artifact = ArtifactHash(bytes([index] * 32))
        ledger.kept(artifact, model="m", tokens=index)
        ledger.note(finished(source(artifact, "disk", 10), saved_s=1.0))
    assert len(ledger.artifacts()) <= 5
    assert any(made.name == "handbook" for made in ledger.artifacts())
    assert sum(use.uses for use in ledger.uses()) == 6
    assert any(use.artifact == OLDER for use in ledger.uses())


@pytest.mark.parametrize(
    ("paid_s", "saved_s", "uses", "expected"),
    [(12.0, 10.0, 2, 3), (12.0, 24.0, 2, 1), (0.0, 5.0, 1, 0), (12.0, 0.0, 0, None), (12.0, -3.0, 2, None)],
)
def test_what_was_paid_is_won_back_after_some_uses(
    paid_s: float, saved_s: float, uses: int, expected: int | None
) -> None:
    assert break_even_uses(paid_s, saved_s, uses) == expected


def account(**fields: object) -> SavingsEntry:
    values = {
        "artifact": "x", "name": "handbook", "model": "m", "origin": "add", "tokens": 9, "paid_s": 10.0, "uses": 1,
        "saved_tokens": 9, "saved_s": 4.0, "break_even_uses": 3, "sources": {}, "last_used": 0, **fields,
    }  # fmt: skip
    return SavingsEntry(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "after about 3 uses"),
        ({"uses": 3}, "yes, with 3 uses"),
        ({"uses": 0, "break_even_uses": None}, "not used yet"),
        ({"saved_s": -1.0, "break_even_uses": None}, "not like this: reuse takes longer than prefill"),
        ({"saved_s": 0.0, "break_even_uses": None}, "not known: this machine's prefill had not been measured"),
        ({"paid_s": 0.0, "break_even_uses": 0}, "at once"),
    ],
)
def test_the_table_says_whether_it_has_paid_off(fields: dict[str, object], words: str) -> None:
    assert paid_off(account(**fields)) == words


def test_money_is_shown_only_at_the_readers_price() -> None:
    result = SavingsResult([account()], {}, 3, 1, 100, 9, 4.0, 91, 2.0, 10.0, 0)
    assert "money" not in render(result, "")
    assert "2.50 EUR at your price" in render(result, "2.50 EUR")


def test_time_saved_at_an_unknown_speed_is_not_said_to_be_none() -> None:
    unknown = SavingsResult([account(saved_s=0.0, break_even_uses=None)], {}, 3, 1, 100, 9, 0.0, 91, 2.0, 10.0, 0)
    assert "time saved      not known" in render(unknown, "")
    assert "0.000 s" not in render(unknown, "")
    unused = SavingsResult([account(uses=0, saved_tokens=0, saved_s=0.0)], {}, 3, 0, 100, 0, 0.0, 91, 2.0, 10.0, 0)
    assert "time saved      0.000 s" in render(unused, "")


def test_before_the_first_answer_no_figure_is_given_for_answers() -> None:
    unused = account(uses=0, saved_tokens=0, saved_s=0.0, break_even_uses=None)
    summary, _, table = render(SavingsResult([unused], {}, 0, 0, 0, 0, 0.0, 0, 0.0, 10.0, 0), "0.00 EUR").partition(
        "\n\n"
    )
    assert summary.splitlines() == [
        "answers     none yet: nothing saved so far",
        "paid ahead  10.0 s of prefill and fetching before the first use",
    ]
    assert "not used yet" in table


def test_an_artifact_only_ever_used_from_peers_has_an_account() -> None:
    account = entry(None, "x", [])
    assert (account.origin, account.paid_s, account.break_even_uses) == ("peer", 0.0, 0)
