"""The handshake of a control session: who speaks which version, and which namespaces both are in.

Each side sends ``hello`` and ``challenge`` at once, and its ``proof`` when it has the peer's challenge. With the peer's
proof checked the session is open. The machine reads no clock and draws no random numbers: the random bytes are in its
config.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from kvnet.errors import ConfigError, ProtocolViolationError, UnsupportedVersionError, UsageError
from kvnet.format.hashes import derive_key
from kvnet.protocol.escaping import escape_text
from kvnet.protocol.ids import PeerId
from kvnet.protocol.membership import (
    NONCE_SIZE_BYTES,
    PADDING_SIZE_BYTES,
    PROOF_ENTRIES,
    Occasion,
    Role,
    make_proof,
    shared_slots,
)
from kvnet.protocol.messages.control import Message
from kvnet.protocol.messages.handshake import MAX_AGENT_LENGTH, PROTOCOL_VERSION, Capability, Challenge, Hello, Proof
from kvnet.trust.namespace import Namespace

SESSION_ID_SIZE_BYTES = 16
"""Both ends derive it; chunk requests name their session by it."""
_SESSION_CONTEXT = "kvnet 2026-11 control session"


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """What a session starts from.

    Attributes:
        role: who opened the control stream.
        own: our peer id.
        other: the peer's, as the transport has authenticated it.
        namespaces: ours, at most 8; the indices in `SessionOpened.slots` are positions here.
        nonce: 32 fresh random bytes.
        padding: 256 fresh random bytes.
        capabilities: what we offer.
        agent: program and version in words.
    """

    role: Role
    own: PeerId
    other: PeerId
    namespaces: Sequence[Namespace]
    nonce: bytes
    padding: bytes
    capabilities: Sequence[str] = (Capability.SERVE,)
    agent: str = "kvnet"


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """The handshake is done.

    Attributes:
        session_id: 16 bytes, the same on both sides; chunk requests name it.
        slots: slot -> index in the config's namespaces, for those both sides have proved; may be empty.
        namespaces: slot -> the namespace itself; what serving goes by, so that a peer that has proved a namespace
            this node has left, or its old lookup secret, gets nothing out of the ones it is in now.
        version: of the protocol, the highest both speak.
        capabilities: the peer's.
        agent: the peer's, escaped.
    """

    session_id: bytes
    slots: Mapping[int, int]
    namespaces: Mapping[int, Namespace]
    version: int
    capabilities: frozenset[str]
    agent: str


class _Phase(Enum):
    """What is expected of the peer next."""

    HELLO = "hello"
    CHALLENGE = "challenge"
    PROOF = "proof"


class Handshake:
    """One side of one handshake; see the module.

    Args:
        config: who talks to whom.

    Raises:
        UsageError: a config that cannot be (own peer id on both ends, a nonce of another length).
        ConfigError: more than 8 namespaces.

    Attributes:
        opened: its result; None before it is done.
        occasion: what binds proofs to this session, seen from this side; None before the peer's challenge.
    """

    def __init__(self, config: SessionConfig) -> None:
        _check_config(config)
        self._config = config
        self._phase = _Phase.HELLO
        self._capabilities: frozenset[str] = frozenset()
        self._agent = ""
        self._sent_proof: list[bytes] = []
        self.opened: SessionOpened | None = None
        self.occasion: Occasion | None = None

    def begin(self) -> tuple[Hello, Challenge]:
        """What to send first."""
        config = self._config
        hello = Hello(
            versions=(PROTOCOL_VERSION,),
            capabilities=tuple(config.capabilities),
            agent=config.agent[:MAX_AGENT_LENGTH],
        )
        return hello, Challenge(nonce=config.nonce)

    def receive(self, message: Message) -> Proof | None:
        """Take in the peer's next message; returns what to send then.

        Raises:
            ProtocolViolationError: a message out of order, or one that cannot be.
            UnsupportedVersionError: no common protocol version.
        """
        match self._phase, message:
            case _Phase.HELLO, Hello():
                self._on_hello(message)
                return None
            case _Phase.CHALLENGE, Challenge():
                return self._on_challenge(message)
            case _Phase.PROOF, Proof():
                self._on_proof(message)
                return None
        raise ProtocolViolationError(f"expected {self._phase.value}, found a {type(message).__name__} message")

    def _on_hello(self, hello: Hello) -> None:
        if any(first >= second for first, second in pairwise(hello.versions)):
            raise ProtocolViolationError("expected protocol versions in ascending order, each once")
        if PROTOCOL_VERSION not in hello.versions:
            raise UnsupportedVersionError(
                f"expected a peer that speaks protocol version {PROTOCOL_VERSION}, found one that speaks "
                f"{', '.join(map(str, hello.versions))}",
                hint="run the same version of kvnet on both machines",
            )
        self._capabilities = frozenset(hello.capabilities)
        self._agent = escape_text(hello.agent)
        self._phase = _Phase.CHALLENGE

    def _on_challenge(self, challenge: Challenge) -> Proof:
        config = self._config
        if challenge.nonce == config.nonce:
            raise ProtocolViolationError("expected a nonce of the peer's own, found ours sent back")
        nonces = (config.nonce, challenge.nonce)
        if config.role is Role.RESPONDER:
            nonces = (challenge.nonce, config.nonce)
        self.occasion = Occasion(config.role, config.own, config.other, *nonces)
        self._sent_proof = make_proof(config.namespaces, self.occasion, config.padding)
        self._phase = _Phase.PROOF
        return Proof(entries=tuple(self._sent_proof))

    def _on_proof(self, proof: Proof) -> None:
        occasion = self.occasion
        assert occasion is not None  # noqa: S101 - the phase before has set it
        slots = shared_slots(self._sent_proof, proof.entries, self._config.namespaces, occasion)
        of_initiator = occasion if occasion.role is Role.INITIATOR else occasion.reversed()
        self.opened = SessionOpened(
            session_id=derive_key(_SESSION_CONTEXT, of_initiator.encode())[:SESSION_ID_SIZE_BYTES],
            slots=slots,
            namespaces={slot: self._config.namespaces[index] for slot, index in slots.items()},
            version=PROTOCOL_VERSION,
            capabilities=self._capabilities,
            agent=self._agent,
        )


def _check_config(config: SessionConfig) -> None:
    if config.own == config.other:
        raise UsageError("expected two different peer ids for a control session, found the same twice")
    if len(config.nonce) != NONCE_SIZE_BYTES or len(config.padding) != PADDING_SIZE_BYTES:
        raise UsageError(
            f"expected {NONCE_SIZE_BYTES} + {PADDING_SIZE_BYTES} random bytes for a control session, "
            f"found {len(config.nonce)} + {len(config.padding)}"
        )
    if len(config.namespaces) > PROOF_ENTRIES:
        raise ConfigError(f"expected at most {PROOF_ENTRIES} namespaces on one node, found {len(config.namespaces)}")
