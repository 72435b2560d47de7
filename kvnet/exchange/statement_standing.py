"""What statements come to: which keys and artifacts stand, and of whom something that was said is held back."""

from collections.abc import Callable
from dataclasses import replace
from typing import Never

import trio

from kvnet.format.hashes import NamespaceId
from kvnet.protocol.gossip import ASK_AGAIN_S, RECONCILE_S
from kvnet.trust.authority import RELEVANT, Keys, Standing, standing
from kvnet.trust.policy import TrustPolicy
from kvnet.trust.statement_bodies import ProviderRecord
from kvnet.trust.statement_book import StatementBook
from kvnet.trust.statements import SignedStatement
from kvnet.trust.withheld import Extent, Withheld


class Standings:
    """Works out what the statements of a book come to, anew only when some that matter have changed.

    Args:
        book: the statements that count.
    """

    def __init__(self, book: StatementBook) -> None:
        self._book = book
        self._version = 0
        self._applied: tuple[int, TrustPolicy, TrustPolicy] | None = None
        self._stood: tuple[int, Keys, Standing] | None = None
        self._withheld = Withheld()
        self._some_withheld = trio.Event()

    def changed(self) -> None:
        """The book holds something else than before."""
        self._version += 1

    def taken(self, statement: SignedStatement) -> None:
        """A statement counts from now on, or in more namespaces than before."""
        if statement.kind in RELEVANT:
            self._version += 1
            self._withheld.arrived(statement.signer, self._book.revoked_in)

    def leave(self, namespace: NamespaceId) -> None:
        """Forget a namespace that this node has left."""
        self._withheld.leave(namespace)
        self._version += 1

    def applied(self, policy: TrustPolicy) -> TrustPolicy:
        """A policy with what statements say; worked out again only when one of the two has changed."""
        if self._applied is None or self._applied[0] != self._version or self._applied[1] != policy:
            self._applied = (self._version, policy, policy.given(self._standing(policy)))
        return self._applied[2]

    def _standing(self, policy: TrustPolicy) -> Standing:
        if self._stood is None or self._stood[0] != self._version or self._stood[1] != policy.keys:
            relevant = [statement for kind in sorted(RELEVANT, key=str) for statement in self._book.all(kind)]
            scopes = {statement.envelope: self._book.scopes_of(statement) for statement in relevant}
            self._stood = (self._version, policy.keys, standing(relevant, policy.keys, scopes=scopes))
        return replace(self._stood[2], withheld=self._withheld.publishers())

    def told_of(self, signer: bytes, record: ProviderRecord, policy: TrustPolicy) -> bool:
        """A record says how far its signer's revocations go: whoever has passed it on may have held some back.

        Args:
            signer: publisher id of the record's signer.
            record: what it says.
            policy: whose word counts; a record of anybody else is passed over.

        Returns:
            Whether a revocation is missing that was not known to be.
        """
        namespace = NamespaceId(record.namespace)
        if not policy.believes(signer, namespace):
            return False
        told = Extent(record.revocations, record.n_revocations)
        if not self._withheld.told_of(namespace, signer, told, self._book.revoked_in(signer, namespace)):
            return False
        # A member may say so as often as it tells records: what statements come to is not worked out anew for it.
        self._applied = None
        self._some_withheld.set()
        return True

    async def look_for_withheld(self, ask_everybody: Callable[[], None]) -> Never:
        """Ask for what is missing as long as something is, less and less often, until cancelled."""
        while True:
            await self._some_withheld.wait()
            self._some_withheld = trio.Event()
            patience_s = ASK_AGAIN_S
            while self._withheld:
                ask_everybody()
                # One more that is told of meanwhile is asked for with the rest, no sooner than those.
                await trio.sleep(patience_s)
                patience_s = min(2 * patience_s, RECONCILE_S)
