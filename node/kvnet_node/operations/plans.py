"""Two sections of ``kvnet explain``: the plan of a request and what came of it; and which links pay at all."""

import datetime as dt
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from kvnet.engine.interface import ModelInfo
from kvnet.exchange.planning import PlanReport
from kvnet.protocol.cost import FetchStep, PrefillStep, RestoreStep, Step
from kvnet.protocol.ids import PeerId, peer_text
from kvnet.protocol.speeds import Machine
from kvnet_node.calibrating import finite
from kvnet_node.calling import Names
from kvnet_node.operations import requests as r
from kvnet_node.operations.calibrating import break_even, positions_in
from kvnet_node.output import format_bytes, format_count

if TYPE_CHECKING:
    from kvnet_node.operations.explain import Question
    from kvnet_node.services import Services


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """What is known of the link to a peer; 0 and infinite where nothing is."""

    peer: PeerId
    rtt_s: float = 0.0
    bytes_s: float = 0.0
    expected_bytes_s: float = math.inf


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """What is known of this machine with one model, and of the links to connected peers.

    Attributes:
        machine: ``None`` when nothing was measured.
        basis: what is known of it, in words.
        shares: stored bytes by raw bytes, by codec.
        peers: those connected.
    """

    machine: Machine | None = None
    basis: str = ""
    shares: tuple[tuple[str, float], ...] = (("raw", 1.0),)
    peers: tuple[PeerFacts, ...] = ()


LinksOf = Callable[[ModelInfo | None], LinkFacts]


def no_links(_: ModelInfo | None) -> LinkFacts:
    """Nothing is known."""
    return LinkFacts()


def links_of(services: "Services", info: ModelInfo | None) -> LinkFacts:
    """What a node knows; of the peers alone, without a model."""
    calibration = services.speeds.calibration(info) if info is not None else None
    machine = services.speeds.machine(info) if info is not None else None
    peers: tuple[PeerFacts, ...] = ()
    if services.node is not None:
        scores, now_s = services.node.fetcher.scores, trio.current_time()
        ids = [known.info.peer for known in services.node.peers()]
        peers = tuple(
            PeerFacts(peer, scores.rtt_s(peer), scores.rate_bytes_s(peer), scores.expected_bytes_s(peer, now_s))
            for peer in ids
        )
    if calibration is not None:
        date = dt.datetime.fromtimestamp(calibration.measured).astimezone().date().isoformat()
        return LinkFacts(machine, f"calibrated {date}", tuple(calibration.stored_shares.items()), peers)
    if machine is not None:
        basis = "one prefill speed, from ordinary requests; kvnet bench calibrate measures more"
        return LinkFacts(machine, basis, peers=peers)
    return LinkFacts(peers=peers)


async def plan_section(question: "Question") -> r.ExplainedPlan:
    """The decision to fetch or to compute, what was expected of it, and what came of it."""
    reuse, finished = question.request.reuse, question.request.finished
    if reuse is None:
        return r.ExplainedPlan(note="its answer did not begin, so nothing was weighed")
    report = reuse.plan
    if report is None:
        return r.ExplainedPlan(
            note="nothing was weighed: peers were not asked, or it is not known what this machine does with the model "
            "(kvnet bench calibrate measures it)"
        )
    done, happened = finished, report.happened
    took = {
        RestoreStep: reuse.restore_s if reuse.sources else None,
        FetchStep: happened.seconds if happened is not None else None,
        PrefillStep: done.completed.prefill_s if done is not None else None,
    }
    return r.ExplainedPlan(
        words=report.words,
        expected_s=report.plan.seconds,
        ttft_s=done.ttft_s if done is not None else None,
        steps=[_step(step, question.names, took[type(step)]) for step in report.plan.steps],
        alternatives=[
            r.ExplainedAlternative(other.seconds, [_step(step, question.names) for step in other.steps])
            for other in report.alternatives
        ],
        expected_bytes_s=_rate(report),
        fetched_bytes=happened.n_bytes if happened is not None else 0,
        fetched_tokens=happened.n_tokens if happened is not None else 0,
        ended_early=happened is not None and happened.ended_early,
    )


def _rate(report: PlanReport) -> float | None:
    return finite(report.bytes_s) or None


def _step(step: Step, names: Names, took_s: float | None = None) -> r.ExplainedStep:
    match step:
        case RestoreStep():
            return r.ExplainedStep("restore", 0, step.n_tokens, step.seconds, took_s)
        case FetchStep():
            peer, name = (peer_text(step.peer), names.peers.get(step.peer, "")) if step.peer else ("", "")
            return r.ExplainedStep("fetch", 0, step.n_tokens, step.seconds, took_s, step.n_bytes, peer, name)
        case PrefillStep():
            return r.ExplainedStep("compute", step.first_token, step.end_token, step.seconds, took_s)


async def link_section(question: "Question") -> r.ExplainedLink:
    """From which link rate on fetching pays, and what is known of each connected peer's."""
    async with question.loaded(question.model) as engine:
        info = engine.info if engine is not None else None
    facts, reuse = question.links(info), question.request.reuse
    if info is None:
        if reuse is None:
            return _without_rates(question, facts, "its answer did not begin, so nothing was to be fetched")
        return _without_rates(question, facts, "its model is not in memory any more: ask it something")
    if facts.machine is None:
        return _without_rates(question, facts, "this machine was not measured with the model: kvnet bench calibrate")
    position = reuse.prompt_tokens if reuse is not None else 0
    positions = sorted({*positions_in(info.window_tokens), position})
    needed = break_even(facts.machine, info.kv_bytes_per_token, dict(facts.shares), positions)
    here = [each for each in needed if each.position == position]
    return r.ExplainedLink(
        basis=facts.basis,
        position=position,
        break_even=needed,
        peers=[_peer(each, question.names, verdict(each, here)) for each in facts.peers],
    )


def _without_rates(question: "Question", facts: LinkFacts, note: str) -> r.ExplainedLink:
    unknown = "what this machine does with the model is not known"
    return r.ExplainedLink(peers=[_peer(each, question.names, unknown) for each in facts.peers], note=note)


def _peer(facts: PeerFacts, names: Names, words: str) -> r.ExplainedPeer:
    name = names.peers.get(facts.peer, "")
    return r.ExplainedPeer(peer_text(facts.peer), facts.rtt_s or None, facts.bytes_s or None, words, name)


def verdict(facts: PeerFacts, needed: Sequence[r.BreakEven]) -> str:
    """Whether fetching from a peer pays at one position, in words.

    Args:
        facts: of the peer.
        needed: the rates that each codec takes there; the first is that of raw K/V.
    """
    possible = [each for each in needed if each.bytes_s is not None]
    if not possible:
        return "computing is sooner on any link"
    if math.isinf(facts.expected_bytes_s):
        return "not measured yet: the next fetch finds out"
    paying = [each for each in possible if each.bytes_s is not None and each.bytes_s <= facts.expected_bytes_s]
    if paying:
        first = paying[0]
        assert first.bytes_s is not None  # noqa: S101 - filtered above
        times = facts.expected_bytes_s / first.bytes_s
        only = "" if first == needed[0] else f" in codec {first.codec} only"
        return f"fetching pays{only}: {times:,.1f} times the {_mb(first.bytes_s)}/s needed"
    least = min(each.bytes_s for each in possible if each.bytes_s is not None)
    at = format_count(possible[0].position)
    return f"computing is sooner: {_mb(facts.expected_bytes_s)}/s of the {_mb(least)}/s needed at token {at}"


def _mb(n_bytes: float) -> str:
    return format_bytes(int(min(n_bytes, 1e15)))
