"""``kvnet simulate``: what it takes a machine for."""

import sys

import pytest

from tests.e2e.conftest import Kvnet

pytestmark = pytest.mark.e2e


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac's chip is in the tables")
def test_a_machine_that_no_table_knows_is_told_what_it_is_taken_for(kvnet: Kvnet) -> None:
    short = ("simulate", "conversation_excerpt.jsonl", "--requests", "10")
    taken = kvnet(*short)
    assert taken.code == 0, taken.stderr
    assert f"taken for m4; {kvnet.typed('bench calibrate')}" in taken.stderr
    named = kvnet(*short, "--chip", "m2")
    assert (named.code, "taken for" in named.stderr) == (0, False)
    nowhere = kvnet("simulate", "nowhere.jsonl")
    assert (nowhere.code, "conversation_excerpt.jsonl" in nowhere.stderr) == (2, True)
