import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnet.errors import UsageError
from kvnet.format.hashes import ArtifactHash, artifact_text
from kvnet.format.ticket import Ticket, format_ticket, parse_ticket
from tests.unit.format.examples import ROUNDS

HASH = ArtifactHash(bytes(range(32)))
ADDRESS = "/ip4/192.0.2.1/tcp/5864/p2p/12D3KooWExample"
ADDRESSES = st.text("abcXYZ019/.:_%=+-", max_size=60).map(lambda rest: "/a" + rest)


@given(st.binary(min_size=32, max_size=32), st.lists(ADDRESSES, max_size=8))
def test_every_ticket_round_trips(digest: bytes, addresses: list[str]) -> None:
    ticket = Ticket(ArtifactHash(digest), tuple(addresses))
    assert parse_ticket(format_ticket(ticket)) == ticket


def test_a_bare_artifact_hash_is_a_ticket_without_addresses() -> None:
    assert parse_ticket(artifact_text(HASH)) == Ticket(HASH)
    assert format_ticket(Ticket(HASH)) == "kvnet:" + artifact_text(HASH)


def test_a_ticket_needs_no_quoting_in_a_shell() -> None:
    text = format_ticket(Ticket(HASH, (ADDRESS, "/ip6/fe80::1%25en0/tcp/5864")))
    assert not set(text) & set(" \t\n'\"\\$`&|;<>()*?[]{}!#~")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kvnet:",
        "kvnet:" + artifact_text(HASH)[:-1],
        "KVNET:" + artifact_text(HASH),
        "kvnet:" + artifact_text(HASH) + ",",
        "kvnet:" + artifact_text(HASH) + ",ip4/192.0.2.1",
        "kvnet:" + artifact_text(HASH) + f",{ADDRESS},,{ADDRESS}",
        "kvnet:" + artifact_text(HASH) + ",/ip4/1.2.3.4 /tcp/1",
        "kvnet:" + artifact_text(HASH) + ",/ip4/1.2.3.4\n",
        "kvnet:" + artifact_text(HASH) + ",/" + "a" * 256,
        "kvnet:" + artifact_text(HASH) + f",{ADDRESS}" * 9,
        "kvnet:" + artifact_text(HASH) + f",{ADDRESS}" * 1000,
        artifact_text(HASH) + f",{ADDRESS}",
    ],
)
def test_malformed_tickets_are_refused_as_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_ticket(text)
    assert caught.value.exit_code == 2


def test_a_ticket_for_a_truncated_hash_cannot_be_made() -> None:
    with pytest.raises(UsageError, match="32 bytes"):
        Ticket(ArtifactHash(bytes(31)))


@ROUNDS
def test_damaged_tickets_are_refused_or_mean_what_they_say(rounds: int) -> None:
    rng = random.Random(3)
    good = format_ticket(Ticket(HASH, (ADDRESS, ADDRESS)))
    for _ in range(rounds):
        letters = list(good)
        for _change in range(rng.randrange(1, 4)):
            letters[rng.randrange(len(letters))] = chr(rng.randrange(1, 0x250))
        text = "".join(letters)[: rng.randrange(1, len(letters) + 1)]
        try:
            ticket = parse_ticket(text)
        except UsageError:
            continue
        assert format_ticket(ticket) in (text, "kvnet:" + text)
