"""Operations on artifacts that are held here: list, show, verify, pin, unpin, collect garbage."""

from kvnet.errors import IntegrityError, NotInStoreError, StoreFullError
from kvnet.format.hashes import ArtifactHash, artifact_text
from kvnet.protocol.escaping import escape_text
from kvnet.store.interface import ArtifactRecord
from kvnet.store.names import NamedVersion
from kvnet.trust.envelope import StatementType
from kvnet.trust.keys import publisher_text
from kvnet.trust.policy import Refusal, TrustPolicy
from kvnet.trust.statement_bodies import Attestation, Revocation
from kvnet_node.calling import Names
from kvnet_node.operations import requests as r
from kvnet_node.operations.context import OperationContext
from kvnet_node.operations.peer_names import known_names
from kvnet_node.operations.targets import held_artifact
from kvnet_node.samples import model_names
from kvnet_node.savings import Made
from kvnet_node.services import Services


async def list_artifacts(ctx: OperationContext, request: r.ListRequest) -> r.ListResult:  # noqa: ARG001
    """All artifacts, newest first."""
    services = ctx.services
    records = await services.lane.run(services.store.artifacts)
    names = await services.lane.run(services.names.by_artifact)
    policy = services.identity.policy()
    scopes = _scopes(services)
    models = await model_names_here(services)
    nameless = any(record.hash not in names for record in records)
    origins = services.savings.origins() if nameless else {}
    return r.ListResult(
        [
            _summary(
                record, names.get(record.hash, []), policy, scopes, models, origins.get(artifact_text(record.hash))
            )
            for record in records
        ]
    )


async def model_names_here(services: Services) -> dict[bytes, str]:
    """What models are called, by the hash of their fingerprint: here, else by a connected peer."""
    matching = services.matching
    told = matching.exchange.told_names() if matching is not None else {}
    theirs = {fingerprint: escape_text(name) for fingerprint, name in told.items()}
    return theirs | await services.lane.run(model_names, services.paths.samples_dir)


def _scopes(services: Services) -> dict[bytes, str]:
    """What the namespaces of this node are called, by their ids."""
    return {bytes(each.id): each.name for each in services.identity.namespaces()}


def _summary(
    record: ArtifactRecord,
    names: list[NamedVersion],
    policy: TrustPolicy,
    scopes: dict[bytes, str],
    models: dict[bytes, str],
    made: Made | None,
) -> r.ArtifactSummary:
    manifest = record.manifest
    made_with = next((version.model for version in names if version.model), "")
    return r.ArtifactSummary(
        artifact=artifact_text(record.hash),
        names=[version.text for version in names],
        tokens=manifest.n_tokens,
        bytes=manifest.total_size_bytes,
        codec=manifest.codec.value,
        lossy=not manifest.codec.lossless,
        complete=record.complete,
        pinned=record.pinned,
        signer=publisher_text(manifest.publisher),
        own=manifest.publisher in policy.own,
        created=manifest.created,
        model=made_with or models.get(manifest.fingerprint.hash, ""),
        revoked=not policy.may_serve(manifest),
        scope=scopes.get(manifest.namespace, ""),
        origin=made.origin if made is not None and not names else "",
        adding=made.name if made is not None and not names and made.origin == "interrupted" else "",
    )


async def show(ctx: OperationContext, request: r.ArtifactRequest) -> r.ShowResult:
    """Everything a manifest says, and what is held of it."""
    services = ctx.services
    record = await held_artifact(services, request.target)
    names = await services.lane.run(services.names.names_of, record.hash)
    held = await services.lane.run(_held_chunks, services, record)
    manifest = record.manifest
    verdict = services.identity.policy().judge(manifest)
    models = await model_names_here(services)
    called = known_names(services)
    return r.ShowResult(
        artifact=artifact_text(record.hash),
        names=names,
        model=models.get(manifest.fingerprint.hash, ""),
        tokens=manifest.n_tokens,
        blocks=manifest.n_blocks,
        chunks=manifest.n_chunks,
        held_chunks=held,
        bytes=manifest.total_size_bytes,
        codec=manifest.codec.value,
        lossy=not manifest.codec.lossless,
        complete=record.complete,
        pinned=record.pinned,
        signer=publisher_text(manifest.publisher),
        own=manifest.publisher in services.identity.policy().own,
        policy=services.identity.policy_name,
        verdict=f"refused, {verdict.text}" if isinstance(verdict, Refusal) else "accepted",
        namespace=manifest.namespace.hex(),
        scope=_scopes(services).get(manifest.namespace, ""),
        created=manifest.created,
        producer=_producer(record),
        fingerprint=_fingerprint(record),
        derived_from=[
            {
                "artifact": artifact_text(span.artifact),
                "signer": publisher_text(span.publisher),
                "signer_name": called.signers.get(span.publisher, ""),
                "blocks": f"{span.first_block} to {span.last_block}",
            }
            for span in manifest.derived_from
        ],
        context_bytes=manifest.context_size_bytes,
        ticket=services.ticket(record.hash, serving=ctx.serving),
        revoked=not services.identity.policy().may_serve(manifest),
        revocations=_revocations(services, record, called),
        attestations=_attestations(services, record, called),
        signer_name=called.signers.get(manifest.publisher, ""),
    )


def _revocations(services: Services, record: ArtifactRecord, called: Names) -> list[str]:
    """What counts against an artifact: by whom, about what of it, and why."""
    manifest, policy = record.manifest, services.identity.policy()
    signers: dict[bytes, bytes] = {span.artifact: span.publisher for span in manifest.derived_from}
    signers[record.hash] = manifest.publisher
    found = []
    for statement in services.statements.all(StatementType.REVOCATION):
        body = statement.body
        assert isinstance(body, Revocation)  # noqa: S101 - those were asked for
        if body.kind == "artifact":
            counts = body.target in signers and statement.signer in {signers[body.target], *policy.standing.believed}
            what = "it" if body.target == record.hash else artifact_text(ArtifactHash(body.target))
        else:
            counts = body.target in signers.values() and policy.is_revoked(body.target, manifest.namespace)
            what = f"the key {publisher_text(body.target)}"
        if counts:
            reason = f": {escape_text(body.reason)}" if body.reason else ""
            found.append(f"{what}, by {called.signer(statement.signer)}{reason}")
    return found


def _attestations(services: Services, record: ArtifactRecord, called: Names) -> list[str]:
    """What others say who have looked into an artifact, the oldest first."""
    found = []
    for statement in services.statements.all(StatementType.ATTESTATION, namespace=record.manifest.namespace):
        body = statement.body
        if isinstance(body, Attestation) and body.artifact == record.hash:
            by = f"{called.signer(statement.signer)} computed"
            differs = f"another state, different by up to {body.max_difference}"
            found.append(f"{by} {'the same state' if body.claim == 'same' else differs}")
    return found


def _held_chunks(services: Services, record: ArtifactRecord) -> int:
    if record.complete:
        return len(record.entries)
    return sum(services.store.has_chunk(entry.hash) for entry in record.entries)


def _producer(record: ArtifactRecord) -> dict[str, str]:
    producer = record.manifest.producer
    return {
        "runtime": producer.runtime,
        "versions": producer.versions,
        "device": producer.device,
        "system": producer.system,
        "prefill_step": str(producer.prefill_step),
    }


def _fingerprint(record: ArtifactRecord) -> dict[str, str]:
    fingerprint = record.manifest.fingerprint
    return {
        "hash": fingerprint.hash.hex(),
        "architecture": fingerprint.architecture,
        "weights": fingerprint.weights.hex(),
        "config": fingerprint.config.hex(),
    }


async def verify(ctx: OperationContext, request: r.VerifyRequest) -> r.VerifyResult:
    """Re-hash one artifact, or all."""
    services = ctx.services
    if request.target:
        records = [await held_artifact(services, request.target)]
    else:
        records = await services.lane.run(services.store.artifacts)
    total = sum(record.manifest.total_size_bytes for record in records)
    checked = _Checked()
    for record in records:
        # Chunk by chunk, so that other work gets its turn in between.
        for index, entry in enumerate(record.entries):
            if entry.length_bytes == 0:
                continue
            state = await services.lane.run(_check_chunk, services, record, index)
            checked.count(record, index, entry.length_bytes, state)
            ctx.progress("verify", checked.bytes, total, unit="bytes")
    return checked.result(len(records))


def _check_chunk(services: Services, record: ArtifactRecord, index: int) -> str:
    """Whether one chunk is "good", "bad" or "missing". Blocking."""
    try:
        services.store.read_chunk(record.entries[index].hash)
    except IntegrityError:
        return "bad"
    except NotInStoreError:
        return "missing"
    return "good"


class _Checked:
    """What verification has found so far."""

    def __init__(self) -> None:
        self.chunks = 0
        self.bytes = 0
        self.bad: list[str] = []
        self.missing = 0
        self.incomplete: dict[str, bool] = {}

    def count(self, record: ArtifactRecord, index: int, length_bytes: int, state: str) -> None:
        if state == "good":
            self.chunks += 1
            self.bytes += length_bytes
            return
        self.incomplete[artifact_text(record.hash)] = record.pinned
        if state == "bad":
            self.bad.append(f"{artifact_text(record.hash)}/{index}")
        else:
            self.missing += 1

    def result(self, n_artifacts: int) -> r.VerifyResult:
        return r.VerifyResult(
            artifacts=n_artifacts,
            chunks=self.chunks,
            bytes=self.bytes,
            bad_chunks=self.bad,
            missing_chunks=self.missing,
            incomplete=list(self.incomplete),
            incomplete_pinned=[artifact for artifact, pinned in self.incomplete.items() if pinned],
        )


async def pin(ctx: OperationContext, request: r.ArtifactRequest) -> r.PinResult:
    """Keep an artifact whatever the quota says."""
    artifact = (await held_artifact(ctx.services, request.target)).hash
    await ctx.services.lane.run(ctx.services.store.pin, artifact)
    names = await ctx.services.lane.run(ctx.services.names.names_of, artifact)
    return r.PinResult(artifact_text(artifact), pinned=True, names=names)


async def unpin(ctx: OperationContext, request: r.ArtifactRequest) -> r.PinResult:
    """Let an artifact be removed when room is needed."""
    artifact = (await held_artifact(ctx.services, request.target)).hash
    await ctx.services.lane.run(ctx.services.store.unpin, artifact)
    names = await ctx.services.lane.run(ctx.services.names.names_of, artifact)
    return r.PinResult(artifact_text(artifact), pinned=False, names=names)


async def collect_garbage(ctx: OperationContext, request: r.CollectRequest) -> r.CollectResult:
    """Remove what is not pinned until quota and free space are kept."""
    services = ctx.services
    held = [record.hash for record in await services.lane.run(services.store.artifacts)]
    before = await services.lane.run(services.store.usage)
    full: StoreFullError | None = None
    try:
        await services.background.run(services.store.collect_garbage, everything=request.all)
    except StoreFullError as error:
        full = error
    usage = await services.lane.run(services.store.usage)
    if full is not None and usage.held_bytes <= usage.quota_bytes and usage.free_bytes >= usage.min_free_bytes:
        raise full
    # Else what is pinned takes more than the limits allow: that is a result, with what went all the same.
    left = {record.hash for record in await services.lane.run(services.store.artifacts)}
    removed = [artifact for artifact in held if artifact not in left]
    if services.node is not None:
        for artifact in removed:
            services.node.removed(artifact)
    return r.CollectResult(
        [artifact_text(artifact) for artifact in removed],
        max(0, before.held_bytes - usage.held_bytes),
        usage.held_bytes,
        usage.quota_bytes,
        artifacts=usage.artifacts,
        pinned=usage.pinned,
        free_bytes=usage.free_bytes,
        min_free_bytes=usage.min_free_bytes,
    )
