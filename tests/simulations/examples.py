"""Results as a run would give them, made of nothing but a seed."""

import numpy as np

from simulations.results import NodeResult, Recorder, RequestResult, RunResult


def result(policy: str, *, seed: int = 0, requests: int = 40, nodes: int = 4, speed: float = 1.0) -> RunResult:
    """A result in which prompts become shorter to answer the greater `speed` is."""
    rng = np.random.default_rng(7)
    n_input = rng.integers(1000, 20_000, requests)
    node = rng.integers(nodes, size=requests)
    recorder = Recorder(n_input, node, nodes)
    for number in range(requests):
        cold_s = float(n_input[number]) / 200
        hit = int(n_input[number] * (1 - 1 / speed))
        found = RequestResult(hit // 2, 0, hit - hit // 2, cold_s / speed, hit * 10, cold_s / speed, cold_s, 0.0)
        recorder.request(number, found)
    for number in range(nodes):
        recorder.node(number, NodeResult(requests // nodes, 1000 * number, 10**9, 50, 20, 5.0, 10**6))
    return recorder.finish(
        "test", policy, seed, duration_s=7200.0, checks={"verified": requests}, counts={"fetches": 3}, seconds=0.5
    )
