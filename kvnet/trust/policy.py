"""Whose artifacts may be used.

A hash says which bytes arrived, a signature who vouches for them; neither says that they are an honest prefill. That
is a matter of whom one believes, and it is judged at every use, so that trust given or taken counts at once. What an
artifact took over from others counts too: a policy must accept the publisher of every span in ``derived_from``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Literal, get_args

from kvnet.errors import ConfigError
from kvnet.format.hashes import short_text
from kvnet.format.manifest import DerivedSpan, Manifest, artifact_of
from kvnet.trust.authority import Keys, Standing
from kvnet.trust.keys import publisher_text
from kvnet.trust.statements import CLOCK_SKEW_S

PolicyName = Literal["own", "trusted"]


class RefusalCode(StrEnum):
    """Why an artifact may not be used; stable, for counters and ``--json``."""

    REVOKED_PUBLISHER = "revoked_publisher"
    REVOKED_ARTIFACT = "revoked_artifact"
    REVOCATION_WITHHELD = "revocation_withheld"
    ROTATED_PUBLISHER = "rotated_publisher"
    NOT_OWN = "not_own"
    UNTRUSTED_PUBLISHER = "untrusted_publisher"
    DERIVED_FROM_REVOKED = "derived_from_revoked"
    DERIVED_FROM_NOT_OWN = "derived_from_not_own"
    DERIVED_FROM_UNTRUSTED = "derived_from_untrusted"
    DERIVED_FROM_WITHHELD = "derived_from_withheld"


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

    @property
    def hint(self) -> str:
        """What helps, as a command."""
        if self.code in _REVOKED_CODES:
            return "there is no way back: compute it anew, or fetch another one"
        if self.code in _WITHHELD_CODES:
            return "connect to another member, who may know what was revoked; `kvnet peers` shows who is there"
        return f"`kvnet key trust {publisher_text(self.publisher)}` accepts it, if you know whose key that is"


@dataclass(frozen=True, slots=True)
class TrustPolicy:
    """Whom this node believes.

    Args:
        name: ``own``: only this node's own keys; ``trusted``: also the trusted publishers, and members in their
            namespace.
        own: publisher ids of this node.
        trusted: publisher ids its owner trusts.
        revoked: publisher ids that count for nothing any more, own and trusted ones included.
        members: namespace id -> publisher ids that are trusted there and nowhere else.
        departed: namespace id -> publisher id -> seconds since 1970 when it was removed: what it signed there before
            stays good, unless its key is revoked.
        founders: namespace id -> publisher id of its founder, whose word on keys counts there.
        devices: publisher ids of the owner's machines, whose word on keys and artifacts counts.
        founder: publisher id of the founder of ``mine``; empty for none.
        standing: what statements say.

    Raises:
        ConfigError: no such policy.
    """

    name: PolicyName
    own: frozenset[bytes]
    trusted: frozenset[bytes]
    revoked: frozenset[bytes] = frozenset()
    members: Mapping[bytes, frozenset[bytes]] = field(default_factory=lambda: MappingProxyType({}))
    departed: Mapping[bytes, Mapping[bytes, int]] = field(default_factory=lambda: MappingProxyType({}))
    founders: Mapping[bytes, bytes] = field(default_factory=lambda: MappingProxyType({}))
    devices: frozenset[bytes] = frozenset()
    founder: bytes = b""
    standing: Standing = field(default_factory=Standing)

    def __post_init__(self) -> None:
        if self.name not in get_args(PolicyName):
            names = " or ".join(get_args(PolicyName))
            raise ConfigError(f"expected the trust policy {names}, found {self.name!r}")

    @property
    def keys(self) -> Keys:
        """Whose word counts for more than what is its own."""
        return Keys(self.own, self.devices, self.founder, self.founders)

    def given(self, standing: Standing) -> "TrustPolicy":
        """This policy, with what statements say: keys that trusted ones rotated to are trusted in their place."""
        return replace(self, trusted=standing.followed(self.trusted), standing=standing)

    def judge(self, manifest: Manifest) -> Accepted | Refusal:
        """May an artifact be used? Its signature has been checked already (`kvnet.trust.envelope.open_manifest`).

        Args:
            manifest: whose publisher and spans are judged.
        """
        namespace = manifest.namespace
        revoked = self.revocation(manifest)
        if revoked is not None:
            return revoked
        signer = self._refusal_code(manifest.publisher, namespace, signed_s=manifest.created)
        if signer is None and self._signed_after_rotation(manifest):
            signer = RefusalCode.ROTATED_PUBLISHER
        if signer is not None:
            return self._refuse(signer, manifest.publisher, "it is signed by")
        for span in manifest.derived_from:
            # Whoever extended it has judged when that was signed; its time is not in the manifest.
            code = self._refusal_code(span.publisher, namespace, signed_s=0)
            if code is not None:
                return self._refuse(_DERIVED[code], span.publisher, _span_words(span))
        return Accepted(manifest.publisher, manifest.publisher in self.own)

    def may_serve(self, manifest: Manifest) -> bool:
        """May an artifact be handed on to others? Only what is revoked may not: receivers judge for themselves."""
        return self.revocation(manifest) is None

    def revocation(self, manifest: Manifest) -> Refusal | None:
        """Why an artifact is revoked: its publisher, itself, or one that it took blocks from."""
        namespace, publisher, said = manifest.namespace, manifest.publisher, self.standing
        if self.is_revoked(publisher, namespace):
            return self._refuse(RefusalCode.REVOKED_PUBLISHER, publisher, "it is signed by")
        if said.artifacts and said.is_revoked_artifact(artifact_of(manifest), publisher):
            return Refusal(RefusalCode.REVOKED_ARTIFACT.value, "it is revoked", publisher)
        for span in manifest.derived_from:
            if self.is_revoked(span.publisher, namespace):
                return self._refuse(RefusalCode.DERIVED_FROM_REVOKED, span.publisher, _span_words(span))
            if said.is_revoked_artifact(span.artifact, span.publisher):
                blocks = f"its blocks {span.first_block} to {span.last_block}"
                text = f"{blocks} come from the artifact {short_text(span.artifact)}, which is revoked"
                return Refusal(RefusalCode.DERIVED_FROM_REVOKED.value, text, span.publisher)
        return None

    def believes(self, publisher: bytes, namespace: bytes) -> bool:
        """Whether a publisher is no stranger in a namespace, whatever the name of the policy."""
        if self.is_revoked(publisher, namespace):
            return False
        return publisher in self.own or self._is_trusted(publisher, namespace)

    def is_revoked(self, publisher: bytes, namespace: bytes) -> bool:
        """Whether a publisher counts for nothing in a namespace."""
        return publisher in self.revoked or self.standing.is_revoked(publisher, namespace)

    def _is_trusted(self, publisher: bytes, namespace: bytes) -> bool:
        return publisher in self.trusted or publisher in self.members.get(namespace, frozenset())

    def _refusal_code(self, publisher: bytes, namespace: bytes, *, signed_s: int) -> RefusalCode | None:
        if publisher in self.own:
            return None
        if self.name == "own":
            return RefusalCode.NOT_OWN
        departed_s = self.departed.get(namespace, {}).get(publisher, -1)
        if not self._is_trusted(publisher, namespace) and signed_s > departed_s:
            return RefusalCode.UNTRUSTED_PUBLISHER
        return RefusalCode.REVOCATION_WITHHELD if self.standing.is_withheld(publisher, namespace) else None

    def _signed_after_rotation(self, manifest: Manifest) -> bool:
        rotated = self.standing.rotated.get(manifest.publisher)
        return rotated is not None and manifest.created > rotated.since_s + CLOCK_SKEW_S

    def _refuse(self, code: RefusalCode, publisher: bytes, words: str) -> Refusal:
        return Refusal(code.value, f"{words} {publisher_text(publisher)}, {_WORDS[code]}", publisher)


def _span_words(span: DerivedSpan) -> str:
    return f"its blocks {span.first_block} to {span.last_block} come from an artifact signed by"


_DERIVED = {
    RefusalCode.NOT_OWN: RefusalCode.DERIVED_FROM_NOT_OWN,
    RefusalCode.UNTRUSTED_PUBLISHER: RefusalCode.DERIVED_FROM_UNTRUSTED,
    RefusalCode.REVOCATION_WITHHELD: RefusalCode.DERIVED_FROM_WITHHELD,
}

_REVOKED_CODES = frozenset(
    {
        RefusalCode.REVOKED_PUBLISHER.value,
        RefusalCode.REVOKED_ARTIFACT.value,
        RefusalCode.DERIVED_FROM_REVOKED.value,
        RefusalCode.ROTATED_PUBLISHER.value,
    }
)
_WITHHELD_CODES = frozenset({RefusalCode.REVOCATION_WITHHELD.value, RefusalCode.DERIVED_FROM_WITHHELD.value})

_REVOKED = "a key that is revoked"
_NOT_OWN = "which is not a key of this node, and the trust policy is own"
_UNTRUSTED = "which is not among the trusted publishers"
_WITHHELD = "who has revoked something, and nobody has told this node what; members are asked for it"
_ROTATED = "which had given way to another key before"
_WORDS = {
    RefusalCode.REVOKED_PUBLISHER: _REVOKED,
    RefusalCode.REVOCATION_WITHHELD: _WITHHELD,
    RefusalCode.ROTATED_PUBLISHER: _ROTATED,
    RefusalCode.NOT_OWN: _NOT_OWN,
    RefusalCode.UNTRUSTED_PUBLISHER: _UNTRUSTED,
    RefusalCode.DERIVED_FROM_REVOKED: _REVOKED,
    RefusalCode.DERIVED_FROM_NOT_OWN: _NOT_OWN,
    RefusalCode.DERIVED_FROM_UNTRUSTED: _UNTRUSTED,
    RefusalCode.DERIVED_FROM_WITHHELD: _WITHHELD,
}
