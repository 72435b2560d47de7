"""Who this node is and whom it believes, as the use cases see it."""

from dataclasses import dataclass, field
from typing import Protocol

from kvnet.exchange.measured import Measurements
from kvnet.trust.keys import PublisherKey
from kvnet.trust.namespace import Namespace
from kvnet.trust.policy import TrustPolicy


class Identity(Protocol):
    """Read afresh at every use, so that a key trusted or revoked a moment ago already counts."""

    def signing_key(self) -> PublisherKey:
        """The publisher key that signs what this node adds."""
        ...

    def policy(self) -> TrustPolicy:
        """Whose artifacts may be used."""
        ...

    def namespaces(self) -> tuple[Namespace, ...]:
        """Every namespace this node is a member of; the first is its ``mine``."""
        ...

    def former(self) -> tuple[Namespace, ...]:
        """The same namespaces under lookup secrets that were replaced of late, the newest first; see `Namespace`."""
        ...

    @property
    def numerics(self) -> Measurements:
        """What other machines were measured to compute."""
        ...


@dataclass(frozen=True, slots=True)
class FixedIdentity:
    """An identity that never changes, for one-shot work."""

    key: PublisherKey
    trust: TrustPolicy
    members: tuple[Namespace, ...]
    past: tuple[Namespace, ...] = ()
    numerics: Measurements = field(default_factory=Measurements, compare=False)

    def signing_key(self) -> PublisherKey:
        """The publisher key that signs what this node adds."""
        return self.key

    def policy(self) -> TrustPolicy:
        """Whose artifacts may be used."""
        return self.trust

    def namespaces(self) -> tuple[Namespace, ...]:
        """Every namespace of this identity; the first is ``mine``."""
        return self.members

    def former(self) -> tuple[Namespace, ...]:
        """Former lookup secrets of this identity's namespaces."""
        return self.past
