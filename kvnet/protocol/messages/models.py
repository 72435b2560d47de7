"""Which models a member has, and the samples by which two machines compare one."""

from typing import Annotated

import msgspec

from kvnet.format import limits
from kvnet.format.hashes import blake3_hash
from kvnet.format.sample import MAX_SAMPLE_BYTES
from kvnet.protocol.messages.base import BaseMessage, encode_message
from kvnet.protocol.messages.fields import Bytes32, RequestId, Slot

MAX_MODELS = 32
"""Models a node tells of."""
MAX_WEIGHT_BITS = 64
"""Of one weight of a model."""
MAX_GROUP = 65536
"""Weights that share a scale."""


class GetModels(BaseMessage, frozen=True, tag="get_models"):
    """Which models do you have?

    Attributes:
        mine: digest of the models the asking side has, see `models_digest`; whoever knows it of other ones asks back.
    """

    request_id: RequestId
    slot: Slot
    mine: Bytes32


class ModelEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model of a peer.

    Attributes:
        name: as its owner calls it, for people.
        fingerprint: the encoded fingerprint document.
        producer: the encoded producer record of that node.
        sample: hash of its sample; empty when it has none yet.
        bits: of a weight, 0 when they are not quantised.
        group: weights that share a scale; 0 when they are not quantised.
        dtype: what is not quantised is in; empty when its owner does not know.
    """

    name: Annotated[str, msgspec.Meta(max_length=256)]
    fingerprint: Annotated[bytes, msgspec.Meta(min_length=1, max_length=limits.MAX_FINGERPRINT_BYTES)]
    producer: Annotated[bytes, msgspec.Meta(min_length=1, max_length=4096)]
    sample: Annotated[bytes, msgspec.Meta(max_length=32)]
    bits: Annotated[int, msgspec.Meta(ge=0, le=MAX_WEIGHT_BITS)] = 0
    group: Annotated[int, msgspec.Meta(ge=0, le=MAX_GROUP)] = 0
    dtype: Annotated[str, msgspec.Meta(max_length=16)] = ""


class Models(BaseMessage, frozen=True, tag="models"):
    """These."""

    request_id: RequestId
    models: Annotated[tuple[ModelEntry, ...], msgspec.Meta(max_length=MAX_MODELS)]


class GetSample(BaseMessage, frozen=True, tag="get_sample"):
    """Send the sample of K/V that this model makes on your machine.

    Attributes:
        fingerprint: the model's fingerprint hash.
    """

    request_id: RequestId
    slot: Slot
    fingerprint: Bytes32


class Sample(BaseMessage, frozen=True, tag="sample"):
    """The sample, as `kvnet.format.sample` writes it."""

    request_id: RequestId
    sample: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_SAMPLE_BYTES)]


def models_digest(models: tuple[ModelEntry, ...]) -> bytes:
    """What `GetModels` names a node's models by: BLAKE3 of the `Models` message with 0 for its request id, 32 bytes."""
    return blake3_hash(encode_message(Models(request_id=0, models=models)))
