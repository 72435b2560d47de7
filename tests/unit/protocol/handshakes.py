"""Two sessions joined by nothing but bytes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvnet.format.hashes import derive_key
from kvnet.protocol.framing import encode_frame
from kvnet.protocol.handshake import SessionConfig
from kvnet.protocol.ids import PeerId
from kvnet.protocol.membership import Role
from kvnet.protocol.messages.base import encode_message
from kvnet.protocol.session import ControlSession, Event, SessionLimits
from kvnet.trust.namespace import Namespace

ALICE = PeerId(b"\x00\x24\x08\x01\x12\x20" + b"a" * 32)
BOB = PeerId(b"\x00\x24\x08\x01\x12\x20" + b"b" * 32)
AGENT = "kvnet/test"
MALLORY = PeerId(b"\x00\x24\x08\x01\x12\x20" + b"m" * 32)


def random_bytes(label: str, size: int) -> bytes:
    """Bytes that look random and are the same in every run."""
    return b"".join(derive_key("kvnet tests", f"{label} {number}".encode()) for number in range(size // 32))


def config(
    role: Role,
    own: PeerId,
    other: PeerId,
    namespaces: Sequence[Namespace],
    *,
    label: str = "",
    agent: str = AGENT,
) -> SessionConfig:
    label = f"{label} {own!r} {other!r} {role}"
    nonce, padding = random_bytes("nonce" + label, 32), random_bytes("padding" + label, 256)
    return SessionConfig(role, own, other, namespaces, nonce, padding, agent=agent)


def session(
    role: Role,
    own: PeerId,
    other: PeerId,
    namespaces: Sequence[Namespace],
    *,
    label: str = "",
    agent: str = AGENT,
) -> ControlSession:
    return ControlSession(config(role, own, other, namespaces, label=label, agent=agent), now=0.0)


@dataclass
class Pair:
    """Alice, who opened the stream, and Bob."""

    alice: ControlSession
    bob: ControlSession
    now: float = 0.0
    alice_saw: list[Event] = field(default_factory=list)
    bob_saw: list[Event] = field(default_factory=list)

    @classmethod
    def of(cls, alice: Sequence[Namespace], bob: Sequence[Namespace], limits: SessionLimits | None = None) -> "Pair":
        return cls(
            ControlSession(config(Role.INITIATOR, ALICE, BOB, alice), 0.0, limits),
            ControlSession(config(Role.RESPONDER, BOB, ALICE, bob), 0.0, limits),
        )

    def pump(self) -> "Pair":
        """Carry bytes both ways until nobody has anything to say."""
        while True:
            to_bob, to_alice = self.alice.take_output(), self.bob.take_output()
            if not to_bob and not to_alice:
                return self
            if to_bob:
                self.bob_saw += self.bob.receive(to_bob, self.now)
            if to_alice:
                self.alice_saw += self.alice.receive(to_alice, self.now)

    def opened(self) -> "Pair":
        self.pump()
        assert self.alice.opened is not None
        assert self.bob.opened is not None
        self.alice_saw.clear()
        self.bob_saw.clear()
        return self


def slot_of(pair: Pair) -> int:
    assert pair.alice.opened is not None
    [slot] = pair.alice.opened.slots
    return slot


def frame(message: Any) -> bytes:
    return encode_frame(encode_message(message))
