import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvnet.errors import ConfigError
from simulations.policies import POLICIES
from simulations.scenario import Office, Scenario, Trace
from simulations.scenario_files import SCENARIOS, find, load, names, parse
from simulations.world.building import build

SMALLEST: dict[str, Any] = {
    "name": "test",
    "title": "a test",
    "model": "qwen3-8b",
    "machines": [{"chip": "m4", "link": "wifi"}],
    "workload": {"kind": "office"},
}
MEASURED = {"prefill": [[0, 100.0]], "restore_bytes_s": 1e9, "kv_bytes_per_token": 1000}


def changed(path: str, value: Any) -> dict[str, Any]:
    """The smallest scenario with something at a dotted path."""
    content = copy.deepcopy(SMALLEST)
    at: Any = content
    *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    for step in steps:
        at = at[step] if isinstance(step, int) else at.setdefault(step, {})
    at[last] = value
    return content


def test_what_is_not_said_has_the_value_that_is_documented() -> None:
    scenario = parse(SMALLEST)
    assert scenario.n_nodes == 1
    assert scenario.workload == Office()
    assert scenario.churn.late == 0
    assert scenario.policies == ()


@pytest.mark.parametrize("name", names())
def test_every_scenario_that_comes_with_it_can_be_read(name: str) -> None:
    scenario = load(name)
    assert scenario.name.replace("-", "_") == name
    assert set(scenario.policies) <= set(POLICIES)


@pytest.mark.parametrize("name", [name for name in names() if "thousand" not in name])
def test_every_small_scenario_has_machines_that_the_tables_know(name: str) -> None:
    setup = build(load(name), 0)
    assert len(setup.nodes) == load(name).n_nodes
    assert len(setup.stream)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("machine", [], "machine: expected one of name, title, model, machines"),
        ("name", "Two Words", "name: expected a text matching regex"),
        ("model", 8, "model: expected a text, found 8"),
        ("machines", [], "machines: expected a list of length >= 1, found []"),
        ("machines.0.count", 0, "machines[0].count: expected a whole number >= 1, found 0"),
        ("machines.0.count", 1.5, "machines[0].count: expected a whole number, found 1.5"),
        ("machines.0.speed", 1, "machines[0].speed: expected one of count, chip, link"),
        ("machines.0.laptop", "yes", "machines[0].laptop: expected true or false, found 'yes'"),
        ("machines.0.measured", 3, "machines[0].measured: expected a table, found 3"),
        (
            "machines.0.measured",
            {**MEASURED, "prefill": [[0]]},
            "machines[0].measured.prefill[0]: expected a list of length 2",
        ),
        ("machines.0.measured", {**MEASURED, "x": 1}, "machines[0].measured.x: expected one of prefill"),
        (
            "workload.kind",
            "school",
            "workload.kind: expected one of office, agents, classroom, person, codebase, trace",
        ),
        ("workload", {}, "workload.kind: expected a value, found none"),
        ("workload", 5, "workload: expected a table, found 5"),
        ("workload.lessons", 4, "workload.lessons: expected one of kind, requests, days"),
        ("workload.popularity", -1, "workload.popularity: expected a number >= 0.0, found -1"),
        ("workload.conversation.turns", 0, "workload.conversation.turns: expected a number >= 1.0, found 0"),
        ("workload.conversation.turn", 1, "workload.conversation.turn: expected one of turns, question_tokens"),
        ("churn.late", 1.1, "churn.late: expected a number <= 1.0, found 1.1"),
        ("churn.days", 1, "churn.days: expected one of late, leave"),
        ("faults.liars", float("nan"), "faults.liars: expected a number >= 0.0, found nan"),
        ("network.sites", True, "network.sites: expected a whole number, found True"),
        ("policies", ["own", 3], "policies[1]: expected a text, found 3"),
        ("policies", ["own", "best"], "policies: expected some of none, own"),
        ("workload.days", 1e9, "workload.days: expected a number <= 3650.0, found 1000000000.0"),
        (
            "workload",
            {"kind": "codebase", "queries_a_day": 1e8},
            "workload.queries_a_day: expected at most 10,000,000 requests in all, found 2,000,000,000",
        ),
        (
            "workload",
            {"kind": "classroom", "lessons": 9_000_000},
            "workload.lessons: expected at most 10,000,000 requests in all, found 45,000,000",
        ),
    ],
)
def test_what_does_not_belong_there_is_named_with_its_key(path: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(changed(path, value), where="file.toml")
    assert caught.value.message.startswith(f"file.toml: {says}")
    assert caught.value.exit_code == 2


def test_a_value_that_is_missing_is_named() -> None:
    content = {key: value for key, value in SMALLEST.items() if key != "model"}
    with pytest.raises(ConfigError, match="scenario: model: expected a value, found none"):
        parse(content)


def test_more_nodes_than_can_be_are_refused() -> None:
    groups = [{"count": 60_000, "chip": "m4", "link": "wifi"}] * 2
    with pytest.raises(ConfigError, match="machines: expected at most 100,000 in all, found 120,000"):
        parse(changed("machines", groups))


@pytest.mark.parametrize(("path", "value"), [("machines.0.chip", "m0"), ("model", "gpt"), ("machines.0.link", "isdn")])
def test_what_no_table_knows_is_named_with_its_key(path: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(parse(changed(path, value)), 0)
    assert value in caught.value.message
    assert path.rpartition(".")[2] in caught.value.message
    assert "known are" in caught.value.hint


def test_what_a_machine_measured_stands_in_place_of_the_tables() -> None:
    node = build(parse(changed("machines.0.measured", MEASURED)), 0).nodes[0]
    assert node.kv_bytes_per_token == 1000
    assert node.machine.prefill.tokens_s(0) == 100
    with pytest.raises(ConfigError, match=r"machines\.measured\.decode_bytes_s: expected one of .*, found 'zip'"):
        build(parse(changed("machines.0.measured", {**MEASURED, "decode_bytes_s": {"zip": 1.0}})), 0)


def test_a_file_from_an_editor_on_windows_is_read(tmp_path: Path) -> None:
    file = tmp_path / "windows.toml"
    text = (SCENARIOS / "small.toml").read_text(encoding="utf-8")
    file.write_text(text, encoding="utf-8-sig", newline="\r\n")
    assert load(str(file)) == load("small")


def test_a_file_of_lists_in_lists_is_no_surprise(tmp_path: Path) -> None:
    file = tmp_path / "deep.toml"
    file.write_text(f"name = {'[' * 5000}{']' * 5000}")
    with pytest.raises(ConfigError, match=r"deep\.toml: expected tables and lists, found hundreds of them"):
        load(str(file))


def test_a_file_that_is_no_toml_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.toml"
    file.write_text('name = "a"\nname = "b"\n')
    with pytest.raises(ConfigError, match=r"broken\.toml: expected TOML, found: .*line 2"):
        load(str(file))
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"broken\.toml: expected a scenario file"):
        load(str(file))
    file.write_bytes(b"#" * (1 << 21))
    with pytest.raises(ConfigError, match="at most 1,048,576 bytes"):
        load(str(file))


def test_a_scenario_that_is_not_there_says_which_are() -> None:
    with pytest.raises(ConfigError, match="found no file nowhere") as caught:
        load("nowhere")
    assert "seed" in caught.value.hint


def test_a_trace_beside_its_scenario_is_found(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("")
    file = tmp_path / "mine.toml"
    file.write_text(
        'name = "mine"\ntitle = "t"\nmodel = "qwen3-8b"\nmachines = [{chip = "m4", link = "wifi"}]\n'
        'workload = {kind = "trace", file = "mine.jsonl"}\n'
    )
    workload = load(str(file)).workload
    assert isinstance(workload, Trace)
    assert workload.file == str(tmp_path / "mine.jsonl")
    assert find(str(file)) == file


def test_a_folder_called_like_a_scenario_does_not_hide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As `compare small --out small` leaves one.
    monkeypatch.chdir(tmp_path)
    shipped = find("small")
    (tmp_path / "small").mkdir()
    assert find("small") == shipped
    (tmp_path / "small").rmdir()
    (tmp_path / "small").write_text("")
    assert find("small") == Path("small")


PATHS = (
    "name", "model", "machines", "machines.0", "machines.0.count", "machines.0.measured", "workload", "workload.kind",
    "workload.conversation", "workload.days", "network.sites", "churn", "faults.liars", "policies", "x.y",
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.dates(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
)


def outcome(content: dict[str, Any]) -> Scenario | str:
    """A scenario, or what the error says."""
    try:
        return parse(content, where="file.toml")
    except ConfigError as error:
        return error.message


@given(st.sampled_from(PATHS), VALUES)
def test_values_are_a_scenario_or_an_error_that_names_a_key(path: str, value: Any) -> None:
    found = outcome(changed(path, value))
    if isinstance(found, str):
        assert found.startswith("file.toml: ")
        assert "expected" in found
    else:
        assert found.n_nodes >= 1
