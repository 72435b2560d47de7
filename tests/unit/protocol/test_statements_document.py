"""``docs/protocol.md`` and the code say the same of statements."""

import re
from typing import Any

import pytest

from kvnet.protocol import gossip
from kvnet.protocol.gossip import GossipLimits
from kvnet.protocol.messages.statements import MAX_KNOWN
from kvnet.trust import statement_shares as shares
from kvnet.trust import statements
from kvnet.trust.authority import MAX_ROTATIONS
from kvnet.trust.envelope import StatementType
from kvnet.trust.statement_bodies import BODIES, HeldEntry, SealedSecret, Statement
from tests.unit.protocol.test_document import DOCUMENT, RULES

SECTION = DOCUMENT.split("## 17. Statements")[1].split("\n## ")[0]
PROSE = " ".join(SECTION.split())
NAMES = {StatementType.PROVIDER: "provider-record"}
COMMON = list(Statement.__struct_fields__)


def fields_of(rule: str) -> list[str]:
    return re.findall(r"^  ([a-z_]+):", rule, re.MULTILINE)


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.value)
def test_every_statement_has_the_fields_of_the_code(kind: StatementType) -> None:
    rule = RULES[NAMES.get(kind, kind.value)]
    assert "  statement,\n" in rule
    assert COMMON + fields_of(rule) == list(BODIES[kind].__struct_fields__)
    assert f"`{kind.value}`" in SECTION


@pytest.mark.parametrize(("name", "kind"), [("held-entry", HeldEntry), ("sealed-secret", SealedSecret)])
def test_what_is_in_statements_has_the_fields_of_the_code(name: str, kind: Any) -> None:
    assert fields_of(RULES[name]) == list(kind.__struct_fields__)


def test_what_all_statements_have_are_the_fields_of_the_code() -> None:
    common = SECTION.split("statement = (")[1].split(")\n")[0]
    assert fields_of(common) == COMMON


def test_limits_of_statements_in_the_document_are_those_of_the_code() -> None:
    limits = GossipLimits()
    table = SECTION.split("<!-- statement limits -->")[1].split("<!-- end -->")[0]
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", table, re.MULTILINE)[1:])
    assert rows == {
        "statements of one peer that were not asked for": (
            f"{limits.statements_per_s:.0f} a second, {limits.statements_burst:,.0f} at once"
        ),
        "`get_statements` of one peer": f"{limits.asks_per_s:.0f} a second, {limits.asks_burst:.0f} at once",
        "bytes of one peer that wait to be checked": f"{limits.peer_queued_bytes:,}",
        "bytes of all peers that wait to be checked": f"{limits.queued_bytes:,}",
        "statements kept in one namespace": f"{shares.MAX_IN_NAMESPACE:,}",
        "of one member there": (
            f"{shares.MAX_OF_SIGNER:,}, of them {shares.MAX_NOTES_OF_SIGNER} tags, removals and attestations"
        ),
        "of one signer that is no member there": f"{shares.MAX_OF_STRANGER}",
        "of all such signers together": f"{shares.MAX_OF_STRANGERS}",
    }


@pytest.mark.parametrize(
    "text",
    [
        f"at most {statements.MAX_STATEMENT_BYTES:,} bytes",
        f"may differ by {statements.CLOCK_SKEW_S} seconds",
        f"at most {statements.MAX_PROVIDER_LIFE_S // 3600} hours",
        f"an invitation at most {statements.MAX_INVITATION_LIFE_S // 86400} days",
        f"fewer than {MAX_KNOWN:,} names",
        f"every {gossip.RECONCILE_S:.0f} s, a quarter more or less",
        f"until {gossip.MAX_IDLE_PAGES} in a row had nothing that counts, at most {gossip.MAX_PAGES_ASKED} pages",
        f"again after {gossip.ASK_AGAIN_S:.0f}, 10, 20 s and so on up to {gossip.RECONCILE_S:.0f}",
        f"Up to {MAX_ROTATIONS} rotations",
        f"more than {statements.CLOCK_SKEW_S} s after the rotation",
    ],
)
def test_figures_in_the_text_are_those_of_the_code(text: str) -> None:
    assert text in PROSE
