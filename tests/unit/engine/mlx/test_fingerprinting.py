"""Weight digests: what they depend on, what is remembered, what is refused."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvnet.engine.mlx.fingerprinting import (
    DigestCache,
    FileStamp,
    digest_template,
    digest_tokenizer,
    digest_weights,
    read_config,
    weight_files,
)
from kvnet.engine.mlx.safetensors import hash_tensors, read_header
from kvnet.errors import EngineError
from tests.mlx.tinymodels import write_safetensors

WEIGHTS: dict[str, Any] = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float16)}
LONG_AGO = (1_000_000_000, 1_000_000_000)


def folder_of(path: Path, *shards: dict[str, Any]) -> list[Path]:
    path.mkdir()
    for i, shard in enumerate(shards):
        write_safetensors(path / f"model-{i}.safetensors", shard)
    return weight_files(path)


def test_digest_is_independent_of_shards_order_and_path(tmp_path: Path) -> None:
    whole = folder_of(tmp_path / "whole", WEIGHTS)
    turned = folder_of(tmp_path / "turned", dict(reversed(WEIGHTS.items())))
    split = folder_of(tmp_path / "split", {"b": WEIGHTS["b"]}, {"a": WEIGHTS["a"]})
    digests = {digest_weights(files, DigestCache(None)) for files in (whole, turned, split)}
    assert len(digests) == 1


@pytest.mark.parametrize(
    "changed",
    [
        {**WEIGHTS, "a": WEIGHTS["a"] + 1},
        {**WEIGHTS, "a": WEIGHTS["a"].reshape(3, 2)},
        {**WEIGHTS, "b": np.ones(4, np.float16).view(np.uint16)},
        {"a": WEIGHTS["a"], "c": WEIGHTS["b"]},
        {"a": WEIGHTS["a"]},
    ],
    ids=["value", "shape", "dtype", "name", "missing"],
)
def test_digest_follows_every_part_of_a_tensor(tmp_path: Path, changed: dict[str, Any]) -> None:
    before = digest_weights(folder_of(tmp_path / "before", WEIGHTS), DigestCache(None))
    after = digest_weights(folder_of(tmp_path / "after", changed), DigestCache(None))
    assert before != after


def test_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    files = folder_of(tmp_path / "double", WEIGHTS, {"a": WEIGHTS["a"]})
    with pytest.raises(EngineError, match="'a' is in two weight files"):
        digest_weights(files, DigestCache(None))


def test_settled_files_are_remembered_and_fresh_ones_never(tmp_path: Path) -> None:
    files = folder_of(tmp_path / "model", WEIGHTS)
    cache = DigestCache(tmp_path / "digests.json")
    cache.tensors(files[0])
    cache.save()
    # The change time cannot be set back, so a file made just now is young whatever its modification time says.
    os.utime(files[0], LONG_AGO)
    cache.tensors(files[0])
    cache.save()
    assert not (tmp_path / "digests.json").exists()
    stamp = FileStamp.of(files[0])
    assert not stamp.settled(stamp.ctime_ns / 1e9 + 1.9)
    assert stamp.settled(stamp.ctime_ns / 1e9 + 2.1)


def test_remembered_digests_answer_without_reading_and_verify_reads_again(tmp_path: Path) -> None:
    files = folder_of(tmp_path / "model", WEIGHTS)
    path = tmp_path / "digests.json"
    # What another run would have left, with a digest no file has.
    remembered = [["a", "F32", [2, 3], "ab" * 32]]
    path.write_text(json.dumps({"version": 1, "files": {FileStamp.of(files[0]).key: remembered}}))
    assert [tensor.hash for tensor in DigestCache(path).tensors(files[0])] == [b"\xab" * 32]
    assert DigestCache(path, verify=True).tensors(files[0]) == hash_tensors(files[0])


@pytest.mark.parametrize(
    "content", ["", "[]", '{"version": 2}', '{"version": 1, "files": {"k": [["a", "F32", 1, 2]]}}']
)
def test_damaged_digest_cache_is_started_afresh(tmp_path: Path, content: str) -> None:
    files = folder_of(tmp_path / "model", WEIGHTS)
    (tmp_path / "digests.json").write_text(content)
    assert DigestCache(tmp_path / "digests.json").tensors(files[0]) == hash_tensors(files[0])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        (1 << 40).to_bytes(8, "little") + b"{}",
        (4).to_bytes(8, "little") + b"nope",
        (2).to_bytes(8, "little") + b"[]",
        (67).to_bytes(8, "little") + b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}     ',
    ],
    ids=["empty", "short", "huge header", "no json", "no object", "beyond the end"],
)
def test_file_that_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(EngineError, match=r"model\.safetensors"):
        read_header(path)


def test_folder_without_weights_or_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"expected model\*\.safetensors"):
        weight_files(tmp_path)
    with pytest.raises(EngineError, match=r"expected config\.json, found none"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(EngineError, match="expected a JSON object, found list"):
        read_config(tmp_path)


def test_quantisation_kept_beside_the_configuration_is_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1}')
    (tmp_path / "hf_quant_config.json").write_text('{"quant_algo": "NVFP4"}')
    assert read_config(tmp_path) == {"a": 1, "quantization_config": {"quant_algo": "NVFP4"}}


def test_tokenizer_and_template_have_digests_of_their_own(tmp_path: Path) -> None:
    empty = digest_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert digest_tokenizer(tmp_path) != empty
    assert digest_template("a") != digest_template("b")
    assert digest_template(None) == digest_template("")
    assert digest_template([{"name": "default"}]) != digest_template(None)
