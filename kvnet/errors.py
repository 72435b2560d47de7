"""Every error kvnet raises on purpose, in one tree.

Each class carries a stable ``code`` (for logs, ``--json`` and tests), the ``exit_code`` the command line
ends with, and each instance an optional ``hint`` that names the next step::

    KvnetError                      1   unexpected
    ├── UsageError                  2   a malformed argument, hash, ticket or name
    │   ├── ConfigError             2   a setting that cannot be used
    │   ├── UnknownModelError       2   no such model, or none chosen
    │   ├── UnknownNameError        2   no such named context on this node
    │   └── AmbiguousHashError      2   a short hash that fits several artifacts
    ├── MalformedError             10   bytes from a file or a peer that break the format
    │   ├── ProtocolViolationError 10   a peer broke the protocol
    │   └── UnsupportedVersionError 10  a version this build does not read
    ├── IntegrityError             20   bytes that do not match their hash
    ├── TrustError                 30   a signature, signer or policy that says no
    ├── CompatibilityError         40   K/V that this model or build cannot use
    ├── StoreError                 50   the store cannot do this
    │   ├── DataDirLockedError     50   another process owns the data directory
    │   ├── StoreFullError         50   quota or disk does not allow it
    │   ├── StoreAwayError         50   the store's drive is not there
    │   ├── RamOnlyError           50   it would be kept, and this node keeps nothing
    │   └── NotInStoreError        50   the artifact or chunk is not held here
    ├── NetworkError               60   the network cannot do this
    │   ├── NotFoundError          60   nobody reachable has it
    │   ├── PeerUnreachableError   60   a peer does not answer
    │   ├── PeerRefusedError       60   a peer answered with a refusal
    │   └── PortInUseError         60   a port asked for is taken
    ├── EngineError                80   the engine cannot do this
    │   ├── EngineCrashedError     80   the engine process ended by itself
    │   ├── PromptError            80   a prompt that the chat template does not take
    │   ├── NoLiveStateError       80   nothing in RAM to export, and computing was not asked for
    │   ├── BusyError              80   no room for this request within the time it may wait
    │   │   └── CrowdedError       80   the memory it needs is another loaded model's
    │   └── OverBudgetError        80   more memory than there is
    │       └── WindowError        80   more tokens than the model's window holds
    ├── NodeError                  70   the running node does not do what it was asked
    │   ├── NodeGoneError          70   it ended before that was done
    │   └── NodeSilentError        70   it gives no answer
    └── InterruptedByUserError    130   Ctrl-C or a stop request
"""

from typing import ClassVar, Final

ELSEWHERE: Final = "\u00a0"
"""Between ``kvnet`` and the verb: a command that is meant for another machine. What is shown has a space there."""


def elsewhere(command: str) -> str:
    """A command for a hint that is to be run on another machine, where this one's data directory means nothing."""
    return command.replace("kvnet ", f"kvnet{ELSEWHERE}")


class KvnetError(Exception):
    """Base of every error raised on purpose.

    Args:
        message: what was expected and what was found, with units.
        hint: the next step for the person reading it; may name a command.
    """

    code: ClassVar[str] = "unexpected"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message


class UsageError(KvnetError):
    """An argument, hash, ticket or name that is malformed."""

    code = "usage"
    exit_code = 2


class ConfigError(UsageError):
    """A setting that cannot be used."""

    code = "config"


class UnknownModelError(UsageError):
    """No such model on this machine, or none was chosen and several could be."""

    code = "unknown_model"


class UnknownNameError(UsageError):
    """No named context of that name, or no such version of it, on this node."""

    code = "unknown_name"


class AmbiguousHashError(UsageError):
    """A short hash that fits several artifacts."""

    code = "ambiguous_hash"


class MalformedError(KvnetError):
    """Bytes from a file or a peer that break the format."""

    code = "malformed"
    exit_code = 10


class ProtocolViolationError(MalformedError):
    """A peer sent a message that the protocol does not allow at that point."""

    code = "protocol_violation"


class UnsupportedVersionError(MalformedError):
    """A format or protocol version that this build does not read."""

    code = "unsupported_version"


class IntegrityError(KvnetError):
    """Bytes that do not match the hash they were promised under."""

    code = "integrity"
    exit_code = 20


class TrustError(KvnetError):
    """A signature that does not verify, or a signer that the policy does not accept."""

    code = "trust"
    exit_code = 30


class CompatibilityError(KvnetError):
    """K/V that this model or this build cannot use."""

    code = "incompatible"
    exit_code = 40


class StoreError(KvnetError):
    """The store cannot do what was asked."""

    code = "store"
    exit_code = 50


class DataDirLockedError(StoreError):
    """Another process owns the data directory."""

    code = "data_dir_locked"


class StoreFullError(StoreError):
    """The quota, or the free space to be left, does not allow it."""

    code = "store_full"


class StoreAwayError(StoreError):
    """The drive that the store is on is not there, or fails at everything; it is used again once it is back."""

    code = "store_away"


class RamOnlyError(StoreError):
    """It is to be kept, and the node was told to keep nothing on disk."""

    code = "ram_only"


class NotInStoreError(StoreError):
    """The artifact or chunk is not held here."""

    code = "not_in_store"


class NetworkError(KvnetError):
    """The network cannot do what was asked."""

    code = "network"
    exit_code = 60


class NotFoundError(NetworkError):
    """Nobody who could be reached has it."""

    code = "not_found"


class PeerUnreachableError(NetworkError):
    """A peer does not answer; ``answered_by`` is who answers in its place, a raw peer id, where somebody does."""

    code = "peer_unreachable"

    def __init__(self, message: str, *, hint: str = "", answered_by: bytes | None = None) -> None:
        super().__init__(message, hint=hint)
        self.answered_by = answered_by


class PeerRefusedError(NetworkError):
    """A peer answered with a refusal; ``reason`` is its stable code."""

    code = "peer_refused"

    def __init__(self, message: str, *, reason: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


class PortInUseError(NetworkError):
    """A port that was asked for is taken."""

    code = "port_in_use"


class EngineError(KvnetError):
    """The engine cannot do what was asked."""

    code = "engine"
    exit_code = 80


class EngineCrashedError(EngineError):
    """The engine process ended by itself; only the request it was running is lost."""

    code = "engine_crashed"


class PromptError(EngineError):
    """Messages, tools or a prompt that the model's chat template does not take."""

    code = "prompt"


class NoLiveStateError(EngineError):
    """An export that was not to compute anything found no live cache that covers it."""

    code = "no_live_state"


class BusyError(EngineError):
    """What runs leaves no room for this request within the time it may wait."""

    code = "busy"


class CrowdedError(BusyError):
    """Alone on the device the request would fit; other loaded models have the memory it needs."""

    code = "crowded"


class OverBudgetError(EngineError):
    """More memory or a longer prompt than the device or the model's window allows."""

    code = "over_budget"


class WindowError(OverBudgetError):
    """A prompt and its answer that are longer than the model's window."""

    code = "over_window"


class NodeError(KvnetError):
    """The running node does not do what it was asked."""

    code = "node"
    exit_code = 70


class NodeGoneError(NodeError):
    """The running node ended before the operation did."""

    code = "node_gone"


class NodeSilentError(NodeError):
    """The running node gives no answer: it is stopped, hangs, or has far too much to do."""

    code = "node_silent"


class InterruptedByUserError(KvnetError):
    """Ctrl-C, or a stop request."""

    code = "interrupted"
    exit_code = 130
