"""What ``kvnet fetch`` says at its end."""

import pytest

from kvnet.exchange.events import FetchProgress
from kvnet.protocol.fetch_peer import DropReason
from kvnet.protocol.ids import PeerId
from kvnet_node.commands.fetch import _LEFT, _part, next_step
from kvnet_node.operations.fetching import shown_text
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
