"""From a scenario and a seed to what a world begins with."""

from dataclasses import replace

import numpy as np

from kvnet.errors import ConfigError
from kvnet.format.codecs import Codec
from kvnet.protocol.speeds import Machine, PrefillSpeed, SpeedPoint
from simulations import chips
from simulations.scenario import Machines, Measured, Scenario
from simulations.workload.requests import RequestStream
from simulations.workload.work import prepare
from simulations.world.setup import GB, NodeSetup, Partition, SiteSetup, WorldSetup
from simulations.world.swift import RememberedSpeed

UNLIMITED_BYTES_DAY = 1 << 60
"""Stands for no limit of writes."""
DAY_S = 24 * 3600.0


def build(scenario: Scenario, seed: int) -> WorldSetup:
    """The machines, links, requests and mishaps of a scenario; the same for the same seed.

    Raises:
        ConfigError: a chip, model or link that is not in the tables.
        UsageError, MalformedError: a trace that is not there, or does not fit.
    """
    work = prepare(scenario, seed)
    sites = _sites(scenario)
    drawn = np.random.default_rng([seed, 1])
    liars = set(drawn.permutation(scenario.n_nodes)[: round(scenario.faults.liars * scenario.n_nodes)].tolist())
    nodes: list[NodeSetup] = []
    for group in scenario.machines:
        one = _node(scenario, group)
        nodes += [
            replace(
                one,
                site=sites[group.site][at * scenario.network.sites // group.count],
                liar=len(nodes) + at in liars,
            )
            for at in range(group.count)
        ]
    n_sites = 1 + max(node.site for node in nodes)
    uplink = _link("network.uplink", scenario.network.uplink)
    site = SiteSetup(uplink.up_bytes_s, uplink.down_bytes_s, uplink.rtt_s / 2)
    return WorldSetup(
        scenario.name,
        tuple(nodes),
        work.stream,
        sites=(site,) * n_sites if n_sites > 1 else (),
        changes=work.changes,
        partitions=_partitions(scenario, work.stream, n_sites, drawn),
    )


def _sites(scenario: Scenario) -> dict[str, list[int]]:
    """The numbers of the sites that each name stands for."""
    numbers: dict[str, list[int]] = {}
    for group in scenario.machines:
        if group.site not in numbers:
            first = len(numbers) * scenario.network.sites
            numbers[group.site] = list(range(first, first + scenario.network.sites))
    return numbers


def _node(scenario: Scenario, group: Machines) -> NodeSetup:
    """One of a group, at no particular site."""
    try:
        chip = chips.chip(group.chip)
    except ConfigError as error:
        raise _at("machines.chip", error) from error
    try:
        model = chips.model(scenario.model)
    except ConfigError as error:
        raise _at("model", error) from error
    budget = int(group.ssd_write_gb_a_day * GB)
    measured = group.measured
    machine = machine_of(measured) if measured else chips.machine(chip, model)
    return NodeSetup(
        machine=replace(machine, prefill=RememberedSpeed(machine.prefill)),
        link=_link("machines.link", group.link),
        model=model.name,
        kv_bytes_per_token=measured.kv_bytes_per_token if measured else model.kv_bytes_per_token,
        answer_tokens_s=measured.answer_tokens_s if measured else chips.answer_tokens_s(chip, model),
        live_bytes=int(group.ram_gb * GB),
        quota_bytes=int(group.disk_gb * GB),
        write_budget_bytes_day=budget or UNLIMITED_BYTES_DAY,
    )


def machine_of(measured: Measured) -> Machine:
    """What a machine measured itself, for planning.

    Raises:
        ConfigError: a codec that nobody knows.
    """
    known = {codec.value: codec for codec in Codec}
    for name in measured.decode_bytes_s:
        if name not in known:
            raise ConfigError(f"machines.measured.decode_bytes_s: expected one of {', '.join(known)}, found {name!r}")
    return Machine(
        PrefillSpeed(SpeedPoint(position, tokens_s) for position, tokens_s in measured.prefill),
        measured.restore_bytes_s,
        measured.restore_fixed_s,
        {known[name]: rate for name, rate in measured.decode_bytes_s.items()},
    )


def _partitions(
    scenario: Scenario, stream: RequestStream, n_sites: int, drawn: np.random.Generator
) -> tuple[Partition, ...]:
    faults = scenario.faults
    if n_sites < 2 or not faults.partitions_a_day:
        return ()
    found = []
    for site in range(n_sites):
        count = int(drawn.poisson(faults.partitions_a_day * stream.duration_s / DAY_S))
        for begin_s in sorted(drawn.uniform(0, stream.duration_s, count).tolist()):
            end_s = begin_s + float(drawn.exponential(faults.partition_s))
            found.append(Partition(begin_s, end_s, frozenset({site})))
    return tuple(sorted(found, key=lambda each: (each.begin_s, sorted(each.sites))))


def _link(key: str, name: str) -> chips.LinkKind:
    try:
        return chips.link(name)
    except ConfigError as error:
        raise _at(key, error) from error


def _at(key: str, error: ConfigError) -> ConfigError:
    """The same error, with the key that the name stands under."""
    return ConfigError(f"{key}: {error.message}", hint=error.hint)
