"""Scenario files: TOML in, frozen values out; anything unexpected is an error that names its key."""

import tomllib
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from kvnet.errors import ConfigError
from simulations.policies import POLICIES
from simulations.scenario import (
    MAX_NODES,
    MAX_REQUESTS,
    Agents,
    Churn,
    Classroom,
    Codebase,
    Conversation,
    Faults,
    Machines,
    Measured,
    Network,
    Office,
    Person,
    Scenario,
    Trace,
)
from simulations.strictness import Keys, explain

SCENARIOS = Path(__file__).parent / "scenarios"
"""Those that come with the simulator; `name` alone finds `SCENARIOS/name.toml`."""

MAX_FILE_BYTES = 1 << 20


def load(name: str) -> Scenario:
    """Read a scenario file, or one that comes with the simulator by its name alone.

    Raises:
        ConfigError: no such file, no TOML, or a key or value that does not belong there; names the file and the key.
    """
    path = find(name)
    if not path.is_file():
        raise ConfigError(f"expected a scenario, found no file {name}", hint=_known_scenarios())
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: expected a scenario of at most {MAX_FILE_BYTES:,} bytes")
        # Editors on Windows begin a file with a mark that TOML does not know.
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected a scenario file, found: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: expected TOML, found: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: expected tables and lists, found hundreds of them in each other") from error
    scenario = parse(content, where=str(path))
    if isinstance(scenario.workload, Trace):
        beside = path.parent / scenario.workload.file
        if beside.exists():
            workload = msgspec.structs.replace(scenario.workload, file=str(beside))
            scenario = msgspec.structs.replace(scenario, workload=workload)
    return scenario


def find(name: str) -> Path:
    """Where a scenario is: a path, or the name of one that comes with the simulator."""
    path = Path(name)
    known = SCENARIOS / f"{name}.toml"
    # A folder of that name is a result that `--out` wrote, no scenario.
    return known if not path.is_file() and "/" not in name and known.exists() else path


def names() -> list[str]:
    """The scenarios that come with the simulator."""
    return sorted(path.stem for path in SCENARIOS.glob("*.toml"))


def _known_scenarios() -> str:
    return f"Give a path, or one of {', '.join(names())}."


def parse(content: dict[str, Any], *, where: str = "scenario") -> Scenario:
    """A scenario from decoded TOML.

    Args:
        content: the table.
        where: what an error calls it.

    Raises:
        ConfigError: a key or value that does not belong there; the message begins with `where` and the key's path.
    """
    try:
        scenario = msgspec.convert(content, Scenario)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {explain(str(error), content, _keys(content))}") from error
    if scenario.n_nodes > MAX_NODES:
        raise ConfigError(f"{where}: machines: expected at most {MAX_NODES:,} in all, found {scenario.n_nodes:,}")
    key, n_requests = _asked(scenario)
    if n_requests > MAX_REQUESTS:
        raise ConfigError(f"{where}: {key}: expected at most {MAX_REQUESTS:,} requests in all, found {n_requests:,.0f}")
    unknown = next((name for name in scenario.policies if name not in POLICIES), None)
    if unknown is not None:
        raise ConfigError(f"{where}: policies: expected some of {', '.join(POLICIES)}, found {unknown!r}")
    return scenario


def _asked(scenario: Scenario) -> tuple[str, float]:
    """About how many requests a scenario asks for, and the key that says so; other kinds than these have a bound."""
    work = scenario.workload
    match work:
        case Codebase():
            return "workload.queries_a_day", work.days * work.queries_a_day
        case Classroom():
            return "workload.lessons", work.lessons * scenario.n_nodes * work.conversation.turns
    return "workload", 0.0


def _keys(content: dict[str, Any]) -> Keys:
    """The keys known in each table of a scenario of this kind of workload."""
    workload = content.get("workload")
    kind = _WORKLOADS.get(str(workload.get("kind")) if isinstance(workload, dict) else "", Office)
    tables: dict[str, type[Struct]] = {
        "": Scenario,
        "machines": Machines,
        "measured": Measured,
        "network": Network,
        "churn": Churn,
        "faults": Faults,
        "conversation": Conversation,
    }
    known = {name: table.__struct_fields__ for name, table in tables.items()}
    return Keys({**known, "workload": ("kind", *kind.__struct_fields__)}, {"kind": tuple(_WORKLOADS)})


_WORKLOADS: dict[str, type[Struct]] = {
    str(kind.__struct_config__.tag): kind for kind in (Office, Agents, Classroom, Person, Codebase, Trace)
}
