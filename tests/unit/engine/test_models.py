"""Finding and naming the models on this machine."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from kvnet.engine.model_folder import ModelEntry, Quantisation, read_config
from kvnet.engine.models import choose_model, find_config, resolve_model, scan_models
from kvnet.errors import MalformedError, UnknownModelError

LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_size": 64, "max_position_embeddings": 256, "torch_dtype": "bfloat16",
}  # fmt: skip


def weights(dtype: str = "BF16", packed: bool = False) -> bytes:
    size = {"F32": 4, "BF16": 2, "F16": 2, "I8": 1}[dtype]
    tensors: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    names = ["norm.weight", "q.scales"] if packed else ["norm.weight"]
    offset = 0
    for name in names:
        tensors[name] = {"dtype": dtype, "shape": [4], "data_offsets": [offset, offset + 4 * size]}
        offset += 4 * size
    if packed:
        tensors["q.weight"] = {"dtype": "U32", "shape": [4], "data_offsets": [offset, offset + 16]}
        offset += 16
    header = json.dumps(tensors).encode()
    return struct.pack("<Q", len(header)) + header + bytes(offset)


def model(folder: Path, config: dict[str, Any] | None = None, data: bytes | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config if config is not None else LLAMA))
    (folder / "model.safetensors").write_bytes(data if data is not None else weights())
    return folder


def snapshot(hub: Path, name: str, commit: str, ref: str | None = None, **options: Any) -> Path:
    repository = hub / ("models--" + name.replace("/", "--"))
    folder = model(repository / "snapshots" / commit, **options)
    if ref is not None:
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / ref).write_text(commit)
    return folder


def scan(home: Path, *extra: Path, data_dir: Path | None = None, **environment: str) -> list[ModelEntry]:
    return scan_models(extra, data_dir=data_dir, home=home, environment=environment)


def test_a_machine_without_models_gives_an_empty_list(tmp_path: Path) -> None:
    assert scan(tmp_path, tmp_path / "missing", data_dir=tmp_path / "data") == []


def test_every_place_is_looked_at(tmp_path: Path) -> None:
    snapshot(tmp_path / ".cache/huggingface/hub", "mlx-community/Tiny-4bit", "c1", "main")
    model(tmp_path / ".lmstudio/models/publisher/studio-model")
    model(tmp_path / "configured/one")
    model(tmp_path / "data/models/imported")
    found = scan(tmp_path, tmp_path / "configured", data_dir=tmp_path / "data")
    assert [(entry.name, entry.source) for entry in found] == [
        ("imported", "data"), ("mlx-community/Tiny-4bit", "huggingface"), ("one", "configured"),
        ("publisher/studio-model", "lmstudio"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "hub"),
    [
        ({"HF_HUB_CACHE": "{}/a"}, "a"),
        ({"HUGGINGFACE_HUB_CACHE": "{}/b"}, "b"),
        ({"HF_HOME": "{}/c"}, "c/hub"),
        ({"HF_HOME": "~/d"}, "d/hub"),
        ({"XDG_CACHE_HOME": "{}/e"}, "e/huggingface/hub"),
        ({"HF_HUB_CACHE": "{}/a", "HF_HOME": "{}/c"}, "a"),
    ],
)
def test_the_hugging_face_cache_is_where_its_variables_say(tmp_path: Path, variables: dict[str, str], hub: str) -> None:
    snapshot(tmp_path / hub, "org/m", "c1", "main")
    environment = {key: value.format(tmp_path) for key, value in variables.items()}
    assert [entry.name for entry in scan_models(home=tmp_path, environment=environment)] == ["org/m"]


def test_the_snapshot_of_the_newest_ref_is_taken(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    old = snapshot(hub, "org/m", "old", "main")
    new = snapshot(hub, "org/m", "new", "v2")
    refs = hub / "models--org--m/refs"
    os.utime(refs / "main", (1, 1))
    os.utime(refs / "v2", (2, 2))
    assert [entry.path for entry in scan(tmp_path, HF_HUB_CACHE=str(hub))] == [new]
    os.utime(refs / "main", (3, 3))
    assert [entry.path for entry in scan(tmp_path, HF_HUB_CACHE=str(hub))] == [old]


def test_what_the_files_say_is_reported(tmp_path: Path) -> None:
    config = {**LLAMA, "quantization": {"bits": 4, "group_size": 64}}
    model(tmp_path / "m", config, weights("F16", packed=True))
    (entry,) = scan(tmp_path / "home", tmp_path / "m")
    assert entry.quantisation == Quantisation(4, 64)
    assert str(entry.quantisation) == "4-bit, groups of 64"
    # The tensors are float16 whatever the config says, and so are K/V.
    assert entry.dtype == "float16"
    assert entry.kv_bytes_per_token == 2 * 2 * 16 * 2 * 2
    assert (entry.window_tokens, entry.shareable, entry.reason) == (256, True, "")
    assert entry.size_bytes == (tmp_path / "m/model.safetensors").stat().st_size
    assert entry.as_json()["quantisation"] == {"bits": 4, "group_size": 64}
    json.dumps(entry.as_json())


@pytest.mark.parametrize(
    ("change", "shareable", "reason"),
    [
        ({"model_type": "mamba"}, False, "recurrent state"),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}, False, "sliding window of 8"),
        ({"model_type": "llama4"}, False, "chunked"),
        ({"model_type": "brand_new"}, None, "decided when loaded"),
    ],
)
def test_a_model_that_cannot_be_shared_says_why(
    tmp_path: Path, change: dict[str, Any], shareable: bool | None, reason: str
) -> None:
    model(tmp_path / "m", {**LLAMA, **change})
    (entry,) = scan(tmp_path / "home", tmp_path / "m")
    assert not entry.broken
    assert entry.shareable is shareable
    assert reason in entry.reason


BROKEN: dict[str, tuple[dict[str, bytes], str]] = {
    "no config": ({"model.safetensors": weights()}, "no config.json"),
    "no weights": ({"config.json": json.dumps(LLAMA).encode()}, "no *.safetensors"),
    "config no JSON": ({"config.json": b"{", "model.safetensors": weights()}, "expected JSON"),
    "config too deep": ({"config.json": b"[" * 200_000, "model.safetensors": weights()}, "expected JSON"),
    "config a list": ({"config.json": b"[]", "model.safetensors": weights()}, "JSON object"),
    "config not UTF-8": ({"config.json": b"\xff\xfe{}", "model.safetensors": weights()}, "expected JSON"),
    "config without type": ({"config.json": b"{}", "model.safetensors": weights()}, "model_type"),
    "config without layers": ({"config.json": b'{"model_type": "llama"}', "model.safetensors": weights()}, "hidden"),
    "weights empty": ({"config.json": json.dumps(LLAMA).encode(), "model.safetensors": b""}, "safetensors header"),
    "weights junk": ({"config.json": json.dumps(LLAMA).encode(), "model.safetensors": b"\xff" * 64}, "header"),
    "weights no JSON": (
        {"config.json": json.dumps(LLAMA).encode(), "model.safetensors": struct.pack("<Q", 4) + b"{{{{" + bytes(9)},
        "safetensors header",
    ),
    "a shard missing": (
        {
            "config.json": json.dumps(LLAMA).encode(), "model-00001-of-00002.safetensors": weights(),
            "model.safetensors.index.json": json.dumps({"weight_map": {
                "a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors",
            }}).encode(),
        },
        "model-00002-of-00002.safetensors",
    ),
    "index no map": (
        {"config.json": json.dumps(LLAMA).encode(), "a.safetensors": weights(), "model.safetensors.index.json": b"[]"},
        "weight_map",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_listed_with_the_reason(tmp_path: Path, case: str) -> None:
    files, reason = BROKEN[case]
    folder = tmp_path / "m"
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (entry,) = scan(tmp_path / "home", folder)
    assert entry.broken
    assert entry.shareable is False
    assert reason in entry.reason
    with pytest.raises(UnknownModelError, match="broken"):
        resolve_model("m", [entry])


def test_weights_whose_link_leads_nowhere_are_missing(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(tmp_path / "blobs" / "gone")
    (entry,) = scan(tmp_path / "home", folder)
    assert entry.broken
    assert "model.safetensors" in entry.reason


def test_a_folder_of_something_else_is_not_listed(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    (hub / "models--org--gguf/snapshots/c1").mkdir(parents=True)
    (hub / "models--org--gguf/snapshots/c1/model.gguf").write_bytes(b"GGUF")
    (hub / "datasets--org--d/snapshots/c1").mkdir(parents=True)
    (hub / "models--org--empty").mkdir()
    assert scan(tmp_path, HF_HUB_CACHE=str(hub)) == []


def test_hidden_folders_of_an_import_under_way_are_not_listed(tmp_path: Path) -> None:
    model(tmp_path / "data/models/.m.1a2b3c4d.importing")
    assert scan(tmp_path, data_dir=tmp_path / "data") == []


def test_a_model_reached_by_two_ways_is_listed_once(tmp_path: Path) -> None:
    folder = model(tmp_path / "configured/one")
    (tmp_path / "link").symlink_to(folder)
    assert len(scan(tmp_path, tmp_path / "configured", tmp_path / "link", folder)) == 1


@pytest.fixture
def entries(tmp_path: Path) -> list[ModelEntry]:
    names = ["mlx-community/Qwen3-8B-4bit", "other/Qwen3-8B-4bit", "mlx-community/SmolLM2", "plain"]
    return [
        ModelEntry(name=name, path=model(tmp_path / name), source="configured", size_bytes=1, shareable=name != "plain")
        for name in names
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mlx-community/Qwen3-8B-4bit", "mlx-community/Qwen3-8B-4bit"),
        ("SmolLM2", "mlx-community/SmolLM2"),
        ("smollm2", "mlx-community/SmolLM2"),
        ("Other/qwen3-8b-4bit", "other/Qwen3-8B-4bit"),
        ("plain", "plain"),
    ],
)
def test_a_model_goes_by_its_name_or_the_last_part_of_it(entries: list[ModelEntry], text: str, expected: str) -> None:
    assert resolve_model(text, entries).name == expected


def test_a_model_goes_by_its_path_even_where_no_scan_looks(entries: list[ModelEntry], tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path / "plain"), entries) is entries[3]
    elsewhere = model(tmp_path / "elsewhere")
    assert resolve_model(str(elsewhere), entries).path == elsewhere


def test_an_unknown_model_is_refused_with_the_names_there_are(entries: list[ModelEntry]) -> None:
    with pytest.raises(UnknownModelError, match="'Qwen4'") as refusal:
        resolve_model("Qwen4", entries)
    assert all(entry.name in refusal.value.hint for entry in entries)
    with pytest.raises(UnknownModelError) as refusal:
        resolve_model("Qwen4", [])
    assert "kvnet model list" in refusal.value.hint


def test_an_ambiguous_model_is_refused_with_the_candidates(entries: list[ModelEntry]) -> None:
    with pytest.raises(UnknownModelError, match="found 2") as refusal:
        resolve_model("Qwen3-8B-4bit", entries)
    assert "other/Qwen3-8B-4bit" in str(refusal.value)
    assert "SmolLM2" not in str(refusal.value)


def test_without_a_name_the_default_or_the_only_shareable_model_is_taken(entries: list[ModelEntry]) -> None:
    assert choose_model(None, "plain", entries).name == "plain"
    assert choose_model("SmolLM2", "plain", entries).name == "mlx-community/SmolLM2"
    assert choose_model(None, None, entries[2:]).name == "mlx-community/SmolLM2"
    with pytest.raises(UnknownModelError, match="found 3") as refusal:
        choose_model(None, None, entries)
    assert "plain" in refusal.value.hint
    with pytest.raises(UnknownModelError, match="none that can be shared"):
        choose_model(None, None, entries[3:])


@pytest.mark.parametrize("text", ["a" * 1_000_000, "/" + "a/" * 5000, "~nobody-by-this-name/x", "a\0b", "\ud800"])
def test_what_can_be_no_path_is_an_unknown_model(entries: list[ModelEntry], text: str) -> None:
    with pytest.raises(UnknownModelError):
        resolve_model(text, entries)


def test_size_takes_a_name_a_folder_or_a_config_file(entries: list[ModelEntry], tmp_path: Path) -> None:
    assert find_config("SmolLM2", entries) == ("mlx-community/SmolLM2", LLAMA)
    assert find_config(str(tmp_path / "plain"), []) == ("plain", LLAMA)
    assert find_config(str(tmp_path / "plain/config.json"), []) == ("plain", LLAMA)
    (tmp_path / "qwen.json").write_text(json.dumps(LLAMA))
    assert find_config(str(tmp_path / "qwen.json"), []) == ("qwen", LLAMA)
    with pytest.raises(UnknownModelError):
        find_config("nothing", entries)


def test_a_config_too_large_to_be_one_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(MalformedError, match="at most"):
        read_config(tmp_path)


def test_importing_this_module_loads_no_mlx() -> None:
    import subprocess
    import sys

    code = "import sys, kvnet.engine.models, kvnet.engine.gguf_source; sys.exit('mlx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
