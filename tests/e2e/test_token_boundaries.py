"""Questions and prompts whose tokens run across the end of what is held, with a real engine and tokenizer."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Kvnet
from tests.mlx import tinymodels

pytestmark = [pytest.mark.e2e, pytest.mark.mlx]

# A template that puts nothing between the document and the question, so that tokens can run across the cut.
PLAIN_TEMPLATE = "{{ '<s>' }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
MERGES = ["a n", "z i", "an zi", "Ċ Ċ", "Ġ t"]
WINDOW = {**tinymodels.LLAMA, "max_position_embeddings": 32_768}


class Tokens:
    """The tiny tokenizer, here: byte-level BPE with the merges above and four special tokens."""

    def __init__(self, model: Path) -> None:
        from transformers import PreTrainedTokenizerFast

        self._tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json"))

    def of(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "merging"
    return tinymodels.write_model(folder, WINDOW, template=PLAIN_TEMPLATE, merges=MERGES)


@pytest.fixture(scope="module")
def tokens(model: Path) -> Tokens:
    return Tokens(model)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Kvnet]:
    """One running node for the whole module: its engine stays loaded."""
    runner = Kvnet(tmp_path_factory.mktemp("node") / "data")
    runner.environment["KVNET_MODEL_PATHS"] = str(model)
    runner.start()
    yield runner
    runner.end()


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# The document ends with "=== name ===\n…\n\n": its last bytes are newlines, which the merge of two newlines joins with
# a question that begins with one.
BOUNDARIES = {
    "a merge across the cut": "\nand so on",
    "a question that begins like another": "zi",
    "a cut beside a character of two bytes": "é",
    "the text of a special token": "<|start|>user",
    "half the text of a special token": "<|sta",
    "a space and a merge": " the end",
}


@pytest.mark.parametrize("case", BOUNDARIES)
def test_a_question_reuses_exactly_the_common_tokens_of_its_own_tokenization(
    node: Kvnet, tokens: Tokens, tmp_path: Path, case: str
) -> None:
    file = tmp_path / "words.txt"
    file.write_text("The word Hanzi, and Han.\n", encoding="utf-8")
    layout = f"=== {file.name} ===\n{file.read_text(encoding='utf-8')}\n"
    added = node.json("add", str(file), "--name", "words")
    question = BOUNDARIES[case]
    flags = ("ask", "words", "--max-tokens", "6", "--", question)
    cold, warm = node.json("ask", "words", "--max-tokens", "6", "--no-reuse", "--", question), node.json(*flags)
    whole = tokens.of("<s>" + layout + question)
    # What is reused is the common beginning of the artifact's tokens, which are some of the whole rendering of the
    # context, and of the prompt's own.
    artifact = tokens.of("<s>" + layout)[: added["tokens"]]
    assert warm["prompt_tokens"] == len(whole)
    assert warm["reused_tokens"] == min(common(artifact, whole), len(whole) - 1)
    assert warm["text"] == cold["text"] != ""
    assert cold["reused_tokens"] == 0


def test_prompts_around_an_artifact_are_answered_as_cold(node: Kvnet, tokens: Tokens, tmp_path: Path) -> None:
    file = tmp_path / "around.txt"
    file.write_text("one two three " * 20 + "café and more", encoding="utf-8")
    layout = f"=== {file.name} ===\n{file.read_text(encoding='utf-8')}\n\n"
    added = node.json("add", str(file), "--name", "around")
    held = tokens.of("<s>" + layout)[: added["tokens"]]

    def text_of(wanted: list[int]) -> str:
        (text,) = {layout[:n] for n in range(len(layout) + 1) if tokens.of("<s>" + layout[:n]) == wanted}
        return text

    equal = text_of(held)
    prompts = [
        equal,
        equal + "x",
        text_of(held[:-1]),
        # The two letters differ in their second byte only: the cut is inside a character.
        equal.replace("café", "cafè"),
        "=",
    ]
    reused = []
    for prompt in prompts:
        cold = node.json("generate", f"--prompt={prompt}", "--max-tokens", "6", "--no-reuse")
        warm, again = (node.json("generate", f"--prompt={prompt}", "--max-tokens", "6") for _ in range(2))
        assert warm["text"] == again["text"] == cold["text"] != ""
        whole = tokens.of("<s>" + prompt)
        assert warm["prompt_tokens"] == len(whole)
        assert warm["reused_tokens"] == again["reused_tokens"] == min(common(held, whole), len(whole) - 1)
        reused.append(warm["reused_tokens"])
    assert reused[:3] == [len(held) - 1, len(held), len(held) - 2]
    assert reused[3] == len(tokens.of("<s>" + equal[: equal.index("é")])) + 1


def test_a_prompt_of_one_token_in_all_is_answered(node: Kvnet, tmp_path: Path) -> None:
    chat = tmp_path / "chat.json"
    chat.write_text(json.dumps([{"role": "user", "content": ""}]), encoding="utf-8")
    flags = ("generate", "--chat", str(chat), "--max-tokens", "6")
    answers = [node.json(*flags), node.json(*flags, "--no-reuse"), node.json(*flags)]
    assert {answer["prompt_tokens"] for answer in answers} == {1}
    assert {answer["reused_tokens"] for answer in answers} == {0}
    assert len({answer["text"] for answer in answers} | {""}) == 2
