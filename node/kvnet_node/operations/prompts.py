"""Operations that look at requests without answering them."""

import datetime as dt
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import trio

from kvnet.engine.interface import Engine
from kvnet.engine.prompts import PromptKind, PromptRequest, frozen_template_inputs
from kvnet.errors import PromptError, UnknownModelError, UsageError
from kvnet_node.api.anthropic_requests import translate
from kvnet_node.api.failures import ApiError
from kvnet_node.operations import requests as r
from kvnet_node.operations.context import OperationContext
from kvnet_node.prompts import killers
from kvnet_node.prompts.compare import Comparison, Place, Prompt, compare
from kvnet_node.prompts.killers import Finding
from kvnet_node.prompts.normalise import Removed, Rules, normalise
from kvnet_node.prompts.outline import JsonBody, is_anthropic, outline
from kvnet_node.prompts.reading import ReadRequest, read_requests
from kvnet_node.prompts.sections import as_characters
from kvnet_node.prompts.variation import another_request

MAX_FILE_BYTES = 256 << 20
"""A longer file is no request and hardly a log of some; it would be held in memory several times."""

T = TypeVar("T")

LATER = dt.timedelta(days=1, hours=1, minutes=1, seconds=1)
"""The other moment a request is rendered at: another day, hour, minute and second."""

_EXCERPT_BEFORE_TOKENS, _EXCERPT_AFTER_TOKENS = 8, 12


async def check(ctx: OperationContext, request: r.PromptCheckRequest) -> r.PromptCheckResult:
    """Find what keeps requests from sharing their beginning."""
    found = await trio.to_thread.run_sync(_read_all, request.paths)
    async with _engine(ctx, request.model, found[0].body) as engine:
        checker = Checker(engine, Rules(billing_line=ctx.services.config.remove_billing_line))
        if len(found) == 1:
            reports = [await checker.single(found[0])]
        else:
            reports = await checker.series(found)
        return r.PromptCheckResult(
            model=engine.info.name if engine is not None else "",
            unit="tokens" if engine is not None else "characters",
            share=min(report.share for report in reports),
            reports=reports,
        )


class Checker:
    """Compares requests under one model.

    Args:
        engine: whose tokenizer and template are used; ``None`` to compare characters.
        rules: what the node takes out of requests.
    """

    def __init__(self, engine: Engine | None, rules: Rules) -> None:
        self._engine = engine
        self._rules = rules
        self._now = dt.datetime.now(tz=dt.UTC).replace(microsecond=0, tzinfo=None)

    async def single(self, read: ReadRequest) -> r.PromptReport:
        """One request against itself at another moment, and with what probably varies set to other values."""
        normalised = normalise(read.body, self._rules)
        another = await _in_thread(another_request, normalised.body)
        mine = await self._prompt(read, normalised.body, self._now)
        later = await self._prompt(read, normalised.body, self._now + LATER)
        other = await self._prompt(read, another, self._now + LATER)

        def found() -> list[Finding]:
            alone = killers.in_request(mine.sent, normalised.removed)
            return [*alone, *killers.in_prompt(mine), *killers.between_prompts(mine, later)]

        return await self._report((read.label, ""), mine, other, await _in_thread(found))

    async def series(self, requests: Sequence[ReadRequest]) -> list[r.PromptReport]:
        """Each request against the one before it."""
        reports = []
        before: tuple[ReadRequest, Prompt] | None = None
        for read in requests:
            normalised = normalise(read.body, self._rules)
            prompt = await self._prompt(read, normalised.body, self._now)
            if before is not None:
                found = await _in_thread(between, before[1], prompt, normalised.removed)
                reports.append(await self._report((read.label, before[0].label), prompt, before[1], found))
            before = read, prompt
        return reports

    async def _report(
        self, labels: tuple[str, str], prompt: Prompt, other: Prompt, found: Sequence[Finding]
    ) -> r.PromptReport:
        compared = await _in_thread(compare, other, prompt)
        return report(labels, prompt, compared, found, await rendered(self._engine, compared, other, prompt))

    async def _prompt(self, read: ReadRequest, body: JsonBody, moment: dt.datetime) -> Prompt:
        sent = await _in_thread(outline, body)
        if self._engine is None:
            return Prompt(sent, await _in_thread(as_characters, sent))
        try:
            run = translate({"model": "any", **body}, counting=True).body if is_anthropic(body) else body
            prepared = await self._engine.prepare(_request(run, moment))
        except (ApiError, PromptError) as error:
            raise UsageError(f"{read.label}: {error}", hint=error.hint) from error
        return Prompt(sent, prepared, outline(run))


def between(earlier: Prompt, later: Prompt, removed: Sequence[Removed]) -> list[Finding]:
    """What made a prompt differ from one before it; nothing where it only goes on."""
    taken_out = killers.removed_findings(removed)
    if not compare(earlier, later).parts:
        return taken_out
    return [
        *taken_out,
        *killers.between_requests(earlier.sent, later.sent),
        *killers.between_prompts(earlier, later),
    ]


def report(
    labels: tuple[str, str],
    prompt: Prompt,
    compared: Comparison,
    found: Sequence[Finding],
    excerpts: Sequence[str] = (),
) -> r.PromptReport:
    """A comparison as the result of an operation.

    Args:
        labels: of this prompt, and of the earlier one.
        prompt: this one, the later.
        compared: with the earlier one.
        found: killers.
        excerpts: what stands at the first varying token in the earlier and in this rendered prompt.
    """
    return r.PromptReport(
        request=labels[0],
        against=labels[1],
        size=compared.later_tokens,
        against_size=compared.earlier_tokens,
        common=compared.common_tokens,
        share=compared.share,
        section=compared.section,
        in_template=compared.in_template,
        sections=[
            r.PromptSection(each.label, each.n_tokens, each.stable_tokens(compared.common_tokens))
            for each in prompt.sections
        ],
        earlier=_place(compared.earlier),
        later=_place(compared.later),
        rendered=list(excerpts),
        killers=[found_killer(each) for each in found],
    )


def found_killer(found: Finding) -> r.FoundKiller:
    """A finding with what the table says of it."""
    killer = killers.killer(found.killer)
    return r.FoundKiller(
        killer.id, killer.title, found.words, killer.remedy, found.certain, found.removed, _place(found.place)
    )


async def rendered(engine: Engine | None, compared: Comparison, earlier: Prompt, later: Prompt) -> list[str]:
    """The text around the first varying token of both prompts, where the requests' own texts do not show it."""
    if engine is None or not compared.parts or not compared.in_template:
        return []
    at = compared.common_tokens
    around = slice(max(0, at - _EXCERPT_BEFORE_TOKENS), at + _EXCERPT_AFTER_TOKENS)
    return [await engine.text_of(prompt.prepared.tokens[around]) for prompt in (earlier, later)]


async def _in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Off the thread that answers clients: a long log takes a while."""
    return await trio.to_thread.run_sync(lambda: function(*arguments))


@asynccontextmanager
async def _engine(ctx: OperationContext, model: str | None, body: JsonBody) -> AsyncIterator[Engine | None]:
    """The engine of the model asked for, of the one the request names, or of the default; else ``None``, and why."""
    engines = ctx.services.engines
    named = str(body.get("model", "")).partition("#")[0]
    for wanted in [model] if model else [*([named] if named else []), None]:
        try:
            await engines.choose(wanted)
        except UnknownModelError as error:
            if model:
                raise
            reason = error
            continue
        async with engines.use(wanted, ctx.loading) as engine:
            yield engine
            return
    ctx.note(f"no model chosen, so this is in characters, without a chat template: {reason}")
    yield None


def _request(body: JsonBody, moment: dt.datetime) -> PromptRequest:
    kind = PromptKind.CHAT if "messages" in body else PromptKind.TEXT
    return PromptRequest(kind, json.dumps(body).encode(), frozen_template_inputs(moment.isoformat()))


def _place(place: Place | None) -> r.TextPlace | None:
    if place is None:
        return None
    return r.TextPlace(place.part, place.path, place.offset, place.line, place.column, place.excerpt)


def _read_all(paths: Sequence[str]) -> list[ReadRequest]:
    found = []
    for path in map(Path, paths):
        try:
            if path.is_file() and path.stat().st_size > MAX_FILE_BYTES:
                raise UsageError(f"{path}: expected a file of at most {MAX_FILE_BYTES:,} bytes, found a longer one")
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise UsageError(f"{path}:{_line_of(error)}: expected UTF-8, found other bytes") from error
        except OSError as error:
            raise UsageError(f"{path}: expected a file to read, found {error.strerror or error}") from error
        found += read_requests(text, str(path))
    return found


def _line_of(error: UnicodeDecodeError) -> int:
    return error.object[: error.start].count(b"\n") + 1
