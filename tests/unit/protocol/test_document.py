"""``docs/protocol.md`` and the code say the same."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from kvnet.format import limits
from kvnet.network.interface import STREAM_WINDOW_BYTES, StreamKind
from kvnet.protocol.announce import AnnounceLimits
from kvnet.protocol.fetch import GROWTH, FetchLimits
from kvnet.protocol.fetch_limits import PATIENCE_S
from kvnet.protocol.fetch_roster import MAX_COMEBACKS, TRIAL_S
from kvnet.protocol.framing import MAX_FRAME_BYTES
from kvnet.protocol.handshake import SESSION_ID_SIZE_BYTES
from kvnet.protocol.lookup import MAX_ASKED, MAX_DHT_QUERIES
from kvnet.protocol.membership import PROOF_ENTRIES
from kvnet.protocol.messages import artifacts, chunks, control, fields, handshake, refusals
from kvnet.protocol.pace import WEIGHTS, Purpose
from kvnet.protocol.provider_pages import PageLimits
from kvnet.protocol.scoring import FADE_S
from kvnet.protocol.serve import SLOT_SHARES, ServeLimits
from kvnet.protocol.session import SessionLimits
from kvnet.protocol.table_index import PAGE_COST_BYTES
from kvnet.protocol.tables import MAX_SIGNERS, TableLimits
from kvnet.trust.statement_bodies import PAGE_ARTIFACTS

DOCUMENT = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
CDDL = "\n".join(re.findall(r"^```cddl\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL))
RULES = dict(re.findall(r"^([a-z0-9][a-z0-9-]*) = (.*?)(?=^[a-z0-9][a-z0-9-]* = |\Z)", CDDL, re.MULTILINE | re.DOTALL))
ALL: tuple[Any, ...] = (*get_args(control.Message), *get_args(chunks.BulkAsk), *get_args(chunks.ChunkAnswer))


def rule_of(kind: Any) -> str:
    return str(kind.__struct_config__.tag).replace("_", "-")


@pytest.mark.parametrize("kind", [*ALL, artifacts.Match], ids=lambda kind: kind.__name__)
def test_every_message_has_the_fields_of_the_code(kind: Any) -> None:
    tag = kind.__struct_config__.tag
    rule = RULES["match" if tag is None else rule_of(kind)]
    fields = re.findall(r"^  ([a-z_]+):", rule, re.MULTILINE)
    if tag is not None:
        assert f'type: "{tag}"' in rule
        assert fields.pop(0) == "type"
    assert fields == list(kind.__struct_fields__)


def test_unions_of_the_document_are_those_of_the_code() -> None:
    def members(rule: str) -> set[str]:
        return set(re.findall(r"[a-z-]+", RULES[rule]))

    assert members("control-message") == {rule_of(kind) for kind in get_args(control.Message)}
    assert members("chunk-request") == {rule_of(chunks.GetChunks)}
    assert members("bulk-request") == {rule_of(kind) for kind in get_args(chunks.BulkAsk)}
    assert members("chunk-answer") == {rule_of(kind) for kind in get_args(chunks.ChunkAnswer)}


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("hello", f"versions: [1*{handshake.MAX_VERSIONS} "),
        ("hello", f"capabilities: [0*{handshake.MAX_CAPABILITIES} word]"),
        ("hello", f"at most {handshake.MAX_AGENT_LENGTH} characters"),
        ("slot", f".le {fields.MAX_SLOT}"),
        ("word", f"{{0,{fields.MAX_WORD_LENGTH - 1}}}"),
        ("reason", f"{{1,{fields.MAX_REASON_LENGTH}}}"),
        ("proof", f"[{PROOF_ENTRIES}*{PROOF_ENTRIES} hash]"),
        ("lookup", f"keys: [1*{artifacts.MAX_LOOKUP_KEYS} hash]"),
        ("lookup-reply", f"matches: [0*{artifacts.MAX_MATCHES} match]"),
        ("manifest-reply", f"(1..{limits.MAX_ENVELOPE_BYTES})"),
        ("chunk-list-reply", f"(1..{limits.PAGE_ENTRIES * limits.ENTRY_SIZE_BYTES})"),
        ("get-chunks", f"session: bstr .size {SESSION_ID_SIZE_BYTES}"),
        ("get-chunks", f"indices: [1*{chunks.MAX_CHUNKS_PER_REQUEST} u32]"),
        ("chunk", f".le {limits.MAX_CHUNK_BYTES}"),
        ("have", f"runs: [0*{artifacts.MAX_RUNS} u32]"),
        *(("get-chunks", f'"{purpose.value}"') for purpose in Purpose),
    ],
)
def test_bounds_in_the_document_are_those_of_the_code(rule: str, text: str) -> None:
    assert text in RULES[rule]


def test_limits_in_the_document_are_those_of_the_code() -> None:
    session, serve, fetch = SessionLimits(), ServeLimits(), FetchLimits()
    table = DOCUMENT.split("<!-- limits -->")[1].split("<!-- end -->")[0]
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", table, re.MULTILINE)[1:])
    assert rows == {
        "frame body": f"{MAX_FRAME_BYTES:,} bytes",
        "handshake": f"{session.handshake_s:.0f} s",
        "a request's answer": f"{session.request_s:.0f} s",
        "silence before a ping": f"{session.silence_s:.0f} s",
        "open requests, each direction": f"{session.requests_in_flight}",
        "request bytes of one peer": (
            f"{session.request_bytes_per_s:,.0f} a second, {session.request_burst_bytes:,.0f} at once"
        ),
        "control requests of one peer": f"{serve.requests_per_s:.0f} a second, {serve.request_burst:.0f} at once",
        "chunk requests of one peer being answered": f"{serve.chunk_requests_in_flight}",
        "chunk requests of all peers being answered": f"{serve.upload_slots}, shared evenly",
        "chunks of one request": f"{chunks.MAX_CHUNKS_PER_REQUEST}",
        "bytes asked for and not yet received": f"{fetch.max_window_bytes:,}",
        "namespaces of a node": f"{PROOF_ENTRIES}",
    }
    assert fetch.max_window_bytes <= STREAM_WINDOW_BYTES


def test_patience_in_the_document_is_that_of_the_code() -> None:
    fetch, announce = FetchLimits(), AnnounceLimits()
    soonest_s = announce.reprovide_s * (1 - announce.spread)
    latest_s = announce.reprovide_s * (1 + announce.spread)
    prose = " ".join(DOCUMENT.split())
    for text in (
        f"no byte for {fetch.idle_s:.0f} seconds while chunks are asked for, {fetch.idle_with_others_s:.0f} when",
        f"less than {fetch.min_rate_bytes_s / 1024:.0f} KiB a second over {fetch.rate_window_s:.0f} seconds",
        f"tried again after {fetch.retry_s:.0f} second, then {2 * fetch.retry_s:.0f}; after the third time",
        f"Up to {fetch.active_peers} providers are asked at the same time",
        f"after {TRIAL_S:.0f} seconds the slowest",
        f"The first request to each is for {fetch.start_chunks} chunks",
        f"or than {fetch.least_share:.0%}".replace("%", " %"),
        f"at most {fetch.duplicate_share:.0%}".replace("%", " %") + " of the bytes needed may be asked for twice",
        f"at most {GROWTH} times what it has delivered",
        f"tries those who may be back every {fetch.patient_retry_s:.0f} seconds, until {PATIENCE_S:.0f} seconds have",
        f"At most {fetch.max_providers} providers are remembered in one fetch",
        f"at least {announce.interval_s} seconds apart",
        f"again after {soonest_s / 60:.0f} to {latest_s / 60:.0f} minutes",
        f"after {announce.retry_s:.0f} seconds when it reached nobody",
        f"every {announce.verify_s:.0f} seconds one key is looked up",
    ):
        assert text in prose
    assert fetch.attempts == MAX_COMEBACKS == 3
    assert [int(WEIGHTS[purpose]) for purpose in Purpose] == [16, 4, 1]
    assert "in shares of 16, 4 and 1" in prose
    assert [SLOT_SHARES[purpose] for purpose in Purpose] == [1, 3 / 4, 1 / 2]
    assert "less than three quarters, or half, of its slots" in prose


def test_tables_and_lookups_in_the_document_are_those_of_the_code() -> None:
    pages, tables = PageLimits(), TableLimits()
    prose = " ".join(DOCUMENT.split())
    for text in (
        f"pages of at most {PAGE_ARTIFACTS} artifacts",
        f"changes may wait {pages.changes_s * 1000:.0f} ms for others",
        f"told again after {pages.period_s * 0.75 // 60:.0f} to {pages.period_s / 60:.0f} minutes",
        f"at most every {PageLimits(renew_s=1e9).period_s // 60:.0f} minutes",
        f"after three times that and {pages.life_s - 3 * pages.period_s:.0f} seconds",
        f"those of at most {'two' if MAX_SIGNERS == 2 else MAX_SIGNERS} signers",
        f"at most {tables.peer_bytes >> 20} MiB are kept, of all together {tables.total_bytes >> 20} MiB",
        f"{PAGE_COST_BYTES} bytes counted for each",
        f"at most {MAX_ASKED} in all",
        f"at most {artifacts.MAX_RECORDS} provider records of others",
        f"at most {MAX_DHT_QUERIES} of the prompt's checkpoint keys",
        f"Lies count half as much after {'an hour' if FADE_S == 3600 else FADE_S}",
    ):
        assert text in prose


def test_names_in_the_document_are_those_of_the_code() -> None:
    def first_column(heading: str) -> set[str]:
        section = DOCUMENT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
        return set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))

    assert first_column("1. Streams") == {kind.value for kind in StreamKind}
    assert first_column("10. Refusal reasons") == {reason.value for reason in refusals.RefusalReason}
    assert first_column("12. Versions") == {capability.value for capability in handshake.Capability}
    assert f"This document is version {handshake.PROTOCOL_VERSION}." in DOCUMENT
