"""The command line: ``python -m simulations run | compare | plot | replay | estimate | scenarios``.

Results go to stdout, progress and errors to stderr; exit codes are those of the node.
"""

import argparse
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from kvnet.errors import KvnetError, UsageError

if TYPE_CHECKING:
    from simulations.progress import Progress
    from simulations.results import RunResult
    from simulations.scenario import Scenario

MAX_SEED = (1 << 63) - 1


class _Parser(argparse.ArgumentParser):
    """Raises what the others raise, so that errors look alike."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"{self.prog} --help")


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    as_json = "--json" in arguments
    try:
        flags = arguments_parser().parse_args(arguments)
        flags.run(flags)
    except KvnetError as error:
        _fail(error, as_json=as_json)
        return error.exit_code
    except BrokenPipeError:
        # Whoever read this has enough; nothing more can be said to it, not at exit either.
        sys.stdout = None
        return KvnetError.exit_code
    except Exception as error:  # noqa: BLE001 - the last place where an error can be told in one line
        if "--verbose" in arguments:
            traceback.print_exc()
        unexpected = KvnetError(f"unexpected {type(error).__name__}: {error}", hint="--verbose shows where")
        _fail(unexpected, as_json=as_json)
        return KvnetError.exit_code
    return 0


def _fail(error: KvnetError, *, as_json: bool) -> None:
    if as_json:
        record = {
            "type": "error",
            "code": error.code,
            "exit_code": error.exit_code,
            "message": error.message,
            "hint": error.hint,
        }
        sys.stderr.write(msgspec.json.encode(record).decode() + "\n")
        return
    sys.stderr.write(f"error: {error.message}\n" + (f"  {error.hint}\n" if error.hint else ""))


def arguments_parser() -> argparse.ArgumentParser:
    """What can be typed."""
    parser = _Parser(prog="python -m simulations", description="What would a swarm of Macs save?", allow_abbrev=False)
    verbs = parser.add_subparsers(metavar="COMMAND", required=True)

    run = _verb(verbs, "run", _run, "Run a scenario under one policy.")
    run.add_argument("scenario", metavar="SCENARIO", help="a TOML file, or the name of one that comes with it")
    run.add_argument("--policy", default="swarm", help="by default the node as shipped")
    _add_seed(run)
    _add_out(run)

    compare = _verb(verbs, "compare", _compare, "Run a scenario under several policies and show them side by side.")
    compare.add_argument("scenario", metavar="SCENARIO", help="a TOML file, or the name of one that comes with it")
    compare.add_argument("--policies", default="", help="names with commas between, or all")
    _add_seed(compare)
    _add_many(compare)
    _add_out(compare)

    plot = _verb(verbs, "plot", _plot, "Draw a result as PNG and SVG.")
    plot.add_argument("result", metavar="RESULT", help="a folder written with --out")
    _add_out(plot, "where to write; the folder of the result by default")

    replay = _verb(verbs, "replay", _replay, "Count what an infinite store at one node would hit in a trace.")
    replay.add_argument("trace", metavar="TRACE", help="a trace, plain or gzipped, or the name of an excerpt")

    estimate = _verb(verbs, "estimate", _estimate, "Estimate what some machines alike would save on a trace.")
    estimate.add_argument("trace", metavar="TRACE", help="a trace, plain or gzipped, or the name of an excerpt")
    estimate.add_argument(
        "--machines", type=_counted("--machines", 1, 10_000), default=5, help="how many; 5 by default"
    )
    estimate.add_argument("--chip", default="m4", help="m4 by default")
    estimate.add_argument("--model", default="qwen3-8b", help="qwen3-8b by default")
    estimate.add_argument("--link", default="wifi", help="wifi by default")
    estimate.add_argument("--calibration", metavar="FILE", default="", help="JSON of `kvnet bench calibrate --json`")
    estimate.add_argument(
        "--requests", type=_counted("--requests", 0, 10_000_000), default=0, help="at most so many of the trace"
    )
    estimate.add_argument(
        "--stretch", type=float, default=0.0, help="all times are multiplied by it; by default as much as needed"
    )
    _add_seed(estimate)
    _add_many(estimate)
    _add_out(estimate)

    break_even = _verb(verbs, "break-even", _break_even, "Draw from which link speed on fetching pays.")
    break_even.add_argument("--out", metavar="FOLDER", required=True, help="where to write")

    _verb(verbs, "scenarios", _scenarios, "List scenarios and policies.")
    return parser


def _verb(verbs: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="one object a line, the last is the result")
    parser.add_argument("--verbose", action="store_true", help="show where an unexpected error arose")
    return parser


def _add_seed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=_counted("--seed", 0, MAX_SEED), default=0, help="0 by default")


def _add_many(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seeds", type=_counted("--seeds", 1, 1000), default=1, help="so many seeds for each policy, from --seed on"
    )
    parser.add_argument("--jobs", type=_counted("--jobs", 1, 256), default=1, help="so many runs at once; 1 by default")


def _add_out(parser: argparse.ArgumentParser, text: str = "also write CSV and what `plot` draws") -> None:
    parser.add_argument("--out", metavar="FOLDER", default="", help=text)


def _counted(name: str, least: int, most: int) -> Any:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
            raise UsageError(f"{name} expects a whole number from {least:,} to {most:,}, found {text!r}")
        return int(text)

    return parse


def _print(flags: argparse.Namespace, result: Any, text: str) -> None:
    line = msgspec.json.encode(result).decode() if flags.json else text
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


# --- commands ---


def _run(flags: argparse.Namespace) -> None:
    from simulations import rendering
    from simulations.results import summary
    from simulations.scenario_files import load

    scenario = load(flags.scenario)
    result = _simulate(scenario, flags.policy, flags.seed)
    _write(flags, scenario.title, [result])
    found = summary(result)
    _print(flags, found, rendering.one_run(scenario.title, found))


def _compare(flags: argparse.Namespace) -> None:
    from simulations.estimating import ESTIMATED
    from simulations.policies import POLICIES
    from simulations.scenario_files import load

    scenario = load(flags.scenario)
    asked = [name.strip() for name in flags.policies.split(",") if name.strip()]
    if asked == ["all"]:
        asked = list(POLICIES)
    _compared(flags, scenario, asked or scenario.policies or ESTIMATED)


def _compared(flags: argparse.Namespace, scenario: "Scenario", policies: Sequence[str]) -> None:
    from simulations import rendering
    from simulations.comparing import compare

    results, found = [], []
    seeds = range(flags.seed, flags.seed + flags.seeds)
    with _Reports(scenario.name) as reports:
        for result, told in compare(scenario, policies, seeds, reports, jobs=flags.jobs):
            results.append(result)
            found.append(told)
            if flags.json:
                _print(flags, told, "")
    _write(flags, scenario.title, results)
    compared = {"type": "compare", "scenario": scenario.name, "seeds": list(seeds), "runs": found}
    _print(flags, compared, rendering.comparison(scenario.title, found))


class _Reports:
    """A line of progress for each run, one after the other."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: Progress | None = None

    def __call__(self, policy: str, seed: int) -> "Progress":
        from simulations.progress import Progress

        self.close()
        self._open = Progress(f"{self._name}, {policy}, seed {seed}, requests")
        return self._open

    def close(self) -> None:
        if self._open is not None:
            self._open.close()

    def __enter__(self) -> "_Reports":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def _simulate(scenario: "Scenario", policy: str, seed: int) -> "RunResult":
    from simulations.world import run

    with _Reports(scenario.name) as reports:
        return run(scenario, policy, seed, report=reports(policy, seed))


def _write(flags: argparse.Namespace, title: str, results: "Sequence[RunResult]") -> None:
    if not flags.out:
        return
    from simulations.saved import save
    from simulations.tables import write_csv

    folder = Path(flags.out)
    save(results, title, folder)
    write_csv(results, folder)
    sys.stderr.write(f"written to {folder}; draw it with: python -m simulations plot {folder}\n")


def _plot(flags: argparse.Namespace) -> None:
    from simulations.plots import draw
    from simulations.saved import read

    folder = Path(flags.result)
    saved = read(folder)
    _drawn(flags, draw(saved, Path(flags.out) if flags.out else folder))


def _break_even(flags: argparse.Namespace) -> None:
    from simulations.breakeven import draw

    _drawn(flags, draw(Path(flags.out)))


def _drawn(flags: argparse.Namespace, files: Sequence[Path]) -> None:
    names = [str(file) for file in files]
    _print(flags, {"type": "plots", "files": names}, "\n".join(names))


def _replay(flags: argparse.Namespace) -> None:
    from simulations import rendering
    from simulations.progress import Progress
    from simulations.replay import replay_file
    from simulations.workload.traces import find

    path = find(flags.trace)
    with Progress(f"reading {path.name}, bytes") as reading, Progress(f"replaying {path.name}, requests") as counting:
        result = replay_file(path, reading, counting)
    _print(flags, result, rendering.replayed(path.name, result))


def _estimate(flags: argparse.Namespace) -> None:
    from simulations.estimating import ESTIMATED, scenario_of

    scenario = scenario_of(
        flags.trace,
        machines=flags.machines,
        chip=flags.chip,
        model=flags.model,
        link=flags.link,
        calibration=flags.calibration,
        requests=flags.requests,
        stretch=flags.stretch,
    )
    _compared(flags, scenario, ESTIMATED)


def _scenarios(flags: argparse.Namespace) -> None:
    from simulations.policies import POLICIES
    from simulations.scenario_files import load, names

    scenarios = [(name, load(name).title) for name in names()]
    policies = [(policy.name, policy.title) for policy in POLICIES.values()]
    listed = {"type": "scenarios", "scenarios": dict(scenarios), "policies": dict(policies)}
    width = max(len(name) for name, _ in [*scenarios, *policies])
    lines = [
        f"{name.ljust(width)}  {title}"
        for name, title in [("SCENARIO", ""), *scenarios, ("", ""), ("POLICY", ""), *policies]
    ]
    _print(flags, listed, "\n".join(line.rstrip() for line in lines))
