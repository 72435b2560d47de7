"""Whose artifacts may be used.

A hash says which bytes arrived, a signature who vouches for them; neither says that they are an honest prefill. That
is a matter of whom one believes, and it is judged at every use, so that trust given or taken counts at once. What an
artifact took over from others counts too: a policy must accept the publisher of every span in ``derived_from``.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, get_args

from kvnet.errors import ConfigError
from kvnet.format.manifest import Manifest
from kvnet.trust.keys import publisher_text

PolicyName = Literal["own", "trusted"]


class RefusalCode(StrEnum):
    """Why an artifact may not be used; stable, for counters and ``--json``."""

    REVOKED_PUBLISHER = "revoked_publisher"
    NOT_OWN = "not_own"
    UNTRUSTED_PUBLISHER = "untrusted_publisher"
    DERIVED_FROM_REVOKED = "derived_from_revoked"
    DERIVED_FROM_NOT_OWN = "derived_from_not_own"
    DERIVED_FROM_UNTRUSTED = "derived_from_untrusted"


@dataclass(frozen=True, slots=True)
class Accepted:
    """The artifact may be used.

    Attributes:
        publisher: who signed it.
        own: whether that is a key of this node.
    """

    publisher: bytes
    own: bool


@dataclass(frozen=True, slots=True)
class Refusal:
    """The artifact may not be used.

    Attributes:
        code: one of `RefusalCode`, as text.
        text: the reason in words.
        publisher: the publisher it is about: the signer's, or that of a span.
    """

    code: str
    text: str
    publisher: bytes


@dataclass(frozen=True, slots=True)
class TrustPolicy:
    """Whom this node believes.

    Args:
        name: ``own``: only this node's own keys; ``trusted``: also the trusted publishers.
        own: publisher ids of this node.
        trusted: publisher ids its owner trusts.
        revoked: publisher ids that count for nothing any more, own and trusted ones included.

    Raises:
        ConfigError: no such policy.
    """

    name: PolicyName
    own: frozenset[bytes]
    trusted: frozenset[bytes]
    revoked: frozenset[bytes] = frozenset()

    def __post_init__(self) -> None:
        if self.name not in get_args(PolicyName):
            names = " or ".join(get_args(PolicyName))
            raise ConfigError(f"expected the trust policy {names}, found {self.name!r}")

    def judge(self, manifest: Manifest) -> Accepted | Refusal:
        """May an artifact be used? Its signature has been checked already (`kvnet.trust.envelope.open_manifest`).

        Args:
            manifest: whose publisher and spans are judged.
        """
        signer = self._refusal_code(manifest.publisher)
        if signer is not None:
            return self._refuse(signer, manifest.publisher, "it is signed by")
        for span in manifest.derived_from:
            code = self._refusal_code(span.publisher)
            if code is not None:
                words = f"its blocks {span.first_block} to {span.last_block} come from an artifact signed by"
                return self._refuse(_DERIVED[code], span.publisher, words)
        return Accepted(manifest.publisher, manifest.publisher in self.own)

    def may_serve(self, manifest: Manifest) -> bool:
        """May an artifact be handed on to others? Only what is revoked may not: receivers judge for themselves."""
        publishers = {manifest.publisher, *(span.publisher for span in manifest.derived_from)}
        return publishers.isdisjoint(self.revoked)

    def _refusal_code(self, publisher: bytes) -> RefusalCode | None:
        if publisher in self.revoked:
            return RefusalCode.REVOKED_PUBLISHER
        if publisher in self.own:
            return None
        if self.name == "own":
            return RefusalCode.NOT_OWN
        return None if publisher in self.trusted else RefusalCode.UNTRUSTED_PUBLISHER

    def _refuse(self, code: RefusalCode, publisher: bytes, words: str) -> Refusal:
        return Refusal(code.value, f"{words} {publisher_text(publisher)}, {_WORDS[code]}", publisher)


_DERIVED = {
    RefusalCode.REVOKED_PUBLISHER: RefusalCode.DERIVED_FROM_REVOKED,
    RefusalCode.NOT_OWN: RefusalCode.DERIVED_FROM_NOT_OWN,
    RefusalCode.UNTRUSTED_PUBLISHER: RefusalCode.DERIVED_FROM_UNTRUSTED,
}

_REVOKED = "a key that is revoked"
_NOT_OWN = "which is not a key of this node, and the trust policy is own"
_UNTRUSTED = "which is not among the trusted publishers"
_WORDS = {
    RefusalCode.REVOKED_PUBLISHER: _REVOKED,
    RefusalCode.NOT_OWN: _NOT_OWN,
    RefusalCode.UNTRUSTED_PUBLISHER: _UNTRUSTED,
    RefusalCode.DERIVED_FROM_REVOKED: _REVOKED,
    RefusalCode.DERIVED_FROM_NOT_OWN: _NOT_OWN,
    RefusalCode.DERIVED_FROM_UNTRUSTED: _UNTRUSTED,
}
