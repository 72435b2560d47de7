"""What came of joining a namespace."""

from dataclasses import dataclass

from kvnet.format.hashes import NamespaceId
from kvnet.trust.namespace import Namespace
from kvnet.trust.roster import Roster


@dataclass(frozen=True, slots=True)
class Joined:
    """What joining did.

    Attributes:
        namespace: as it is called here.
        role: of this node in it.
        inviter: whoever let it in.
        roster: who is in it, as far as is known now.
        kept: id of the namespace that was ``mine`` and is kept; None when none was.
        changed: False when this node was a member already.
    """

    namespace: Namespace
    role: str
    inviter: bytes
    roster: Roster
    kept: NamespaceId | None = None
    changed: bool = True
