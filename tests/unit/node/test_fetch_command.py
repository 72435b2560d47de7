"""What ``kvnet fetch`` says at its end."""

import msgspec
import pytest

from kvnet.exchange.events import FetchProgress
from kvnet.protocol.fetch_peer import DropReason
from kvnet.protocol.ids import PeerId
from kvnet_node.commands.fetch import _LEFT, _part, _render, next_step
from kvnet_node.operations.fetching import held_text, shown_text
from kvnet_node.operations.requests import FetchResult, Provided


@pytest.mark.parametrize(
    ("dropped", "said"), [("", ""), ("unknown", "; left: it does not have this"), ("busy", "; left: busy")]
)
def test_why_a_peer_was_left_is_said_in_words(dropped: str, said: str) -> None:
    text = _part(Provided("12D3", "/ip4/127.0.0.1/tcp/1", 0, 0, dropped=dropped))
    assert text == f"0 B in 0 chunks from 12D3 /ip4/127.0.0.1/tcp/1{said}"


def test_a_member_that_brought_something_is_called_by_its_name() -> None:
    part = Provided("12D3", "/ip4/127.0.0.1/tcp/1", 2000, 2, path="bulk", name="studio (…AjAUFcpJ)")
    assert _part(part) == "2.00 kB in 2 chunks from studio (…AjAUFcpJ) over bulk"


def test_only_reasons_that_there_are_have_words() -> None:
    assert set(_LEFT) <= {each.value for each in DropReason}


@pytest.mark.parametrize(("waiting", "said"), [(False, ""), (True, "; waiting for a peer that has the rest")])
def test_fetch_that_nobody_serves_just_now_says_that_it_waits(waiting: bool, said: str) -> None:
    event = FetchProgress(10, 40, 1, 4, PeerId(b""), held_chunks=2, waiting=waiting)
    assert shown_text(event) == f"3/6 chunks verified{said}"


@pytest.mark.parametrize(("waiting", "said"), [(False, ""), (True, "; waiting for a peer that has the rest")])
def test_fetch_to_which_nothing_comes_says_for_how_long(waiting: bool, said: str) -> None:
    event = FetchProgress(10, 40, 1, 4, PeerId(b""), waiting=waiting, silent_s=8.4)
    assert shown_text(event) == f"1/4 chunks verified{said}; nothing has come for 8 s"


def test_fetch_that_gives_way_to_a_prompt_says_so() -> None:
    event = FetchProgress(10, 40, 1, 4, PeerId(b""), gives_way=True)
    assert shown_text(event) == "1/4 chunks verified; a prompt gets what it needs of it first"


@pytest.mark.parametrize(
    ("held", "resumed", "said"),
    [
        (3, 3, "resumed: 3 of 10 chunks were here"),
        (2, 0, "2 of 10 chunks are here as part of other artifacts"),
        (5, 3, "resumed: 3 of 10 chunks were here, and 2 as part of other artifacts"),
    ],
)
def test_chunks_that_are_here_otherwise_are_not_called_resumed(held: int, resumed: int, said: str) -> None:
    event = FetchProgress(0, 70, 0, 10 - held, PeerId(b""), held_chunks=held, resumed_chunks=resumed)
    assert held_text(event) == said


def test_what_did_not_have_to_come_is_told_by_why() -> None:
    result = FetchResult(
        "bafyr4i", 1, 10, 4, 1.0, [], "kvpub1", "", complete=True, resumed_chunks=3, shared_chunks=2, meanwhile_chunks=1
    )
    assert _render(result).splitlines()[1].endswith("; signed by kvpub1")
    assert _render(msgspec.structs.replace(result, signer_name="mini")).splitlines()[1].endswith("; signed by mini")
    assert _render(result).splitlines()[2:] == [
        "3 chunks of 10 were here from an earlier fetch",
        "2 chunks of 10 were here as part of other artifacts",
        "1 chunk of 10 came for prompts meanwhile",
    ]


@pytest.mark.parametrize(
    ("here", "said", "unsaid"),
    [
        ("yes", "kvnet ask lamp", "--model"),
        ("likely", 'kvnet ask lamp "…" --model qwen;', "MODEL"),
        ("perhaps", "--model MODEL", "needs the model"),
        ("no", "needs the model it was computed with: qwen", "kvnet ask"),
    ],
)
def test_the_next_step_after_a_fetch_is_one_that_works(here: str, said: str, unsaid: str) -> None:
    result = FetchResult("bafyr4i", 1, 1, 1, 1.0, [], "kvpub1", "lamp", complete=True, model="qwen", model_here=here)
    assert said in next_step(result)
    assert unsaid not in next_step(result)
