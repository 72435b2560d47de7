"""Operations on publisher keys."""

from kvnet.trust.keys import parse_publisher_text
from kvnet_node.operations.context import OperationContext
from kvnet_node.operations.requests import (
    KeyEntry,
    KeyListResult,
    KeyRequest,
    KeyResult,
    TrustRequest,
    TrustResult,
)


async def new(context: OperationContext, request: KeyRequest) -> KeyResult:  # noqa: ARG001
    """Make a new signing key."""
    services = context.services
    made = services.identity.new_key()
    # Where an earlier key of this node is a member, the new one becomes one by its word.
    await services.memberships.rekeyer.follow()
    return KeyResult(made, services.peer_text)


async def show(context: OperationContext, request: KeyRequest) -> KeyResult:  # noqa: ARG001
    """The signing key, its public half."""
    return KeyResult(context.services.identity.publisher(), context.services.peer_text)


async def list_keys(context: OperationContext, request: KeyRequest) -> KeyListResult:  # noqa: ARG001
    """Own and trusted keys."""
    identity = context.services.identity

    def state(text: str) -> str:
        publisher, standing = parse_publisher_text(text), identity.policy().standing
        if standing.is_revoked(publisher, identity.namespaces()[0].id):
            return "revoked"
        return "rotated" if publisher in standing.rotated else ""

    own = [
        KeyEntry(key.publisher, "signing" if key.current else "own", state=state(key.publisher))
        for key in identity.own_keys()
    ]
    trusted = [
        KeyEntry(entry.publisher, "trusted", entry.label, entry.since, state(entry.publisher))
        for entry in identity.trusted()
    ]
    return KeyListResult([*own, *trusted], identity.policy_name)


async def trust(context: OperationContext, request: TrustRequest) -> TrustResult:
    """Trust a publisher."""
    publisher, changed = context.services.identity.trust(request.publisher, request.label)
    return TrustResult(publisher, trusted=True, changed=changed, label=request.label)


async def untrust(context: OperationContext, request: TrustRequest) -> TrustResult:
    """Trust a publisher no longer."""
    publisher = context.services.identity.untrust(request.publisher)
    # What engines hold in memory may come from it.
    await context.services.drop_live()
    return TrustResult(publisher, trusted=False, changed=True)
