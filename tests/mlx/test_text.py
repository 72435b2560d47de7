"""Where a named context ends, and what the chat template makes of messages."""

from pathlib import Path

import pytest

from kvnet.engine.generations import LogitsRequest
from kvnet.engine.prompts import frozen_template_inputs
from kvnet.errors import EngineError
from kvnet.format.prefix import common_prefix
from tests.mlx import tinymodels
from tests.mlx.conftest import Opener
from tests.mlx.requests import cut, export, generate

pytestmark = pytest.mark.mlx

SYSTEM = {"role": "system", "content": "The document.\nSecond line"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def test_reuse_is_the_longest_common_prefix_of_the_whole_prompts_own_tokens(
    opener: Opener, tmp_path: Path
) -> None:
    # The whole text "Hanzi" is H + anzi; its head "Han" alone is H + an.
    merges = ["a n", "z i", "an zi", "Ċ Ċ", "Ġ t", "Ã ©"]
    model = tinymodels.write_model(tmp_path / "merging", merges=merges)
    heads_and_tails = [
        ("The word Han", "zi is split", "merge across the cut"),
        ("caf\u00c3", "\u00a9 noir", "after an accented letter"),
        ("ends with a space ", "then goes on", "after a space"),
        ("line\n", "\nline", "between two newlines"),
        ("half of <|sta", "rt|> a special token", "inside a special token's text"),
    ]
    async with opener(model) as engine:
        for number, (head, tail, _) in enumerate(heads_and_tails):
            cached = await engine.tokenize(head)
            prompt = await engine.tokenize(head + tail)
            shared = common_prefix(cached, prompt)
            assert shared > 0
            plan = await export(engine, cached, tmp_path / f"pack-{number}")
            cold = await generate(engine, prompt)
            warm = await generate(engine, prompt, cut(plan, shared))
            assert (warm.tokens, warm.restored_tokens) == (cold.tokens, shared)
            if shared == len(cached):
                restored = await engine.logits(LogitsRequest(prompt, cut(plan, shared)))
                assert restored.values == (await engine.logits(LogitsRequest(prompt, stops=(shared,)))).values
        assert common_prefix(await engine.tokenize("Han"), await engine.tokenize("Hanzi")) == 2


async def test_cut_inside_a_character_shares_only_its_first_bytes(opener: Opener, tmp_path: Path) -> None:
    model = tinymodels.write_model(tmp_path / "model")
    async with opener(model) as engine:
        # é and è differ in their second byte only.
        assert common_prefix(await engine.tokenize("café"), await engine.tokenize("cafè")) == 1 + 3 + 1


async def test_context_ends_where_questions_first_differ(opener: Opener, tmp_path: Path) -> None:
    model = tinymodels.write_model(tmp_path / "model")
    async with opener(model) as engine:
        shared = await engine.context_tokens([SYSTEM], {})
        own = await engine.render([SYSTEM], {})
        for question in ("What?", "Why?", "\nWho?", ""):
            whole = await engine.render([SYSTEM, user(question)], {})
            assert whole[: len(shared)] == shared
        # At most the end of the context's own rendering, which here is the newline after its end mark.
        assert len(shared) == common_prefix(own, await engine.render([SYSTEM, user("x")], {})) - 1
        assert shared[-1] == own[len(shared) - 1]


@pytest.mark.parametrize("template", ["NO_SYSTEM_TEMPLATE", "SILENT_SYSTEM_TEMPLATE"])
async def test_without_a_system_role_the_context_heads_the_first_user_message(
    opener: Opener, tmp_path: Path, template: str
) -> None:
    model = tinymodels.write_model(tmp_path / "model", template=getattr(tinymodels, template))
    async with opener(model) as engine:
        merged = await engine.render([SYSTEM, user("What?")], {})
        assert merged == await engine.render([user(f"{SYSTEM['content']}\n\nWhat?")], {})
        shared = await engine.context_tokens([SYSTEM], {})
        assert merged[: len(shared)] == shared
        assert len(shared) >= len(SYSTEM["content"])


async def test_frozen_moment_fixes_a_template_that_prints_the_date(opener: Opener, tmp_path: Path) -> None:
    model = tinymodels.write_model(tmp_path / "model", template=tinymodels.DATED_TEMPLATE)
    async with opener(model) as engine:
        inputs = frozen_template_inputs("2020-02-29T12:00:00")
        tokens = await engine.render([user("a")], inputs)
        expected = await engine.tokenize("Today is 29 Feb 2020.")
        assert tokens[: len(expected) - 1] == expected[1:]
        assert tokens == await engine.render([user("a")], inputs)
        assert tokens != await engine.render([user("a")], frozen_template_inputs("2021-03-01T12:00:00"))


async def test_template_and_message_failures_name_the_reason(opener: Opener, tmp_path: Path) -> None:
    refusing = "{{ raise_exception('Roles must alternate') }}"
    model = tinymodels.write_model(tmp_path / "model", template=refusing)
    async with opener(model) as engine:
        with pytest.raises(EngineError, match="Roles must alternate"):
            await engine.render([user("a")], {})
        with pytest.raises(EngineError, match="at least one message"):
            await engine.render([], {})
        with pytest.raises(EngineError, match="must be text"):
            await engine.render([{"role": "user", "content": [{"type": "image_url"}]}], {})
        # Inputs stored with a context may come from a peer: they must not replace the template itself.
        with pytest.raises(EngineError, match="not allowed"):
            await engine.render([user("a")], {"chat_template": "{{ 1 }}"})
        with pytest.raises(EngineError, match="ISO 8601"):
            await engine.render([user("a")], {"strftime_now": "yesterday"})


async def test_model_without_a_template_still_tokenizes(opener: Opener, tmp_path: Path) -> None:
    model = tinymodels.write_model(tmp_path / "model", template=None)
    async with opener(model) as engine:
        assert len(await engine.tokenize("abc")) == 4
        with pytest.raises(EngineError, match="no chat template"):
            await engine.render([user("a")], {})
