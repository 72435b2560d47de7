"""What publishers call the artifacts they share: signed tags, which the members of a namespace alone are told.

A tag is a claim of its signer. It counts where its signer is believed, and only for artifacts that the same key has
signed: nobody names what somebody else made.
"""

from dataclasses import dataclass

import trio

from kvnet.exchange.identity import Identity
from kvnet.exchange.statements import Heard, Statements
from kvnet.format.hashes import ArtifactHash
from kvnet.network.news import News
from kvnet.trust.envelope import StatementType
from kvnet.trust.namespace import PUBLIC, Namespace
from kvnet.trust.statement_bodies import Tag


@dataclass(frozen=True, slots=True)
class SharedName:
    """What a publisher calls an artifact of its own in a namespace.

    Attributes:
        name: as in ``kvnet add --name``.
        number: of the version there.
        artifact: its hash.
        namespace: whose members are told.
        signer: publisher id; the artifact's own, or this counts for nothing.
    """

    name: str
    number: int
    artifact: ArtifactHash
    namespace: Namespace
    signer: bytes


class SharedNames:
    """The names that this node gives in its namespaces, and those that members give.

    Args:
        identity: signing key, namespaces and policy; read afresh at every use.
        statements: how names come and go.
    """

    def __init__(self, identity: Identity, statements: Statements) -> None:
        self._identity = identity
        self._statements = statements
        self._told = News()
        statements.subscribe(StatementType.TAG, self._heard)

    def _heard(self, _: Heard) -> None:
        self._told.tell()

    def next_told(self) -> trio.Event:
        """Set when the next name is told."""
        return self._told.next

    async def say(self, name: str, number: int, artifact: ArtifactHash, namespace: Namespace) -> None:
        """Tell the members of a namespace what an artifact that this node's key has signed is called.

        Said once: nothing is signed when that is what was said last.

        Raises:
            StoreError: this node has told too many names, removals and attestations there, or the disk failed.
        """

        def body(sequence: int, issued_s: int) -> Tag:
            return Tag(
                sequence=sequence,
                issued=issued_s,
                expires=0,
                namespace=namespace.id,
                name=name,
                number=number,
                artifact=artifact,
            )

        subject = body(0, 0).subject
        last = self._statements.latest(StatementType.TAG, subject, self._identity.signing_key().public)
        if last is not None and isinstance(last.body, Tag) and last.body.artifact == artifact:
            return
        await self._statements.say(body)

    def known(self) -> list[SharedName]:
        """The names that count, of this node's too; those of strangers and of revoked keys do not."""
        policy = self._identity.policy()
        found: list[SharedName] = []
        for namespace in self._identity.namespaces():
            if namespace == PUBLIC:
                continue
            for statement in self._statements.all(StatementType.TAG, namespace=namespace):
                body = statement.body
                if isinstance(body, Tag) and policy.believes(statement.signer, namespace.id):
                    artifact = ArtifactHash(body.artifact)
                    found.append(SharedName(body.name, body.number, artifact, namespace, statement.signer))
        return found

    def called(self, name: str, number: int | None = None) -> list[SharedName]:
        """Every artifact that somebody calls so, each once: what this node's own namespaces say first."""
        meant: dict[ArtifactHash, SharedName] = {}
        for each in self.known():
            if each.name == name and number in (None, each.number):
                meant.setdefault(each.artifact, each)
        return list(meant.values())
