"""Prompts of completion requests: their tokens, and where other prompts may part from them."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvnet.engine.prompts import BoundaryKind, PreparedPrompt, PromptKind, PromptRequest
from kvnet.errors import PromptError
from kvnet.format.prefix import common_prefix
from tests.mlx import tinymodels

pytestmark = pytest.mark.mlx

REASONING_TEMPLATE = (
    "{% set ns = namespace(last=0) %}{% for m in messages if m['role'] == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endfor %}{% set users = namespace(n=0) %}{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'user' %}{% set users.n = users.n + 1 %}{% endif %}"
    "{% if m.reasoning and users.n == ns.last + 1 %}{{ '[' + m.reasoning + ']' }}{% endif %}"
    "{{ m['content'] + '<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello there "},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "And?"},
]


class Prompts:
    """Prepares prompts without an engine process."""

    def __init__(self, folder: Path, template: str | None = tinymodels.CHAT_TEMPLATE) -> None:
        from kvnet.engine.mlx import runtime

        runtime.import_mlx_lm()
        from mlx_lm.utils import load_tokenizer

        from kvnet.engine.mlx.preparing import Preparer
        from kvnet.engine.mlx.text import PromptText

        self.tokenizer: Any = load_tokenizer(tinymodels.write_model(folder / "model", template=template))
        self._preparer = Preparer(self.tokenizer, PromptText(self.tokenizer), lambda _: 3)

    def chat(self, marks: tuple[int, ...] = (), inputs: dict[str, Any] | None = None, **body: Any) -> PreparedPrompt:
        """A chat body's prompt."""
        return self._preparer.prepare(PromptRequest(PromptKind.CHAT, json.dumps(body).encode(), inputs or {}, marks))

    def text(self, prompt: Any) -> PreparedPrompt:
        """A text body's prompt."""
        return self._preparer.prepare(PromptRequest(PromptKind.TEXT, json.dumps({"prompt": prompt}).encode(), {}))

    def before(self, prompt: PreparedPrompt, kind: BoundaryKind, n_messages: int) -> str:
        """The text before a boundary."""
        [found] = [b for b in prompt.boundaries if (b.kind, b.n_messages) == (kind, n_messages)]
        return str(self.tokenizer.decode(list(prompt.tokens[: found.n_tokens])))


@pytest.fixture
def prompts(tmp_path: Path) -> Prompts:
    return Prompts(tmp_path)


def test_messages_end_where_their_rendering_ends(prompts: Prompts) -> None:
    prompt = prompts.chat(messages=TALK, marks=(2,))
    for n in range(1, 5):
        own = prompts.tokenizer.apply_chat_template(TALK[:n], tokenize=False)
        assert prompts.before(prompt, BoundaryKind.MESSAGE, n) == own
    assert prompts.before(prompt, BoundaryKind.MARK, 2) == prompts.before(prompt, BoundaryKind.MESSAGE, 2)
    assert [b.n_tokens for b in prompt.boundaries] == sorted(b.n_tokens for b in prompt.boundaries)
    assert prompt.live_tokens == 3


def test_system_text_ends_where_questions_part(prompts: Prompts) -> None:
    prompt = prompts.chat(messages=TALK)
    assert prompts.before(prompt, BoundaryKind.SYSTEM, 1).endswith("Be brief.<|end|>\n<|start|>user\n")


def test_tools_end_before_system_text_that_follows_them(tmp_path: Path) -> None:
    first = "{% if tools %}{{ '<|start|>tools\n' + (tools | tojson) + '<|end|>\n' }}{% endif %}"
    prompts = Prompts(tmp_path, first + tinymodels.CHAT_TEMPLATE)
    prompt = prompts.chat(messages=TALK, tools=[{"type": "function", "function": {"name": "legs"}}])
    assert prompts.before(prompt, BoundaryKind.TOOLS, 0).endswith('"legs"}}]<|end|>\n<s><|start|>system\n')


def test_the_next_turn_begins_with_the_stable_tokens_whatever_the_answer(prompts: Prompts) -> None:
    prompt = prompts.chat(messages=TALK)
    for answer in ("yes", "\n\nno", " 7"):
        following = prompts.chat(messages=[*TALK, {"role": "assistant", "content": answer}, TALK[1]])
        assert following.tokens[: prompt.stable_tokens] == prompt.tokens[: prompt.stable_tokens]
    assert prompt.stable_tokens == len(prompt.tokens)


def test_where_earlier_reasoning_is_rewritten_the_stable_tokens_end_before_it(tmp_path: Path) -> None:
    prompts = Prompts(tmp_path, REASONING_TEMPLATE)
    talk = [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "Let me look.", "reasoning": "They have four."},
        {"role": "tool", "content": "4"},
    ]
    prompt = prompts.chat(messages=talk)
    text = str(prompts.tokenizer.decode(list(prompt.tokens)))
    stable = str(prompts.tokenizer.decode(list(prompt.tokens[: prompt.stable_tokens])))
    assert "[They have four.]" in text
    assert stable == text[: text.index("[They")]
    following = prompts.chat(
        messages=[*talk, {"role": "assistant", "content": "Four."}, {"role": "user", "content": "x"}]
    )
    assert common_prefix(following.tokens, prompt.tokens) == prompt.stable_tokens


def test_a_long_conversation_costs_a_fixed_number_of_renderings(
    prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    inner, render = prompts.tokenizer, type(prompts.tokenizer).apply_chat_template

    def counting(self: Any, messages: list[Any], **named: Any) -> Any:
        counted.append(len(messages))
        return render(self, messages, **named)

    monkeypatch.setattr(type(inner), "apply_chat_template", counting)
    turns = [{"role": ("user", "assistant")[i % 2], "content": f"turn {i}"} for i in range(201)]
    prompt = prompts.chat(messages=turns, marks=(100, 150, 200, 201))
    assert sum(b.kind == BoundaryKind.MESSAGE for b in prompt.boundaries) == 201
    assert sum(n > 100 for n in counted) <= 6


def test_a_context_stored_with_frozen_inputs_keeps_them(tmp_path: Path) -> None:
    prompts = Prompts(tmp_path, tinymodels.DATED_TEMPLATE)
    prompt = prompts.chat(messages=TALK, inputs={"strftime_now": "2026-01-02T03:04:05"})
    assert "Today is 02 Jan 2026." in str(prompts.tokenizer.decode(list(prompt.tokens)))


def test_template_arguments_of_the_request_reach_the_template(tmp_path: Path) -> None:
    prompts = Prompts(tmp_path, "{{ 'mood ' + (mood or 'none') }}" + tinymodels.CHAT_TEMPLATE)
    prompt = prompts.chat(messages=TALK, chat_template_kwargs={"mood": "glad"})
    assert str(prompts.tokenizer.decode(list(prompt.tokens))).startswith("mood glad")


def test_without_a_template_roles_are_written_as_mlx_lms_server_writes_them(tmp_path: Path) -> None:
    prompts = Prompts(tmp_path, None)
    roles = {"system": "S:", "user": "U:", "assistant": "A:", "stop": "|"}
    prompt = prompts.chat(messages=TALK, role_mapping=roles)
    assert str(prompts.tokenizer.decode(list(prompt.tokens))) == "<s>S:Be brief.|U:Hello there |A:Hi.|U:And?|A:"


def test_a_text_prompt_may_be_token_ids(prompts: Prompts) -> None:
    tokens = prompts.text("Once upon").tokens
    assert prompts.text(list(tokens)).tokens == prompts.text([list(tokens)]).tokens == tokens
    for wrong in ([], "", None, ["a", "b"], [1, "a"], [10**6], [-1], {"a": 1}):
        if wrong == "":
            continue  # the tokenizer's own first token is a prompt
        with pytest.raises(PromptError, match="prompt: "):
            prompts.text(wrong)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, "expected a list of at least one message, found none"),
        ([], "expected a list of at least one message, found none"),
        ("hello", "found str"),
        (["hello"], r"messages\[0\]: expected an object"),
        ([{"content": "x"}], r"messages\[0\].role"),
        (
            [{"role": "user", "content": 3}],
            r"messages\[0\].content: expected a text or a list of text parts, found int",
        ),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "found 'image_url'"),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{no"}}]}], "arguments: expected JSON"),
        ([{"role": "assistant", "tool_calls": ["x"]}], r"tool_calls\[0\].function"),
    ],
)
def test_what_is_no_conversation_is_refused_with_the_place(prompts: Prompts, messages: Any, words: str) -> None:
    with pytest.raises(PromptError, match=words):
        prompts.chat(messages=messages)
