"""What the self test makes of engines that round, tie or damage; each is the toy engine with one fault."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvnet.engine.generations import Generated, GenerateEvent, GenerateRequest, Logits, LogitsRequest
from kvnet.engine.interface import OpenEngine
from kvnet.engine.selftest import SelftestReport, run_selftest
from kvnet.engine.toy import ToyCosts, ToyEngine

N_TOKENS = 300
N_PROMPT = N_TOKENS + 8


class Faulty(ToyEngine):
    """A toy engine whose logits and texts are off after a restore, or in another step size.

    Args:
        model_path: names the model.
        restored: added to every logit after a restore.
        one_shot: added to every logit of a prefill in one shot.
        margin: between the two best logits after some of the answer; None leaves them.
        other_text: after a restore, the last token is another one.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        restored: float = 0.0,
        one_shot: float = 0.0,
        margin: float | None = None,
        other_text: bool = False,
    ) -> None:
        super().__init__(model_path, ToyCosts(), 1 << 20, 1 << 40)
        self._restored_off = restored
        self._one_shot_off = one_shot
        self._margin = margin
        self._other_text = other_text

    async def logits(self, request: LogitsRequest) -> Logits:
        logits = await super().logits(request)
        values = np.frombuffer(logits.values, "<f4").copy()
        if request.restore is not None:
            values += np.float32(self._restored_off)
        if request.one_shot:
            values += np.float32(self._one_shot_off)
            if self._margin is not None and len(request.tokens) > N_PROMPT:
                values[np.argsort(values)[-2]] = values.max() - self._margin
        return replace(logits, values=values.astype("<f4").tobytes())

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        async for event in super().generate(request):
            if isinstance(event, Generated) and request.restore is not None and self._other_text:
                yield replace(event, tokens=_with_another_end(event.tokens))
            else:
                yield event


def _with_another_end(tokens: Sequence[int]) -> tuple[int, ...]:
    return (*tokens[:-1], tokens[-1] + 1)


async def run(folder: Path, **faults: object) -> SelftestReport:
    @asynccontextmanager
    async def opener(model_path: Path, **_: object) -> AsyncIterator[ToyEngine]:
        yield Faulty(model_path, **faults)  # type: ignore[arg-type]

    open_faulty: OpenEngine = opener
    return await run_selftest(folder / "toy", folder, n_tokens=N_TOKENS, opener=open_faulty)


async def test_a_sound_engine_is_exact(tmp_path: Path) -> None:
    report = await run(tmp_path)
    assert (report.passed, report.finding, report.tie_margin) == (True, "exact", None)


async def test_texts_that_part_at_a_near_tie_are_labelled_and_not_failed(tmp_path: Path) -> None:
    report = await run(tmp_path, other_text=True, margin=5e-4)
    assert (report.same_text, report.near_tie, report.passed) == (False, True, True)
    assert report.finding == "exact, texts part at a near tie"


async def test_texts_that_part_where_the_model_is_decided_are_a_failure(tmp_path: Path) -> None:
    report = await run(tmp_path, other_text=True, margin=0.5)
    assert (report.same_text, report.near_tie, report.passed) == (False, False, False)


async def test_the_rounding_of_another_step_size_is_reported_and_harms_nothing(tmp_path: Path) -> None:
    report = await run(tmp_path, one_shot=2e-5)
    assert report.passed
    assert 1e-5 < report.max_logit_difference < 4e-5
    assert report.restored_difference == 0


async def test_rounding_after_a_restore_is_told_apart_from_damage(tmp_path: Path) -> None:
    rounding = await run(tmp_path, restored=3e-5, one_shot=2e-5)
    assert (rounding.exact, rounding.passed) == (False, False)
    assert rounding.finding.startswith("rounding")
    damage = await run(tmp_path, restored=1.0, one_shot=2e-5)
    assert damage.finding.startswith("damage")
    assert not damage.passed
