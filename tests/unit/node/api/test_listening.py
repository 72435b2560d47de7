"""Where the endpoint listens."""

import os
import socket

import pytest

from kvnet.errors import ConfigError, PortInUseError
from kvnet_node.api.listening import MIN_TOKEN_CHARS, check_exposure, open_endpoint, parse_address

pytestmark = pytest.mark.loopback


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:5863", ("127.0.0.1", 5863)),
        ("localhost:1", ("127.0.0.1", 1)),
        ("5863", ("127.0.0.1", 5863)),
        (":5863", ("127.0.0.1", 5863)),
        ("[::1]:0", ("::1", 0)),
        ("*:5863", ("0.0.0.0", 5863)),
    ],
)
def test_a_port_alone_is_on_this_machine(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "host", "example.org:80", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"api\.listen"):
        parse_address(text)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5"])
def test_beyond_this_machine_a_token_that_cannot_be_guessed_is_needed(host: str) -> None:
    for token in ("", "short"):
        with pytest.raises(ConfigError, match=r"api\.token"):
            check_exposure([("127.0.0.1", 1), (host, 1)], token)
    check_exposure([(host, 1)], "x" * MIN_TOKEN_CHARS)
    check_exposure([("127.0.0.1", 1), ("::1", 1)], "")


def test_a_taken_default_port_gives_way_and_says_whose_it_is() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        listen = (f"127.0.0.1:{port}",)
        found = open_endpoint(listen, asked=False, token="")
        try:
            assert found.addresses[0][1] not in {0, port}
            assert found.urls == [f"http://127.0.0.1:{found.addresses[0][1]}"]
            assert str(port) in found.moved
            assert f"process {os.getpid()}" in found.moved
        finally:
            found.sockets[0].close()
        with pytest.raises(PortInUseError, match=f"process {os.getpid()}"):
            open_endpoint(listen, asked=True, token="")
