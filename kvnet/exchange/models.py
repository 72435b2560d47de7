"""Which models two nodes have in common, and how far apart what they compute of them is.

Two members that meet tell each other their models, fetch the samples of those they have in common, and compare. What is
found counts for reuse from then on; see `kvnet.exchange.reuse`.
"""

import logging
import time
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import trio

from kvnet.errors import CompatibilityError, KvnetError, MalformedError, PeerRefusedError
from kvnet.exchange.lane import Lane
from kvnet.exchange.measured import Finding, Measurements
from kvnet.exchange.node import ExchangeNode
from kvnet.exchange.session import PeerSession, expect
from kvnet.format import cbor
from kvnet.format.fingerprint import Producer, decode_fingerprint
from kvnet.format.sample import decode_sample, sample_hash
from kvnet.network.news import News, any_of
from kvnet.protocol.ids import PeerId
from kvnet.protocol.matching import ModelHere, ModelMatch, Packing, Relation, match_models, with_measured
from kvnet.protocol.messages.control import Reply, Request
from kvnet.protocol.messages.handshake import Capability
from kvnet.protocol.messages.models import MAX_MODELS, GetModels, GetSample, ModelEntry, Models, Sample, models_digest
from kvnet.protocol.messages.refusals import RefusalReason, Refused

_log = logging.getLogger(__name__)

REFRESH_S = 600.0
"""Seconds after which a peer is asked for its models again."""

RETRY_S = 30.0
"""Seconds after which a peer that did not answer is asked again."""

HINTS_PER_PEER = MAX_MODELS
"""Times a peer that says it has other models is asked back in one `REFRESH_S`: once for each it may load."""

SAMPLES_PER_PEER = 2 * MAX_MODELS
"""Samples a peer gets, and is asked for, in one `REFRESH_S`: twice what is needed."""

ASKED_PER_PEER = 64
"""Times a peer is told of the models in one `REFRESH_S`: each costs up to 22 KiB, and some milliseconds."""

MAX_NAME_CHARACTERS = 256
"""Of a model's name; what `ModelEntry` takes."""

MAX_PRODUCER_BYTES = 4096
"""An encoded producer record; what `ModelEntry` takes."""


@dataclass(frozen=True, slots=True)
class OwnModel:
    """A model of this node, as it is told of.

    Attributes:
        here: the model.
        sample: its encoded sample; empty when it has none.
        digest: the sample's hash; empty when it has none.
    """

    here: ModelHere
    sample: bytes = b""
    digest: bytes = b""

    @classmethod
    def of(cls, here: ModelHere) -> "OwnModel":
        """A model with its sample, if it has one."""
        data = here.sample.encode() if here.sample is not None else b""
        return cls(here, data, sample_hash(data) if data else b"")


@dataclass(frozen=True, slots=True)
class PeerModel:
    """A model of a peer, beside the one here that is most like it.

    Attributes:
        theirs: the peer's, without its sample.
        ours: name of the one here; "" when none has anything to do with it.
        match: how they compare; None when `ours` is empty.
    """

    theirs: ModelHere
    ours: str = ""
    match: ModelMatch | None = None


@dataclass(slots=True)
class _Allowance:
    """So many times in one `REFRESH_S`."""

    most: int
    used: int = 0
    since_s: float = float("-inf")

    def take(self) -> bool:
        """Once more, if that is allowed."""
        now_s = trio.current_time()
        if now_s - self.since_s >= REFRESH_S:
            self.used, self.since_s = 0, now_s
        self.used += 1
        return self.used <= self.most


@dataclass(slots=True)
class _Known:
    """What is known of one connected peer, as long as it has a session.

    `digest` is that of the models it told of last.
    """

    sessions: int = 0
    models: list[PeerModel] = field(default_factory=list)
    digest: bytes = b""
    hint: trio.Event = field(default_factory=trio.Event)
    hints: _Allowance = field(default_factory=lambda: _Allowance(HINTS_PER_PEER))
    told: _Allowance = field(default_factory=lambda: _Allowance(ASKED_PER_PEER))
    given: _Allowance = field(default_factory=lambda: _Allowance(SAMPLES_PER_PEER))
    wanted: _Allowance = field(default_factory=lambda: _Allowance(SAMPLES_PER_PEER))


class ModelExchange:
    """Tells members of this node's models, and compares theirs with them.

    Args:
        node: among its peers; not running yet.
        models: this node's models at the moment; the first ones are told.
        lane: where samples are compared: tens of milliseconds each.
        measured: where findings are kept.
        meet: compare with every member that comes, and not only when asked to.
        wall_s: seconds since 1970, which findings are dated by.
    """

    def __init__(
        self,
        node: ExchangeNode,
        models: Callable[[], Sequence[OwnModel]],
        *,
        lane: Lane,
        measured: Measurements,
        meet: bool = True,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._node = node
        self._models = models
        self._lane = lane
        self._measured = measured
        self._wall_s = wall_s
        self._known: dict[PeerId, _Known] = {}
        self._changed = News()
        self.unasked: Callable[[], bool] = lambda: True
        """Whether members may be asked that nobody here wanted to know of."""
        node.offer_capability(Capability.MODELS)
        node.answer_with(GetModels, self._answer_models)
        node.answer_with(GetSample, self._answer_sample)
        if meet:
            node.greet_with(self._greet)

    def of(self, peer: PeerId) -> list[PeerModel]:
        """The models of a connected peer, as far as they are known."""
        known = self._known.get(peer)
        return list(known.models) if known is not None else []

    def told_names(self) -> dict[bytes, str]:
        """What connected peers call models, by the hash of their fingerprint; not escaped."""
        told = [model.theirs for known in self._known.values() for model in known.models]
        return {bytes(each.fingerprint.hash): each.name for each in told}

    def changed(self) -> None:
        """This node has other models or samples than a moment ago: compare anew with everybody."""
        self._changed.tell()

    # --- what peers ask -----------------------------------------------------------------------------------------------

    def _answer_models(self, session: PeerSession, request: Request) -> Reply:
        assert isinstance(request, GetModels)  # noqa: S101 - answerers are called by kind
        if request.slot not in session.member_slots:
            return Refused(request_id=request.request_id, reason=RefusalReason.UNKNOWN)
        known = self._of(session.peer)
        if not known.told.take():
            return Refused(request_id=request.request_id, reason=RefusalReason.BUSY)
        if request.mine != known.digest and known.hints.take():
            known.hint.set()
        return Models(request_id=request.request_id, models=self._entries())

    def _entries(self) -> tuple[ModelEntry, ...]:
        return tuple(_entry(own) for own in self._models()[:MAX_MODELS])

    def _answer_sample(self, session: PeerSession, request: Request) -> Reply:
        assert isinstance(request, GetSample)  # noqa: S101 - answerers are called by kind
        samples = (own.sample for own in self._models() if own.here.fingerprint.hash == request.fingerprint)
        sample = next(samples, b"")
        if request.slot not in session.member_slots or not sample:
            return Refused(request_id=request.request_id, reason=RefusalReason.UNKNOWN)
        if not self._of(session.peer).given.take():
            return Refused(request_id=request.request_id, reason=RefusalReason.BUSY)
        return Sample(request_id=request.request_id, sample=sample)

    def _of(self, peer: PeerId) -> _Known:
        return self._known.setdefault(peer, _Known())

    # --- what is asked of peers ---------------------------------------------------------------------------------------

    async def _greet(self, session: PeerSession) -> None:
        """Ask a member for its models, now and from time to time, until the session ends."""
        known = self._of(session.peer)
        known.sessions += 1
        try:
            if not self.can_ask(session):
                await trio.sleep_forever()
            while True:
                changed, known.hint = self._changed.next, trio.Event()
                heard = not self.unasked() or await self._refresh(session)
                with trio.move_on_after(REFRESH_S if heard else RETRY_S):
                    await any_of(changed, known.hint)
        finally:
            known.sessions -= 1
            if not known.sessions:
                self._known.pop(session.peer, None)

    async def _refresh(self, session: PeerSession) -> bool:
        """Whether the peer has told of its models."""
        try:
            await self.refresh(session)
        except KvnetError as error:
            _log.debug("a peer's models are not known: %s", error)
            return False
        return True

    @staticmethod
    def can_ask(session: PeerSession) -> bool:
        """Whether a peer tells of its models."""
        return bool(session.member_slots) and Capability.MODELS in session.opened.capabilities

    async def refresh(self, session: PeerSession) -> list[PeerModel]:
        """Ask a member for its models, and compare them with those here.

        Raises:
            NetworkError: it does not answer.
            MalformedError: it answers with something else.
        """
        known = self._of(session.peer)
        slot = session.member_slots[0]
        reply = await session.ask(GetModels(request_id=0, slot=slot, mine=models_digest(self._entries())))
        expect(reply, Models)
        assert isinstance(reply, Models)  # noqa: S101 - for the type checker
        known.digest = models_digest(reply.models)
        ours = list(self._models())
        found: list[PeerModel] = []
        for entry in reply.models:
            theirs = _model_of(entry)
            mine, match = _most_alike(ours, theirs)
            if mine is not None and match is not None and match.relation is Relation.SAME:
                try:
                    match = await self._measure(session, slot, mine, theirs, entry.sample) or match
                except (CompatibilityError, MalformedError, PeerRefusedError) as error:
                    # One sample that is refused or wrong hides no other model.
                    _log.debug("a sample is not compared: %s", error)
            found.append(PeerModel(theirs, mine.here.name if mine is not None else "", match))
        known.models = found
        return list(found)

    async def _measure(
        self, session: PeerSession, slot: int, own: OwnModel, theirs: ModelHere, announced: bytes
    ) -> ModelMatch | None:
        """How two samples of one model compare; None when there are not two, or the peer gives another than it told."""
        if not own.sample or not announced:
            return None
        ours, fingerprint = own.here, own.here.fingerprint.hash
        measured = self._measured.find(session.peer, fingerprint, own.digest, announced)
        if measured is not None:
            return with_measured(ours, theirs, measured)
        if not self._of(session.peer).wanted.take():
            return None
        reply = await session.ask(GetSample(request_id=0, slot=slot, fingerprint=fingerprint))
        expect(reply, Sample)
        assert isinstance(reply, Sample)  # noqa: S101 - for the type checker
        if sample_hash(reply.sample) != announced:
            return None  # it has made another one meanwhile, or lies; the next round tells
        match = await self._lane.run(_compare, ours, theirs, reply.sample)
        if match.measured is not None:
            measured = match.measured
            self._measured.note(
                Finding(
                    session.peer,
                    fingerprint,
                    ours.producer,
                    theirs.producer,
                    own.digest,
                    announced,
                    measured.difference,
                    measured.words,
                    measured.tolerated,
                    self._wall_s(),
                )
            )
        return match


def _entry(own: OwnModel) -> ModelEntry:
    here = own.here
    return ModelEntry(
        name=_told_name(here.name),
        fingerprint=here.fingerprint.encode(),
        producer=cbor.encode_struct(here.producer),
        sample=own.digest,
        bits=here.packing.bits,
        group=here.packing.group,
        dtype=here.packing.dtype,
    )


def _told_name(name: str) -> str:
    """A name as it can be sent: a folder's may be decomposed, or no text at all."""
    return unicodedata.normalize("NFC", name.encode("utf-8", "replace").decode())[:MAX_NAME_CHARACTERS]


def _model_of(entry: ModelEntry) -> ModelHere:
    """A peer's model, without its sample.

    Raises:
        MalformedError: not a fingerprint, or not a producer record.
    """
    producer = cbor.decode_as(Producer, entry.producer, max_bytes=MAX_PRODUCER_BYTES, what="producer")
    packing = Packing(entry.bits, entry.group, entry.dtype)
    return ModelHere(entry.name, decode_fingerprint(entry.fingerprint), producer, packing)


def _most_alike(ours: Sequence[OwnModel], theirs: ModelHere) -> tuple[OwnModel | None, ModelMatch | None]:
    """The model here that is the same as a peer's, or another form of it, and how they compare without samples."""
    matches = [(mine, match_models(mine.here, theirs)) for mine in ours]
    for relation in (Relation.SAME, Relation.NEAR):
        for mine, match in matches:
            if match.relation is relation:
                return mine, match
    return None, None


def _compare(ours: ModelHere, theirs: ModelHere, data: bytes) -> ModelMatch:
    """Compare with a peer's sample, which has the hash it was told of by.

    Raises:
        MalformedError: it is no sample of that model by that producer.
    """
    sample = decode_sample(data, theirs.fingerprint)
    if sample.producer != theirs.producer:
        raise MalformedError("sample: expected one by the producer that was told, found one by another")
    return match_models(ours, ModelHere(theirs.name, theirs.fingerprint, theirs.producer, theirs.packing, sample))
