"""``kvnet prompt check`` as people and their build servers run it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Kvnet
from tests.mlx import tinymodels

pytestmark = [pytest.mark.e2e, pytest.mark.mlx]

LINE = "x-anthropic-billing-header: cc_version=2.1.39.c39; cc_entrypoint=cli; cch={};"
RULES = "Read before you write. " * 20
TEMPLATE = (
    "{{ '<s>' }}{% if tools %}{% for t in tools %}{{ t.function | tojson + '\n' }}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' }}"
    "{% if loop.last %}{{ m['content'] }}{% else %}{{ m['content'].split('</think>')[-1] }}{% endif %}"
    "{{ '<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


def session(*texts: str, system: str = RULES, tools: str = "") -> dict[str, Any]:
    """An OpenAI-style request; ``tools`` are named by one letter each."""
    roles = ("user", "assistant")
    turns = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    body: dict[str, Any] = {"model": "unknown", "messages": [{"role": "system", "content": system}, *turns]}
    return {**body, "tools": [tool(name) for name in tools]} if tools else body


def write(path: Path, *bodies: dict[str, Any]) -> str:
    path.write_text("\n".join(map(json.dumps, bodies)) + "\n")
    return str(path)


@pytest.fixture
def tiny(kvnet: Kvnet, tmp_path: Path) -> Kvnet:
    """The command with one tiny model."""
    model = tinymodels.write_model(tmp_path / "models" / "tiny", template=TEMPLATE)
    kvnet.environment["KVNET_MODEL_PATHS"] = str(model)
    return kvnet


def killers(report: dict[str, Any]) -> list[str]:
    return [each["killer"] for each in report["killers"]]


def test_without_a_model_one_request_is_checked_in_characters(kvnet: Kvnet, tmp_path: Path) -> None:
    body = session("Hello", system=f"{RULES}\nSession id: 8f3a2b91cc\n{RULES}")
    ran = kvnet("prompt", "check", write(tmp_path / "request.json", body))
    assert ran.code == 0
    assert "characters" in ran.stdout.splitlines()[0]
    assert "messages[0].content, line 2, column 13" in ran.stdout
    assert "request-id" in ran.stdout
    assert "no model chosen" in ran.stderr
    result = kvnet.json("prompt", "check", str(tmp_path / "request.json"))
    [report] = result["reports"]
    assert (result["unit"], killers(report)) == ("characters", ["request-id"])
    assert (report["later"]["line"], report["later"]["column"]) == (2, 13)
    assert result["share"] == report["share"] == report["common"] / report["against_size"]
    assert 0.4 < report["share"] < 0.6


def test_one_request_is_checked_with_the_models_own_tokens(tiny: Kvnet, tmp_path: Path) -> None:
    body = session("Hello", system=f"{LINE.format('56445')}\n{RULES}Today is Monday.\n{RULES}", tools="ab")
    result = tiny.json("prompt", "check", write(tmp_path / "request.json", body))
    [report] = result["reports"]
    assert (result["model"], result["unit"]) == ("tiny", "tokens")
    assert killers(report) == ["billing-line", "date-at-top"]
    assert report["killers"][0]["removed"]
    assert sum(each["size"] for each in report["sections"]) == report["size"]
    assert sum(each["shared"] for each in report["sections"]) == report["common"]
    labels = [each["label"] for each in report["sections"]]
    assert labels.index("tools") < labels.index("system") < labels.index("messages[1] (user)")
    assert report["section"] == "system"
    assert report["later"]["excerpt"].startswith(RULES[-15:] + "Today is ")


def test_a_request_in_which_nothing_varies_is_shareable_to_the_end(tiny: Kvnet, tmp_path: Path) -> None:
    path = write(tmp_path / "request.json", session("Hello", tools="ab"))
    assert tiny.json("prompt", "check", path)["share"] == 1.0
    assert tiny("prompt", "check", path, "--fail-below", "1.0").code == 0


def test_a_template_that_prints_the_date_is_found(kvnet: Kvnet, tmp_path: Path) -> None:
    model = tinymodels.write_model(tmp_path / "models" / "dated", template=tinymodels.DATED_TEMPLATE)
    path = write(tmp_path / "request.json", session("Hello"))
    [report] = kvnet.json("prompt", "check", path, "--model", str(model))["reports"]
    assert killers(report) == ["template-prints-the-time"]
    assert report["in_template"]
    assert report["rendered"][0] != report["rendered"][1]
    assert report["section"] == "system"


def test_a_template_that_rewrites_reasoning_is_found_between_two_turns(tiny: Kvnet, tmp_path: Path) -> None:
    thought = "<think>It is late.</think>Good evening."
    path = write(tmp_path / "log.jsonl", session("Hi", thought), session("Hi", thought, "And now?"))
    [report] = tiny.json("prompt", "check", path)["reports"]
    assert "template-rewrites-reasoning" in killers(report)
    assert (report["in_template"], report["section"]) == (True, "messages[2] (assistant)")
    assert "<think>" in report["rendered"][0]
    assert "<think>" not in report["rendered"][1]


def test_a_template_that_will_rewrite_reasoning_is_found_in_one_request(kvnet: Kvnet, tmp_path: Path) -> None:
    # As templates of reasoning models do it: reasoning stays while tools are used, until the user speaks again.
    template = (
        "{% set ns = namespace(asked=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
        "{{ '<|start|>' + m.role + '\n' }}{% if m.reasoning_content and loop.index0 > ns.asked %}"
        "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
    )
    model = tinymodels.write_model(tmp_path / "models" / "reasoning", template=template)
    body = session("Hi", "I look.")
    body["messages"][2]["reasoning_content"] = "It is late."
    body["messages"].append({"role": "tool", "content": "22:30"})
    path = write(tmp_path / "request.json", body)
    [report] = kvnet.json("prompt", "check", path, "--model", str(model))["reports"]
    assert killers(report) == ["template-rewrites-reasoning"]
    assert (report["share"], report["killers"][0]["place"]) == (1.0, None)
    body["messages"][2].pop("reasoning_content")
    [report] = kvnet.json("prompt", "check", write(tmp_path / "plain.json", body), "--model", str(model))["reports"]
    assert killers(report) == []


def test_a_log_is_checked_request_by_request_and_fails_a_build_that_shares_too_little(
    tiny: Kvnet, tmp_path: Path
) -> None:
    log = [
        session("Hello", tools="abc"),
        session("Hello", "Hi", "More", tools="abc"),
        session("Hello", "Hi", "More", "Yes", "And?", tools="cab"),
    ]
    path = write(tmp_path / "log.jsonl", *log)
    result = tiny.json("prompt", "check", path)
    assert [(each["request"], each["against"]) for each in result["reports"]] == [
        (f"{path}:2", f"{path}:1"),
        (f"{path}:3", f"{path}:2"),
    ]
    assert [killers(each) for each in result["reports"]] == [[], ["tools-reordered"]]
    assert result["reports"][0]["share"] == 1.0
    assert tiny("prompt", "check", path, "--fail-below", "0.9").code == 1
    assert tiny("prompt", "check", write(tmp_path / "good.jsonl", *log[:2]), "--fail-below", "0.9").code == 0


def test_an_agents_session_with_its_billing_line_shares_all_it_repeats(tiny: Kvnet, tmp_path: Path) -> None:
    def turn(number: int) -> dict[str, Any]:
        said = [{"role": ("user", "assistant")[each % 2], "content": f"Turn {each}."} for each in range(2 * number + 1)]
        return {
            "model": "unknown",
            "max_tokens": 100,
            "system": [
                {"type": "text", "text": LINE.format(f"{number:05x}")},
                {"type": "text", "text": RULES, "cache_control": {"type": "ephemeral"}},
            ],
            "tools": [{"name": "read", "description": "Reads.", "input_schema": {"type": "object", "properties": {}}}],
            "messages": said,
        }

    path = write(tmp_path / "log.jsonl", *(turn(number) for number in range(5)))
    result = tiny.json("prompt", "check", path)
    assert result["share"] == 1.0
    assert [killers(each) for each in result["reports"]] == [["billing-line"]] * 4
    kept = tiny.json("prompt", "check", path, KVNET_PROMPT_REMOVE_BILLING_LINE="off")
    assert kept["share"] < 0.5
    assert [killers(each) for each in kept["reports"]] == [["billing-line"]] * 4


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('{"messages": []}\n{"messages": [\n', ":2: expected JSON"),
        ('{"role": "user"}', ":1: expected a request body with messages or prompt"),
        ("", ": expected a request body, found an empty file"),
    ],
)
def test_bad_input_is_named_by_file_and_line(kvnet: Kvnet, tmp_path: Path, text: str, wanted: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    ran = kvnet("--json", "prompt", "check", str(path))
    assert (ran.code, ran.stdout) == (2, "")
    assert ran.error["message"].startswith(f"{path}{wanted}")


def test_a_body_that_the_template_does_not_take_is_named_by_file_and_line(tiny: Kvnet, tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", session("Hello"), {"messages": [{"role": "user", "content": 5}]})
    ran = tiny("--json", "prompt", "check", path)
    assert ran.code == 2
    assert ran.error["message"].startswith(f"{path}:2: ")


def test_a_model_that_is_not_here_is_an_error_only_when_it_was_asked_for(kvnet: Kvnet, tmp_path: Path) -> None:
    path = write(tmp_path / "request.json", session("Hello"))
    assert kvnet("prompt", "check", path).code == 0
    assert kvnet("--json", "prompt", "check", path, "--model", "nothing").error["code"] == "unknown_model"


def test_nothing_of_a_prompt_reaches_the_data_directory(tiny: Kvnet, tmp_path: Path) -> None:
    tiny.start()
    path = write(tmp_path / "request.json", session("Xylophones in Zanzibar", system=f"{RULES}Session id: 8f3a2b91cc"))
    assert tiny.json("prompt", "check", path)["unit"] == "tokens"
    tiny("node", "stop")
    for file in (each for each in tiny.data_dir.rglob("*") if each.is_file()):
        assert b"Zanzibar" not in file.read_bytes(), file
        assert b"8f3a2b91cc" not in file.read_bytes(), file


def test_explaining_without_a_running_node_says_what_to_do(kvnet: Kvnet) -> None:
    ran = kvnet("--json", "explain")
    assert (ran.code, ran.stdout) == (2, "")
    assert "expected a running node" in ran.error["message"]
    assert "node start" in ran.error["hint"]
