"""``kvnet prompt check``: what a person reads, and what is refused before any model is loaded."""

import json
from pathlib import Path

import pytest

from kvnet.errors import UsageError
from kvnet_node.app import main
from kvnet_node.commands.prompt import killer_lines, render
from kvnet_node.operations.prompts import Checker
from kvnet_node.operations.requests import FoundKiller, PromptCheckResult, PromptReport, PromptSection, TextPlace
from kvnet_node.prompts.normalise import Rules
from kvnet_node.prompts.reading import read_requests


def place(excerpt: str) -> TextPlace:
    return TextPlace("system", "messages[0].content", 30, 2, 24, excerpt)


def report(**fields: object) -> PromptReport:
    plain: dict[str, object] = {
        "request": "request.json:1", "against": "", "size": 12_950, "against_size": 12_950, "common": 9_222,
        "share": 9_222 / 12_950, "section": "system", "in_template": False,
        "sections": [PromptSection("tools", 9_204, 9_204), PromptSection("system", 3_746, 18)],
    }  # fmt: skip
    return PromptReport(**{**plain, **fields})  # type: ignore[arg-type]


def words(shown: PromptReport) -> list[str]:
    result = PromptCheckResult("tiny", "tokens", shown.share, [shown])
    return [line.strip() for line in render(result).splitlines()]


def test_a_request_is_shown_with_its_sections_and_the_first_that_varies() -> None:
    lines = words(report(earlier=place("Today is Mon"), later=place("Today is Tue")))
    assert lines[0] == "in tokens of tiny"
    assert lines[2:] == [
        "request.json:1: 12,950 tokens",
        "SECTION  TOKENS  SHARED",
        "tools    9,204   9,204",
        "system   3,746   18",
        "shareable: 9,222 of 12,950 tokens (71.2 %)",
        "first that varies: token 9,223, in system: messages[0].content, line 2, column 24",
        "another: “Today is Mon”",
        "this one: “Today is Tue”",
        "no known killer found",
    ]


def test_where_the_template_makes_the_difference_its_rendering_is_shown() -> None:
    lines = words(report(against="log:1", in_template=True, rendered=["29 Nov", "30 Nov"]))
    assert "the texts of the requests agree there: the chat template makes the difference" in lines
    assert lines[-3:-1] == ["rendered before: “29 Nov”", "rendered now: “30 Nov”"]


def test_a_request_that_goes_on_varies_nowhere() -> None:
    lines = words(report(against="log:1", section="", common=12_950, share=1.0))
    assert "shareable: 12,950 of 12,950 tokens (100.0 %); nothing before the end varies" in lines


def test_what_to_do_is_said_once_for_each_killer() -> None:
    found = FoundKiller(
        "request-id", "An id", "probably another one", "Send it elsewhere.", certain=False, place=place("x")
    )
    gone = FoundKiller("billing-line", "A line", "81 characters", "Nothing.", certain=True, removed=True)
    lines = killer_lines([gone, found, found])
    assert lines[0] == "taken out: A line (billing-line): 81 characters"
    assert [line.strip() for line in lines].count("next: Send it elsewhere.") == 1
    assert lines[1].startswith("likely: An id (request-id)")


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], "expected a file with a request body, found none"),
        (["x.json", "--fail-below", "1.5"], "--fail-below expects a share above 0 and at most 1, found 1.5"),
        (["x.json", "--fail-below", "0"], "--fail-below expects a share above 0 and at most 1, found 0.0"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "prompt", "check", *arguments]) == UsageError.exit_code
    assert json.loads(capsys.readouterr().err)["message"] == wanted


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_a_file_that_cannot_be_read_is_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    arguments = ["--json", "--data-dir", str(tmp_path / "data"), "prompt", "check", str(path)]
    assert main(arguments) == UsageError.exit_code
    assert json.loads(capsys.readouterr().err)["message"].startswith(
        f"{path.resolve()}: expected a file to read, found"
    )


def test_bytes_that_are_no_text_are_named_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"messages": []}\n\xff\xfe\n')
    assert main(["--json", "--data-dir", str(tmp_path / "data"), "prompt", "check", str(path)]) == UsageError.exit_code
    assert json.loads(capsys.readouterr().err)["message"] == f"{path}:2: expected UTF-8, found other bytes"


async def test_in_characters_a_series_names_what_each_was_compared_with() -> None:
    bodies = [{"messages": [{"role": "user", "content": text}]} for text in ("One", "One more", "Two")]
    found = read_requests("\n".join(map(json.dumps, bodies)), "log")
    reports = await Checker(None, Rules()).series(found)
    assert [(each.request, each.against) for each in reports] == [("log:2", "log:1"), ("log:3", "log:2")]
    assert all(not each.killers for each in reports)
