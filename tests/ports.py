"""Ports for what has to be told one before it listens, or has to listen at the same one again."""

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """A free port that the system gives nobody else meanwhile: it hands out those from 32,768 on, or 49,152."""
    while True:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            return port
