"""Rebuilds a Hugging Face ``tokenizer.json`` from the tokenizer metadata of a GGUF file.

Only byte-level BPE (``tokenizer.ggml.model = gpt2``). GGUF names the split before BPE with one word
(``tokenizer.ggml.pre``); what each word means is written out in ``_PRE_TOKENIZERS``. An unknown word is refused:
a wrong split gives wrong token ids without any sign of it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from kvnet.errors import CompatibilityError, MalformedError

# Token types of the GGUF specification (`tokenizer.ggml.token_type`).
_CONTROL = 3
_USER_DEFINED = 4
_UNKNOWN = 2

# The split of the published GPT-2 tokenizer is built into ByteLevel(use_regex=True). The two below are written
# in the `tokenizer.json` of the Llama 3 and Qwen2 releases.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level(*, use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return _byte_level(use_regex=True)


def _digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    # As the SmolLM2 release writes it: every digit alone, then the GPT-2 split.
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)])


def _split(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
        return pre_tokenizers.Sequence([split, _byte_level(use_regex=False)])

    return build


def _default() -> pre_tokenizers.PreTokenizer:
    # llama.cpp's reading of files without the word: punctuation apart, the GPT-2 split, runs of digits in threes.
    punctuation = pre_tokenizers.Split(Regex(r"[\p{P}\$\+<=>\^~\|]+"), behavior="isolated", invert=False)
    threes = pre_tokenizers.Split(Regex(r"[0-9][0-9][0-9]"), behavior="isolated", invert=False)
    digits = pre_tokenizers.Digits(individual_digits=False)
    words = pre_tokenizers.Split(
        Regex(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"),
        behavior="isolated", invert=False,
    )  # fmt: skip
    return pre_tokenizers.Sequence([punctuation, words, digits, threes, _byte_level(use_regex=False)])


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _default,
    "gpt-2": _gpt2,
    "smollm": _digits_then_gpt2,
    "starcoder": _digits_then_gpt2,
    "refact": _digits_then_gpt2,
    "command-r": _digits_then_gpt2,
    "llama-bpe": _split(_LLAMA3_SPLIT),
    "llama3": _split(_LLAMA3_SPLIT),
    "llama-v3": _split(_LLAMA3_SPLIT),
    "qwen2": _split(_QWEN2_SPLIT),
}
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3"})


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The texts of ``tokenizer.json`` and ``tokenizer_config.json``, and the special ids for ``config.json``."""

    tokenizer_json: str
    tokenizer_config_json: str
    bos_token_id: int | None
    eos_token_id: int | None
    vocab_size: int


def build_tokenizer(metadata: Mapping[str, Any], *, window_tokens: int) -> TokenizerFiles:
    """Rebuild the tokenizer from GGUF metadata given as plain Python values.

    Raises:
        CompatibilityError: another tokenizer than byte-level BPE, or an unknown split.
        MalformedError: lists that are missing or do not fit together.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise CompatibilityError(
            f"expected a byte-level BPE tokenizer (tokenizer.ggml.model = gpt2), found {kind!r}",
            hint="import works for files with a byte-level BPE tokenizer; use an MLX folder of this model instead",
        )
    split = str(metadata.get("tokenizer.ggml.pre", "default"))
    if split not in _PRE_TOKENIZERS:
        raise CompatibilityError(
            f"expected tokenizer.ggml.pre to be one of {', '.join(sorted(_PRE_TOKENIZERS))}, found {split!r}",
            hint="use an MLX folder of this model instead",
        )
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise MalformedError(f"expected {len(tokens)} token types, one a token, found {len(types)}")
    tokenizer = _bpe(tokens, _merges(metadata), ignore_merges=split in _WHOLE_WORDS_FIRST)
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[split]()
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types, strict=True)
               if k in (_CONTROL, _UNKNOWN)]  # fmt: skip
    plain = [AddedToken(t, special=False, normalized=False) for t, k in zip(tokens, types, strict=True)
             if k == _USER_DEFINED]  # fmt: skip
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
    ids = {name: _token_id(metadata, name, len(tokens)) for name in ("bos", "eos", "padding", "unknown")}
    _add_bos_and_eos(tokenizer, metadata, tokens, ids)
    return TokenizerFiles(
        tokenizer_json=tokenizer.to_str(pretty=False),
        tokenizer_config_json=_config_json(metadata, tokens, ids, window_tokens),
        bos_token_id=ids["bos"],
        eos_token_id=ids["eos"],
        vocab_size=len(tokens),
    )


def _bpe(tokens: Sequence[str], merges: list[tuple[str, str]], *, ignore_merges: bool) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise MalformedError(f"expected {len(tokens)} different tokens, found {len(vocabulary)}")
    try:
        return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges))
    except Exception as error:  # the Rust side raises plain Exception for a merge of unknown tokens
        raise MalformedError(f"expected merges of known tokens, found: {error}") from error


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise MalformedError(f"expected {key} to be a list of strings in the file's metadata, found none")
    return value


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = []
    for merge in _strings(metadata, "tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not space or not left or not right:
            raise MalformedError(f"expected a merge of two tokens parted by a space, found {merge!r}")
        pairs.append((left, right))
    return pairs


def _token_id(metadata: Mapping[str, Any], name: str, n_tokens: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < n_tokens:
        raise MalformedError(f"expected tokenizer.ggml.{name}_token_id below {n_tokens}, found {value!r}")
    return value


def _add_bos_and_eos(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str], ids: Mapping[str, int | None]
) -> None:
    bos = ids["bos"] if metadata.get("tokenizer.ggml.add_bos_token") else None
    eos = ids["eos"] if metadata.get("tokenizer.ggml.add_eos_token") else None
    byte_level = processors.ByteLevel(trim_offsets=True)
    if bos is None and eos is None:
        tokenizer.post_processor = byte_level
        return
    before = [tokens[bos]] if bos is not None else []
    after = [tokens[eos]] if eos is not None else []
    named = [(tokens[i], i) for i in (bos, eos) if i is not None]
    single = [*before, "$A", *after]
    pair = [*before, "$A", *after, *(f"{t}:1" for t in before), "$B:1", *(f"{t}:1" for t in after)]
    template = processors.TemplateProcessing(single=single, pair=pair, special_tokens=named)
    tokenizer.post_processor = processors.Sequence([byte_level, template])


def _config_json(
    metadata: Mapping[str, Any], tokens: Sequence[str], ids: Mapping[str, int | None], window_tokens: int
) -> str:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": window_tokens,
    }
    for name, key in (("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token"), ("unknown", "unk_token")):
        token_id = ids[name]
        if token_id is not None:
            config[key] = tokens[token_id]
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str) and template:
        config["chat_template"] = template
    return json.dumps(config, ensure_ascii=False, indent=2, sort_keys=True) + "\n"
