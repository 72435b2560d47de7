"""Sharing: a second signed manifest over the same chunks, for the members of another namespace.

The prefix keys of another namespace are others, so the manifest is another one, and so is the artifact hash; the store
holds the chunks once. Whoever shares what somebody else computed signs it as their own and names the source in
``derived_from``: members believe it only if they believe both.
"""

from dataclasses import dataclass

from kvnet.errors import StoreError, TrustError
from kvnet.exchange.identity import Identity
from kvnet.exchange.provenance import spans_from
from kvnet.format.hashes import ArtifactHash, PrefixKey
from kvnet.format.limits import MAX_DERIVED_SPANS
from kvnet.format.manifest import Manifest, encode_manifest
from kvnet.format.prefix import block_keys
from kvnet.store.interface import ArtifactRecord, Store
from kvnet.trust.envelope import StatementType, seal
from kvnet.trust.namespace import Namespace
from kvnet.trust.policy import Refusal


@dataclass(frozen=True, slots=True)
class Shared:
    """An artifact that is in another namespace now.

    Attributes:
        record: the artifact there.
        keys: its prefix keys there, one a block.
        existed: it was shared before, and nothing was done.
    """

    record: ArtifactRecord
    keys: list[PrefixKey]
    existed: bool = False


def share(store: Store, identity: Identity, artifact: ArtifactHash, namespace: Namespace, *, created_s: int) -> Shared:
    """Make a held artifact one of another namespace too; it is pinned there. Blocking.

    Args:
        store: holds it, and the new one afterwards.
        identity: whose key signs, and whose policy must still accept the source.
        artifact: its hash.
        namespace: that gets it.
        created_s: seconds since 1970, for the manifest.

    Raises:
        StoreError: it is not held here, or not wholly.
        TrustError: the policy does not accept it, or it comes from more others than a manifest can name.
    """
    record = store.get(artifact)
    if record is None or not record.complete:
        raise StoreError(
            "expected an artifact that is held wholly here, found one that is not",
            hint="`kvnet fetch` gets what is missing of it",
        )
    verdict = identity.policy().judge(record.manifest)
    if isinstance(verdict, Refusal):
        raise TrustError(f"the artifact is not shared: {verdict.text}", hint="share only what you would use yourself")
    manifest, keys = _manifest(store, identity, record, namespace, created_s)
    before = _equal(store, manifest)
    if before is not None:
        if not before.pinned:
            store.pin(before.hash)
        return Shared(before, keys, existed=True)
    writer = store.begin_pack(len(record.entries))
    try:
        for index, entry in enumerate(record.entries):
            if entry.length_bytes:
                writer.reference(index, entry)
        envelope = seal(StatementType.MANIFEST, encode_manifest(manifest), identity.signing_key())
        whole = all(entry.length_bytes for entry in record.entries)
        published = writer.publish(
            envelope, keys=keys, pinned=True, allow_partial=not whole, entries=None if whole else record.entries
        )
    except BaseException:
        writer.abort()
        raise
    return Shared(published, keys)


def _manifest(
    store: Store, identity: Identity, record: ArtifactRecord, namespace: Namespace, created_s: int
) -> tuple[Manifest, list[PrefixKey]]:
    source, publisher = record.manifest, identity.signing_key().public
    keys = block_keys(namespace.prefix_root(source.fingerprint.hash), store.tokens_of(record.hash))
    spans = spans_from(source, source.n_tokens, publisher)
    if len(spans) > MAX_DERIVED_SPANS:
        raise TrustError(
            f"expected state from at most {MAX_DERIVED_SPANS} artifacts of others, found {len(spans)}",
            hint="`kvnet add` without reuse computes it anew.",
        )
    fields = {name: getattr(source, name) for name in source.__struct_fields__} | {
        "namespace": namespace.id,
        "last_prefix_key": keys[-1],
        "derived_from": spans,
        "publisher": publisher,
        "created": created_s,
    }
    return Manifest(**fields), keys


def _equal(store: Store, wanted: Manifest) -> ArtifactRecord | None:
    """What was shared before: the same chunks, by the same key."""
    for found, _ in store.find_prefix(wanted.namespace, [wanted.last_prefix_key]):
        record = store.get(found)
        if record is None or not record.complete:
            continue
        there = record.manifest
        if (there.root, there.publisher, there.derived_from) == (wanted.root, wanted.publisher, wanted.derived_from):
            return record
    return None
