"""Operations that take back what was signed: revoke an artifact or a key, let a key give way to another.

Whoever revokes a key wants its machine out as well: it is removed from what it is a member of, where this node may.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvnet.errors import TrustError, UsageError
from kvnet.exchange.statement_signing import Saying
from kvnet.format.hashes import artifact_text
from kvnet.store.interface import ArtifactRecord
from kvnet.store.names import NamedVersion
from kvnet.trust.keys import TEXT_PREFIX, PublisherKey, parse_publisher_text, publisher_text
from kvnet.trust.namespace import Namespace
from kvnet.trust.statement_bodies import KeyRotation, Revocation
from kvnet.trust.statements import rotation_message
from kvnet_node.operations import requests as r
from kvnet_node.operations.context import OperationContext
from kvnet_node.operations.swarms import asleep, connected, let_in
from kvnet_node.operations.targets import held_artifact, resolve_version
from kvnet_node.ousting import seats_of, take_out
from kvnet_node.services import Services

MAX_REASON_LENGTH = 200

_EVERYWHERE = "everybody who hears of it"
_OWN_MACHINES = "this machine and your others, and nobody else"


@dataclass(frozen=True)
class _Saying:
    """One revocation to be said.

    Attributes:
        kind: what is revoked.
        target: artifact hash or publisher id.
        key: that signs, so that it counts for as many as it can.
        namespaces: where it is told.
    """

    kind: Literal["artifact", "publisher"]
    target: bytes
    key: PublisherKey
    namespaces: tuple[Namespace, ...]

    def of(self, reason: str) -> Saying:
        """The statement, with a reason."""

        def body(sequence: int, issued: int) -> Revocation:
            return Revocation(
                sequence=sequence, issued=issued, expires=0, kind=self.kind, target=self.target, reason=reason
            )

        return Saying(body, self.namespaces, self.key)


async def revoke(ctx: OperationContext, request: r.RevokeRequest) -> r.RevokeResult:
    """Have an artifact, or a key with all it signed, used and served no more."""
    if len(request.reason) > MAX_REASON_LENGTH:
        raise UsageError(
            f"expected a reason of at most {MAX_REASON_LENGTH} characters, found {len(request.reason)}",
            hint="members read it; a few words will do",
        )
    services = ctx.services
    if request.target.strip().lower().startswith(TEXT_PREFIX):
        kind, sayings, whom = "publisher", *_of_key(services, parse_publisher_text(request.target))
        texts, names = [publisher_text(sayings[0].target)], list[str]()
    else:
        kind, (sayings, whom, names) = "artifact", await _of_artifact(services, request.target)
        texts = [artifact_text(target) for target in dict.fromkeys(saying.target for saying in sayings)]  # type: ignore[arg-type]
    scopes = list(dict.fromkeys(namespace for saying in sayings for namespace in saying.namespaces))
    before, told = await _usable(services), services.statements.listeners(scopes)
    if not request.dry_run:
        await services.statements.say_all([saying.of(request.reason) for saying in sayings])
    seats = await _seats(services, sayings[0].target if kind == "publisher" else b"", request=request)
    after = await _usable(services)
    return r.RevokeResult(
        kind=kind,
        targets=texts,
        names=names,
        scopes=[namespace.name for namespace in scopes],
        whom=whom,
        held=_concerned(before, sayings) if request.dry_run else len(before) - len(after),
        told=told,
        done=not request.dry_run,
        removed_from=seats.removed_from,
        still_in=seats.still_in,
        asleep=seats.asleep,
        let_in=seats.let_in,
    )


@dataclass(frozen=True)
class _Seats:
    """Where a key was a member: removed from, still in and why, and whoever has not heard of it yet."""

    removed_from: list[str]
    still_in: list[str]
    asleep: list[str]
    let_in: list[str]


async def _seats(services: Services, publisher: bytes, *, request: r.RevokeRequest) -> _Seats:
    """Take a revoked key out of the namespaces it is a member of, or only say from which."""
    identity, memberships = services.identity, services.memberships
    seats = seats_of(identity, memberships, publisher)
    # Who is connected follows within a moment, and its session ends with that.
    here = {seat.namespace.id: connected(services, seat.namespace) for seat in seats}
    before = {seat.namespace.id: memberships.rosters.roster(seat.namespace.id) for seat in seats}
    if request.dry_run:
        left, removed = [s for s in seats if s.why_not], [s.namespace for s in seats if not s.why_not]
    else:
        removed = []
        left = await take_out(identity, memberships, publisher, guests=request.guests, gone=removed.append)
    away, guests = list[str](), list[str]()
    for namespace in removed:
        was, now = before[namespace.id], memberships.rosters.roster(namespace.id)
        if was is not None and now is not None:
            away += asleep(services, now, here[namespace.id]) if not request.dry_run else []
            guests += let_in(was, memberships.rosters.keys_of_machine(was, publisher), now)
    names, why_not = [each.name for each in removed], [seat.why_not for seat in left]
    return _Seats(names, why_not, list(dict.fromkeys(away)), list(dict.fromkeys(guests)))


async def _usable(services: Services) -> list[ArtifactRecord]:
    """What is held and not revoked."""
    policy = services.identity.policy()
    return [record for record in await services.lane.run(services.store.artifacts) if policy.may_serve(record.manifest)]


def _concerned(records: Iterable[ArtifactRecord], sayings: Sequence[_Saying]) -> int:
    """How many of the artifacts are of what is to be revoked, or derived from it."""
    targets = {saying.target for saying in sayings}

    def is_concerned(record: ArtifactRecord) -> bool:
        spans = record.manifest.derived_from
        named = {record.hash, record.manifest.publisher}
        return not targets.isdisjoint(named.union(*({span.artifact, span.publisher} for span in spans)))

    return sum(map(is_concerned, records))


# --- artifacts --------------------------------------------------------------------------------------------------------


async def _of_artifact(services: Services, text: str) -> tuple[list[_Saying], str, list[str]]:
    meant = await resolve_version(services, text)
    record = await held_artifact(services, text)
    wanted = {record.hash}
    if isinstance(meant, NamedVersion):
        wanted |= {meant.artifact, *meant.others}
    own = {key.public: key for key in services.identity.publisher_keys()}
    publisher = record.manifest.publisher
    policy = services.identity.policy()
    if publisher not in own and publisher not in policy.devices:
        raise TrustError(
            f"expected an artifact that you have signed, found one of {publisher_text(publisher)}",
            hint=f"kvnet key untrust {publisher_text(publisher)} uses nothing of that key any more; "
            f"kvnet rm {text} removes this one",
        )
    # What was shared is a manifest of its own over the same chunks.
    held = await services.lane.run(services.store.artifacts)
    same = [each for each in held if each.manifest.root == record.manifest.root and each.manifest.publisher in own]
    sayings = []
    for each in {found.hash: found for found in [*same, *(h for h in held if h.hash in wanted)]}.values():
        if policy.standing.is_revoked_artifact(each.hash, each.manifest.publisher):
            continue
        key = own.get(each.manifest.publisher) or _device_key(services)
        sayings.append(_Saying("artifact", each.hash, key, _told_in(services, each.manifest.namespace)))
    if not sayings:
        raise UsageError(f"{text} is revoked already", hint="kvnet show says what is known of it")
    names = await services.lane.run(services.names.names_of, record.hash)
    return sayings, _EVERYWHERE if publisher in own else _OWN_MACHINES, names


def _told_in(services: Services, namespace: bytes) -> tuple[Namespace, ...]:
    """The namespace of an artifact, and ``mine``: what was derived from it may be there."""
    mine, *others = services.identity.namespaces()
    return (mine, *(each for each in others if each.id == namespace))


def _device_key(services: Services) -> PublisherKey:
    """The key by which this node is one of the owner's machines."""
    rosters = services.memberships.rosters
    roster = rosters.roster(services.identity.namespaces()[0].id)
    key = rosters.own_key(roster) if roster is not None else None
    return key or services.identity.signing_key()


# --- keys -------------------------------------------------------------------------------------------------------------


def _of_key(services: Services, publisher: bytes) -> tuple[list[_Saying], str]:
    identity, policy = services.identity, services.identity.policy()
    namespaces = identity.namespaces()
    if policy.standing.is_revoked(publisher, namespaces[0].id) and not any(
        not seat.why_not for seat in seats_of(identity, services.memberships, publisher)
    ):
        raise UsageError(f"{publisher_text(publisher)} is revoked already", hint="kvnet key list")
    if publisher == identity.signing_key().public:
        raise UsageError(
            "expected a key that signs no longer, found the one that signs what this node adds",
            hint="kvnet key rotate makes a new one that is believed in its place; then revoke the old one",
        )
    own = {key.public: key for key in identity.publisher_keys()}
    if publisher in own:
        return [_Saying("publisher", publisher, own[publisher], namespaces)], _EVERYWHERE
    known = publisher in policy.devices or publisher in policy.trusted
    sayings = [_Saying("publisher", publisher, _device_key(services), namespaces[:1])]
    founded = []
    for namespace in namespaces[1:]:
        roster = services.memberships.rosters.roster(namespace.id)
        if roster is None or publisher not in roster.members:
            continue
        known = True
        if roster.founder in own:
            founded.append(namespace.name)
            sayings.append(_Saying("publisher", publisher, own[roster.founder], (namespace,)))
    if not known:
        raise UsageError(
            "expected a key of yours, of one of your machines, of a member or of a trusted publisher, "
            "found one that nobody here knows",
            hint="kvnet key list and kvnet swarm members show them; what an unknown key signs is not used anyway",
        )
    whom = f"the members of {' and '.join(founded)}, and your machines" if founded else _OWN_MACHINES
    return sayings, whom


async def rotate(ctx: OperationContext, request: r.KeyRequest) -> r.RotateResult:  # noqa: ARG001
    """Make a new signing key, and have both keys say that the new one stands for the old one."""
    services = ctx.services
    old = services.identity.signing_key()
    if services.identity.policy().standing.is_revoked(old.public, b""):
        raise UsageError(
            "expected a key that is not revoked, found that this one is", hint="kvnet key new makes another"
        )
    # Kept before it is told of, and signing only afterwards: whenever this process ends, nothing is signed by a key
    # that nobody would follow, and nobody follows a key that is lost.
    new = services.identity.next_key()

    def body(sequence: int, issued: int) -> KeyRotation:
        signature = new.sign(rotation_message(old.public, new.public, sequence))
        return KeyRotation(sequence=sequence, issued=issued, expires=0, new=new.public, new_signature=signature)

    await services.statements.say(body, key=old)
    services.identity.adopt_next_key()
    # Where the old key is a member, the new one becomes one by its word.
    await services.memberships.rekeyer.follow()
    told = services.statements.listeners(services.identity.namespaces())
    return r.RotateResult(publisher_text(new.public), publisher_text(old.public), told)
