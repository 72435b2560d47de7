"""What ``kvnet pin`` and ``kvnet unpin`` say."""

import io
import json

import pytest

from kvnet_node.commands.artifacts import show_pin
from kvnet_node.operations.requests import PinResult
from kvnet_node.output import Output


def shown(result: PinResult, *, as_json: bool = False) -> str:
    out = io.StringIO()
    show_pin(Output(json=as_json, stdout=out), result)
    return out.getvalue()


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (PinResult("bafyr4i1", pinned=True), "pinned bafyr4i1\n"),
        (PinResult("bafyr4i1", pinned=True, names=["project@1"]), "pinned project@1 (bafyr4i1)\n"),
        (PinResult("bafyr4i1", pinned=False, names=["a@1", "b@2"]), "unpinned a@1, b@2 (bafyr4i1)\n"),
    ],
)
def test_what_is_pinned_is_called_by_its_names(result: PinResult, text: str) -> None:
    assert shown(result) == text


def test_a_program_is_told_the_artifact_alone() -> None:
    told = json.loads(shown(PinResult("bafyr4i1", pinned=True, names=["project@1"]), as_json=True))
    assert told == {"type": "pin", "artifact": "bafyr4i1", "pinned": True}
