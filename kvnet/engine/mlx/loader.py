"""Loads one model folder: weights, tokenizer, identity. Runs in the prefill lane; never reaches a model hub."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model, load_tokenizer, maybe_set_recommended_wired_limit

from kvnet.engine.interface import ModelInfo
from kvnet.engine.mlx import runtime
from kvnet.engine.mlx.blas import BlasReport
from kvnet.engine.mlx.caches import evaluate, layout_of, refusal_of
from kvnet.engine.mlx.fingerprinting import (
    DigestCache,
    FileStamp,
    digest_template,
    digest_tokenizer,
    digest_weights,
    read_config,
    weight_files,
)
from kvnet.engine.mlx.state_cost import StateCost, state_cost
from kvnet.errors import CompatibilityError, EngineError, KvnetError, MalformedError
from kvnet.format.fingerprint import Fingerprint, Producer, config_digest
from kvnet.format.sample import vocabulary_of

WINDOW_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx", "max_sequence_length")
"""Names under which configurations give the longest context, most usual first."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run; every array in it is evaluated.

    Attributes:
        cost: of a sequence's state, which also models have whose state cannot be shared.
        vocabulary: token ids there are, as the configuration says.
    """

    model: Any
    tokenizer: Any
    info: ModelInfo
    cost: StateCost
    vocabulary: int

    def new_caches(self) -> list[Any]:
        """Fresh, empty caches for one sequence."""
        return list(make_prompt_cache(self.model))


def load_folder(
    folder: Path, *, digests: DigestCache, blas: BlasReport, memory_budget_bytes: int | None
) -> LoadedModel:
    """Loads a model.

    Raises:
        EngineError: the folder is missing or incomplete, mlx-lm does not support the model, or the memory budget is
            too small for its weights.
    """
    if not folder.is_dir():
        # mlx-lm would take a missing folder for a name on the model hub.
        raise EngineError(f"expected a model folder at {folder}, found none", hint="kvnet model list")
    config = read_config(folder)
    files = weight_files(folder)
    stamps = [FileStamp.of(file) for file in files]
    model, tokenizer = _load(folder)
    weights = digest_weights(files, digests)
    if [FileStamp.of(file) for file in files] != stamps:
        raise EngineError("the weights changed while the model was loaded", hint="try again once they are complete")
    caches = _after_one_token(model)
    fingerprint, refusal = _identify(weights, config, model, caches)
    return LoadedModel(
        model,
        tokenizer,
        ModelInfo(
            name=folder.name,
            path=folder,
            fingerprint=fingerprint,
            producer=producer_of(blas),
            tokenizer_digest=digest_tokenizer(folder),
            template_digest=digest_template(tokenizer.chat_template),
            window_tokens=window_of(config),
            kv_bytes_per_token=fingerprint.layers.bytes_per_token if fingerprint else 0,
            weights_size_bytes=_size_of(model),
            memory_budget_bytes=memory_budget_bytes or runtime.total_memory_bytes(),
            shareable=fingerprint is not None,
            refusal=refusal,
        ),
        state_cost(caches, runtime.prefill_step()),
        vocabulary_of(config),
    )


def _load(folder: Path) -> tuple[Any, Any]:
    # On Metal: keeps the weights from being paged out; elsewhere it does nothing.
    maybe_set_recommended_wired_limit()
    try:
        # lazy=False: weights are evaluated here, in the lane, before another thread sees them.
        model, config = load_model(folder, lazy=False)
        tokenizer = load_tokenizer(folder, {"trust_remote_code": False}, eos_token_ids=config.get("eos_token_id"))
    except KvnetError:
        raise
    except Exception as error:  # a folder's content is foreign; whatever fails, fails the loading
        raise EngineError(
            f"mlx-lm could not load {folder.name}: {type(error).__name__}: {str(error)[:300]}",
            hint="kvnet model list shows the models kvnet can load",
        ) from error
    return model, tokenizer


def _size_of(model: Any) -> int:
    tensors: Any = tree_flatten(model.parameters())
    return sum(int(array.nbytes) for _, array in tensors)


def _after_one_token(model: Any) -> list[Any]:
    """Caches that have seen one token: shapes and dtypes of K/V are not known before."""
    caches = list(make_prompt_cache(model))
    if caches:
        model(mx.array([[0]]), cache=caches)
        evaluate(caches)
    return caches


def _identify(
    weights: bytes, config: dict[str, Any], model: Any, caches: Sequence[Any]
) -> tuple[Fingerprint | None, str]:
    """The model's fingerprint, or why it has none and its K/V cannot be shared; it can still generate."""
    if refusal := refusal_of(caches):
        return None, refusal
    try:
        fingerprint = Fingerprint(
            weights=weights,
            config=config_digest(config),
            adapters=(),
            architecture=type(model).__module__.rpartition(".")[2],
            layers=layout_of(caches),
        )
        fingerprint.encode()
    except (CompatibilityError, MalformedError) as error:
        return None, error.message
    return fingerprint, ""


def producer_of(blas: BlasReport) -> Producer:
    """What computes here, as manifests record it."""
    return Producer(
        runtime="mlx-lm",
        versions=runtime.versions_text(blas),
        device=runtime.device_text(),
        system=runtime.system_text(),
        prefill_step=runtime.prefill_step(),
    )


def window_of(config: dict[str, Any]) -> int:
    """The longest context a configuration names; 0 when it names none."""
    sections: Sequence[Any] = (config, config.get("text_config"))
    for section in sections:
        for field in WINDOW_FIELDS:
            if isinstance(section, dict) and isinstance(section.get(field), int) and section[field] > 0:
                return int(section[field])
    return 0
