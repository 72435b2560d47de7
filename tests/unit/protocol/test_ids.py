"""Peer ids and their text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnet.errors import UsageError
from kvnet.protocol.ids import MAX_PEER_ID_BYTES, PeerId, parse_peer_text, peer_text, short_peer_text

# The Ed25519 peer id in the libp2p specification's style: identity multihash of the protobuf of an all-zero key.
ED25519 = PeerId(bytes.fromhex("002408011220") + bytes(32))


def test_text_of_an_ed25519_peer_begins_as_usual() -> None:
    assert peer_text(ED25519).startswith("12D3KooW")
    assert len(peer_text(ED25519)) == 52


def test_text_is_that_of_the_reference_library() -> None:
    base58 = pytest.importorskip("base58")
    for data in (b"", b"\0", b"\0\0a", ED25519, bytes(range(42)), b"\xff" * 42):
        assert peer_text(PeerId(data)) == base58.b58encode(data).decode()


@given(st.binary(min_size=1, max_size=MAX_PEER_ID_BYTES))
def test_text_reads_back(data: bytes) -> None:
    assert parse_peer_text(peer_text(PeerId(data))) == data


@pytest.mark.parametrize("text", ["", "0", "O", "I", "l", "é", "a b", "1" * 59, "z" * 58, "1" * 43])
def test_what_is_no_peer_id_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_peer_text(text)


def test_short_text_is_the_part_in_which_peers_differ() -> None:
    other = PeerId(ED25519[:-1] + b"\1")
    assert short_peer_text(ED25519) != short_peer_text(other)
    assert peer_text(ED25519).endswith(short_peer_text(ED25519).removeprefix("…"))
