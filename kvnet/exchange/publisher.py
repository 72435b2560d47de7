"""Add: compute what is missing of a token prefix, pack it, sign it, store it."""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import trio

from kvnet.engine.interface import Engine
from kvnet.engine.kv_state import Exported, ExportRequest, Origin
from kvnet.errors import (
    CompatibilityError,
    EngineError,
    IntegrityError,
    KvnetError,
    StoreError,
    TrustError,
)
from kvnet.exchange.drafts import Draft, written_bytes
from kvnet.exchange.identity import Identity
from kvnet.exchange.lane import Lane
from kvnet.exchange.provenance import LossyOriginError, all_spans, derived_spans, require_lossless_origins
from kvnet.exchange.reuse import Lossy, PrefixHit, Rejected, find_local, judge, restore_plan
from kvnet.exchange.unfinished import ENDS_EARLY, Beginning, EarlyEnd, Notes, Tiles, let_go, move_block
from kvnet.format.chunks import ChunkEntry, ChunkPlan, layer_groups
from kvnet.format.codecs import Codec, require_storable
from kvnet.format.fingerprint import Fingerprint
from kvnet.format.hashes import ArtifactHash, PrefixKey
from kvnet.format.limits import MAX_DERIVED_SPANS
from kvnet.format.manifest import Manifest, encode_manifest
from kvnet.format.prefix import BLOCK_TOKENS, block_keys
from kvnet.store.interface import ArtifactRecord, PackWriter, Store
from kvnet.trust.envelope import StatementType, seal
from kvnet.trust.policy import Refusal

_log = logging.getLogger(__name__)

ProgressCallback = Callable[[int, int], Awaitable[None]]
"""Called with (tokens done, tokens in all)."""


@dataclass(frozen=True, slots=True)
class Added:
    """What an add did.

    Attributes:
        record: the artifact as it is stored.
        reused_tokens: tokens whose K/V came from an artifact already held.
        prefilled_tokens: tokens computed now.
        prefill_s: seconds of prefill.
        new_bytes: chunk bytes written now; the rest is shared with artifacts already held.
        existed: an equal artifact of this node was there already, and nothing was done.
        superseded: what an earlier add that ended early had left, and was let go: this begins with it.
    """

    record: ArtifactRecord
    reused_tokens: int
    prefilled_tokens: int
    prefill_s: float
    new_bytes: int
    existed: bool = False
    superseded: ArtifactHash | None = None


@dataclass(frozen=True, slots=True)
class AddRequest:
    """Tokens to compute and keep.

    Attributes:
        tokens: token ids from position 0; at least one.
        context: RFC 8785 JSON of messages and frozen template inputs that travels with a named context; may be empty.
        codec: how tiles are stored.
        pinned: kept until it is unpinned; otherwise the store may evict it.
        created_s: seconds since 1970 to write into the manifest.
        prefill: compute what neither a live cache nor a stored artifact covers; otherwise such an add is refused.
        background: give way to every request that somebody waits for.
    """

    tokens: Sequence[int]
    context: bytes
    codec: Codec
    pinned: bool
    created_s: int
    prefill: bool = True
    background: bool = False


class Publisher:
    """Turns token prefixes into stored, signed artifacts.

    Nothing that came out of a lossy codec goes into an artifact of a lossless one: nobody could tell afterwards.

    Args:
        store: where they go.
        lane: where blocking store work runs.
        identity: whose key signs, and in which namespace they are kept (the first, ``mine``).
    """

    def __init__(self, store: Store, lane: Lane, identity: Identity) -> None:
        self._store = store
        self._lane = lane
        self._identity = identity

    async def add(
        self,
        engine: Engine,
        request: AddRequest,
        progress: ProgressCallback | None = None,
        early: EarlyEnd | None = None,
    ) -> Added:
        """Compute what no stored artifact has, and publish the whole as one artifact in ``mine``.

        Args:
            engine: computes.
            request: what.
            progress: told how far it is.
            early: keep what is computed when this is cancelled or the engine ends, and tell of it; by default nothing
                of it is kept.

        Raises:
            CompatibilityError: this model's K/V cannot be shared, or not with this codec.
            EngineError: there is nothing to add, or the engine failed.
            NoLiveStateError: ``prefill`` is off, and something would have to be computed.
            StoreFullError: it does not fit; the figure is in the message.
            TrustError: it comes from more others than a manifest can name, or from one who is not trusted any more; or
                ``prefill`` is off, the codec is lossless, and the live cache continued from a lossy artifact.
        """
        if not request.tokens:
            raise EngineError("expected at least 1 token to add, found 0", hint="Add a file that is not empty.")
        fingerprint = engine.info.fingerprint
        if fingerprint is None:
            raise CompatibilityError(
                f"the K/V of model {engine.info.name} cannot be shared: {engine.info.refusal}",
                hint="`kvnet model list` shows which models can be shared.",
            )
        require_storable(request.codec, fingerprint.layers.kinds)
        existing = await self._lane.run(self._find_equal, engine, request)
        if existing is not None:
            if request.pinned:
                await self._lane.run(self._store.pin, existing.hash)
            return Added(existing, len(request.tokens), 0, 0.0, 0, existed=True)
        source = await self._lane.run(self._find_source, engine, request)
        try:
            return await self._add(engine, request, self._draft(fingerprint, request, source), progress, early)
        except IntegrityError:
            if source is None:
                raise
            # What was to be extended is damaged. Once it is read through, its bad chunks count as not held.
            await self._lane.run(self._store.verify, source.artifact)
        except LossyOriginError:
            if not request.prefill:
                raise
            # A live cache began with lossy state: without it, the engine computes what is to be stored.
            await engine.drop_live()
        source = await self._lane.run(self._find_source, engine, request)
        return await self._add(engine, request, self._draft(fingerprint, request, source), progress, early)

    def _find_equal(self, engine: Engine, request: AddRequest) -> ArtifactRecord | None:
        """An artifact of our own with the same tokens, context and codec, all of it held."""
        fingerprint = engine.info.fingerprint
        assert fingerprint is not None  # noqa: S101 - the caller has refused models without one
        namespace = self._identity.namespaces()[0]
        own = self._identity.signing_key().public
        keys = block_keys(namespace.prefix_root(fingerprint.hash), request.tokens)
        for artifact, _ in self._store.find_prefix(namespace.id, [keys[-1]]):
            record = self._store.get(artifact)
            if record is None or not record.complete or record.manifest.publisher != own:
                continue
            manifest = record.manifest
            if manifest.codec is not request.codec:
                continue
            if isinstance(
                judge(manifest, artifact, engine.info, self._identity, exact_only=False, lossy=Lossy.ALWAYS), Rejected
            ):
                continue
            same_context = (self._store.context_of(artifact) or b"") == request.context
            if same_context and self._store.tokens_of(artifact) == list(request.tokens):
                return record
        return None

    def _find_source(self, engine: Engine, request: AddRequest) -> PrefixHit | None:
        """The longest usable stored prefix; none when naming everybody it comes from would not fit a manifest."""
        found = find_local(
            self._store,
            engine.info,
            self._identity,
            request.tokens,
            limit_tokens=len(request.tokens),
            lossy=Lossy.NEVER if request.codec.lossless else Lossy.ALWAYS,
        )
        if len(derived_spans(found.hit, self._identity.signing_key().public)) > MAX_DERIVED_SPANS:
            return None
        return found.hit

    def _draft(self, fingerprint: Fingerprint, request: AddRequest, source: PrefixHit | None) -> Draft:
        """Whole blocks of the source are referenced as they are; from the first other block on, tiles are written."""
        plan = ChunkPlan(
            n_tokens=len(request.tokens),
            layers=fingerprint.layers,
            groups=layer_groups(fingerprint.layers),
            context_size_bytes=len(request.context),
        )
        if source is None:
            return Draft(fingerprint, plan, None, 0)
        same_codec = source.manifest.codec is request.codec and source.manifest.groups == plan.groups
        first_block = source.n_tokens // BLOCK_TOKENS if same_codec else 0
        return Draft(fingerprint, plan, source, first_block)

    async def _add(
        self,
        engine: Engine,
        request: AddRequest,
        draft: Draft,
        progress: ProgressCallback | None,
        early: EarlyEnd | None,
    ) -> Added:
        held_bytes = draft.first_block * BLOCK_TOKENS * draft.fingerprint.layers.bytes_per_token
        room = draft.plan.raw_size_bytes - held_bytes
        writer = await self._lane.run(self._store.begin_pack, len(draft.plan), expected_bytes=room)
        held_tokens = draft.source.n_tokens if draft.source is not None else 0
        tiles = Tiles(Notes(held_tokens) if early is not None else None)
        try:
            entries = await self._lane.run(draft.write_head, writer, request.tokens, request.context)
            try:
                exported = await self._export(engine, request, draft, writer, tiles, progress)
            except ENDS_EARLY:
                if early is not None:
                    await self._keep_beginning(engine, request, draft, writer, tiles, early)
                raise
            await self._lane.run(writer.adopt, exported.chunks)
            for chunk in exported.chunks:
                entries[chunk.index] = ChunkEntry(chunk.length_bytes, chunk.hash)
            record = await self._lane.run(self._publish, engine, request, draft, writer, entries, exported.origins)
        except BaseException:
            writer.abort()
            raise
        return Added(
            record=record,
            reused_tokens=exported.restored_tokens,
            prefilled_tokens=exported.prefilled_tokens,
            prefill_s=exported.prefill_s,
            new_bytes=written_bytes(exported.chunks),
            superseded=await self._lane.run(let_go, self._store, draft.source, record) if request.prefill else None,
        )

    async def _keep_beginning(
        self,
        engine: Engine,
        request: AddRequest,
        draft: Draft,
        interrupted: PackWriter,
        tiles: Tiles,
        early: EarlyEnd,
    ) -> None:
        """Keep the whole blocks that were computed, although this is being cancelled: the same add goes on there."""
        n_tokens = tiles.whole_blocks(draft.plan, draft.first_block) * BLOCK_TOKENS
        held_tokens = draft.source.n_tokens if draft.source is not None else 0
        if n_tokens <= held_tokens:
            early.lost(f"less than a block of {BLOCK_TOKENS} tokens was computed")
            return
        early.keeps(n_tokens)
        shorter = replace(request, tokens=request.tokens[:n_tokens], context=b"", pinned=False)
        with trio.CancelScope(shield=True):
            try:
                record, new_bytes = await self._publish_beginning(engine, shorter, draft, interrupted, tiles)
                gone = await self._lane.run(let_go, self._store, draft.source, record)
            except (KvnetError, OSError) as error:
                early.lost(str(error))
                return
        early.kept(Beginning(record, new_bytes, gone))

    async def _publish_beginning(
        self, engine: Engine, shorter: AddRequest, draft: Draft, interrupted: PackWriter, tiles: Tiles
    ) -> tuple[ArtifactRecord, int]:
        """The artifact, and the bytes of its tiles that are new."""
        short = self._draft(draft.fingerprint, shorter, draft.source)
        blocks = range(short.first_block, short.plan.n_blocks)
        room = sum(tiles.written[index].length_bytes for block in blocks for index in draft.plan.tiles_of_block(block))
        writer = await self._lane.run(self._store.begin_pack, len(short.plan), expected_bytes=room)
        try:
            entries = await self._lane.run(short.write_head, writer, shorter.tokens, shorter.context)
            packs = (interrupted, draft.plan), (writer, short.plan)
            for block in blocks:
                entries |= await self._lane.run(move_block, block, *packs, tiles.written)
            record = await self._lane.run(self._publish, engine, shorter, short, writer, entries, tiles.origins)
        except BaseException:
            writer.abort()
            raise
        return record, room

    async def _export(
        self,
        engine: Engine,
        request: AddRequest,
        draft: Draft,
        writer: PackWriter,
        tiles: Tiles,
        progress: ProgressCallback | None,
    ) -> Exported:
        restore = None
        if draft.source is not None:
            restore = await self._lane.run(restore_plan, self._store, draft.source.record, draft.source.n_tokens)
            if restore is None:
                raise StoreError(
                    "a chunk of the stored prefix disappeared while it was being extended",
                    hint="Run the command again.",
                )
        export = ExportRequest(
            tokens=request.tokens,
            restore=restore,
            pack_path=writer.path,
            pack_offset=writer.next_offset,
            first_block=draft.first_block,
            codec=request.codec,
            context_size_bytes=len(request.context),
            prefill=request.prefill,
            background=request.background,
        )
        async with aclosing(engine.export(export)) as events:
            async for event in events:
                if isinstance(event, Exported):
                    return event
                tiles.note(event)
                if tiles.notes is not None and tiles.notes.due(event.done_tokens):
                    await self._lane.run(self._note_beginning, engine, request, draft, writer, tiles)
                if progress is not None:
                    await progress(event.done_tokens, event.total_tokens)
        raise EngineError("the engine ended an export without a result", hint="Run the command again.")

    def _note_beginning(
        self, engine: Engine, request: AddRequest, draft: Draft, writer: PackWriter, tiles: Tiles
    ) -> None:
        """Have the whole blocks computed so far outlive this process, should it be killed."""
        n_tokens = tiles.whole_blocks(draft.plan, draft.first_block) * BLOCK_TOKENS
        if tiles.notes is None or not tiles.notes.due(n_tokens):
            return
        tiles.notes.noted_tokens = n_tokens
        shorter = replace(request, tokens=request.tokens[:n_tokens], context=b"")
        short = self._draft(draft.fingerprint, shorter, draft.source)
        try:
            beginning = tiles.beginning(
                draft,
                short,
                shorter.tokens,
                lambda entries: self._signed(engine, shorter, short, entries, tiles.origins),
            )
            self._store.note_beginning(writer, beginning)
        except KvnetError as error:
            # The add itself goes on, and says what is wrong if it is of any matter.
            _log.info("what is computed would not survive this process: %s", error)

    def _publish(
        self,
        engine: Engine,
        request: AddRequest,
        draft: Draft,
        writer: PackWriter,
        entries: dict[int, ChunkEntry],
        origins: Sequence[Origin],
    ) -> ArtifactRecord:
        _, envelope, keys = self._signed(engine, request, draft, entries, origins)
        return writer.publish(envelope, keys=keys, pinned=request.pinned)

    def _signed(
        self,
        engine: Engine,
        request: AddRequest,
        draft: Draft,
        entries: Mapping[int, ChunkEntry],
        origins: Sequence[Origin],
    ) -> tuple[Manifest, bytes, list[PrefixKey]]:
        """The manifest, the same signed, and the prefix keys.

        Raises:
            TrustError: the state comes from somebody not trusted, from too many, or from a lossy artifact.
        """
        namespace = self._identity.namespaces()[0]
        key = self._identity.signing_key()
        keys = block_keys(namespace.prefix_root(draft.fingerprint.hash), request.tokens)
        listed = [entries[index] for index in range(len(draft.plan))]
        require_lossless_origins(request.codec, origins)
        spans = all_spans(draft.source, origins, key.public)
        manifest = draft.manifest(
            engine.info.producer,
            codec=request.codec,
            created_s=request.created_s,
            namespace=namespace.id,
            last_key=keys[-1],
            publisher=key.public,
            spans=spans,
            entries=listed,
        )
        verdict = self._identity.policy().judge(manifest)
        if isinstance(verdict, Refusal):
            raise TrustError(f"the state is not kept: {verdict.text}", hint="Compute it anew.")
        return manifest, seal(StatementType.MANIFEST, encode_manifest(manifest), key), keys
