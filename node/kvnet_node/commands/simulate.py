"""``kvnet simulate``: what would some Macs like this one save on a trace, or in a scenario?"""

from pathlib import Path

from kvnet_node.invocation import Context


def simulate(
    work: str,
    /,
    *,
    machines: int = 5,
    link: str = "wifi",
    chip: str | None = None,
    model: str | None = None,
    requests: int = 0,
    seed: int = 0,
    out: Path | None = None,
    context: Context,
) -> int:
    """Estimate what some Macs like this one would save on a trace; works from a checkout alone.

    It is the simulator's answer, computed in a process of its own and without any network: without sharing, with own
    caches, with the swarm, and at best. What `kvnet bench calibrate` measured here is used where it is known, else the
    simulator's tables. A trace is stretched until without reuse these machines would compute three tenths of the time.

    Args:
        work: a trace, plain or gzipped, the name of an excerpt, or a scenario ending in .toml.
        machines: how many.
        link: wifi, 1gbe, 2.5gbe, 10gbe, thunderbolt or wan.
        chip: such as m1, m4-pro or m5; that of this machine by default.
        model: one calibrated here, or one of the simulator's tables.
        requests: at most so many of the trace; 0 for all.
        seed: of all that is drawn.
        out: a folder for the result and its plots' data.
    """
    from kvnet_node import simulating
    from kvnet_node.paths import DataPaths

    shared = ["--seed", str(seed)]
    shared += ["--out", str(out)] if out else []
    shared += ["--json"] if context.output.json else []
    shared += ["--verbose"] if context.output.verbose else []
    if work.endswith(".toml"):
        return simulating.simulate(["compare", work, *shared], None)
    calibration = None if chip else simulating.calibration_of(DataPaths(context.data_dir), model)
    if calibration is not None:
        context.output.message(f"as measured here with {calibration.model}")
    here = chip or simulating.this_chip()
    if calibration is None and not here:
        context.output.warning(
            f"this machine is none that the simulator's tables know: taken for {simulating.DEFAULT_CHIP}; "
            "kvnet bench calibrate measures it, --chip names another"
        )
    arguments = ["estimate", work, "--machines", str(machines), "--link", link]
    arguments += ["--chip", here or simulating.DEFAULT_CHIP]
    arguments += ["--model", (model if calibration is None else None) or simulating.DEFAULT_MODEL]
    arguments += ["--requests", str(requests)]
    return simulating.simulate([*arguments, *shared], calibration)
