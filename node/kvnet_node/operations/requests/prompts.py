"""Prompts, and what became of a request: requests and results."""

from typing import Any

import msgspec

from kvnet_node.operations.requests.base import Request, Result
from kvnet_node.operations.requests.contexts import Source


class TextPlace(msgspec.Struct, frozen=True):
    """A place in a text of a request.

    Attributes:
        part: "tools", "system" or "messages[3] (user)".
        path: of the text in the body, such as "messages[3].content".
        offset: characters before it.
        line, column: the same, both from 1 on.
        excerpt: a little of the text around it.
    """

    part: str
    path: str
    offset: int
    line: int
    column: int
    excerpt: str


class FoundKiller(msgspec.Struct, frozen=True):
    """Something that keeps prompts from sharing their beginning.

    Attributes:
        killer: its id in the table of killers.
        title, remedy: what it is and what to do.
        words: what was found.
        certain: it was seen to vary, instead of being likely to.
        removed: the node takes it out.
        place: where it is; None when it is in no text of the request.
    """

    killer: str
    title: str
    words: str
    remedy: str
    certain: bool
    removed: bool = False
    place: TextPlace | None = None


class PromptSection(msgspec.Struct, frozen=True):
    """A section of a prompt; ``shared`` of its ``size`` come before the first that varies."""

    label: str
    size: int
    shared: int


class PromptReport(msgspec.Struct, frozen=True):
    """How far a prompt agrees with another one. Sizes are in the unit of the result.

    Attributes:
        request: "FILE:LINE", or the id of a request.
        against: what it was compared with: the same for an earlier request; "" for itself at another moment.
        size: of the prompt.
        against_size: of the other one.
        common: before the first that varies.
        share: how much of the other prompt this is, 0 to 1.
        section: label of the section with the first that varies; "" when one prompt begins with the other.
        in_template: the chat template makes the difference.
        sections: in the order of the prompt.
        earlier, later: the place in the text of each; None where one has nothing there.
        rendered: what stands there in each rendered prompt, where the template makes the difference.
        killers: what was found.
    """

    request: str
    against: str
    size: int
    against_size: int
    common: int
    share: float
    section: str
    in_template: bool
    sections: list[PromptSection]
    earlier: TextPlace | None = None
    later: TextPlace | None = None
    rendered: list[str] = []
    killers: list[FoundKiller] = []


class PromptCheckRequest(Request, frozen=True):
    """Find what keeps the requests in files from sharing their beginning; ``paths`` are absolute."""

    paths: list[str]
    model: str | None = None


class PromptCheckResult(Result, frozen=True, tag="prompt check"):
    """What was found.

    Attributes:
        model: whose tokenizer and template were used; "" for none.
        unit: "tokens", or "characters" without a model.
        share: the smallest of the reports' shares.
        reports: of the one request, or of each with the one before it.
    """

    model: str
    unit: str
    share: float
    reports: list[PromptReport]


class ExplainRequest(Request, frozen=True):
    """Explain one of the running node's last requests.

    Attributes:
        request: its id or how that begins; "" for the last one.
        sections: which to make; all of them when empty.
    """

    request: str = ""
    sections: list[str] = []


class RejectedArtifact(msgspec.Struct, frozen=True):
    """An artifact that fitted and was not used, and why."""

    artifact: str
    code: str
    text: str


class ExplainedReuse(msgspec.Struct, frozen=True):
    """What of a prompt was reused, and why not more.

    Attributes:
        prompt_tokens, reused_tokens: of the prompt, and those of them that were not computed.
        created_tokens: those that were newly kept.
        source: "none", "ram", "disk" or "peer".
        sources: where restored ones came from.
        saved_s: estimated seconds saved; 0 when no speed is known.
        lookup_s, restore_s: seconds of looking and fetching, and of restoring.
        verdict: how exact restored state is; "" when none was restored.
        reasons: why nothing, or not more, was reused.
        rejected: artifacts that fitted and were not used.
        note: why there is nothing else to tell; "" otherwise.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    created_tokens: int = 0
    source: str = "none"
    sources: list[Source] = []
    saved_s: float = 0.0
    lookup_s: float = 0.0
    restore_s: float = 0.0
    verdict: str = ""
    reasons: list[str] = []
    rejected: list[RejectedArtifact] = []
    note: str = ""


class ExplainedPrompt(msgspec.Struct, frozen=True):
    """What a prompt is made of, and where it parts from the most similar one before it.

    Attributes:
        report: the comparison; ``against`` is "" when there was no earlier request of the same model.
        note: why there is none; "" otherwise.
    """

    report: PromptReport | None = None
    note: str = ""


class BreakEven(msgspec.Struct, frozen=True):
    """From which link rate fetching a token at ``position`` is sooner than computing it; None when from none.

    Attributes:
        measured_to: the last token at which prefill was measured, where ``position`` is beyond it: the speed there is
            taken to be the same; 0 otherwise.
    """

    position: int
    codec: str
    bytes_s: float | None
    measured_to: int = 0


class ExplainedStep(msgspec.Struct, frozen=True):
    """One step of a plan.

    Attributes:
        kind: "restore", "fetch" or "compute".
        first_token, end_token: which tokens of the prompt.
        expected_s: seconds it was expected to take.
        took_s: seconds it took; None when that is not known, or it was not done.
        bytes: stored bytes to fetch; 0 for other kinds.
        peer: whom from; "" for other kinds.
        peer_name: what it is called; "" when it is no member.
    """

    kind: str
    first_token: int
    end_token: int
    expected_s: float
    took_s: float | None = None
    bytes: int = 0
    peer: str = ""
    peer_name: str = ""


class ExplainedAlternative(msgspec.Struct, frozen=True):
    """A plan that was not taken."""

    expected_s: float
    steps: list[ExplainedStep]


class ExplainedPlan(msgspec.Struct, frozen=True):
    """Fetch or compute: what was decided for a prompt, why, and what came of it.

    Attributes:
        words: the decision.
        expected_s: seconds to the first token that the plan was expected to take, without looking.
        ttft_s: what it took, looking included; None before the first token.
        steps: of the plan.
        alternatives: what else was considered.
        expected_bytes_s: the rate that the peers were taken to deliver at; None when unknown, or none offered.
        fetched_bytes: stored bytes that came.
        fetched_tokens: tokens that could be used after the fetch.
        ended_early: the fetch was ended when computing the rest had become sooner.
        note: why there is nothing else to tell; "" otherwise.
    """

    words: str = ""
    expected_s: float = 0.0
    ttft_s: float | None = None
    steps: list[ExplainedStep] = []
    alternatives: list[ExplainedAlternative] = []
    expected_bytes_s: float | None = None
    fetched_bytes: int = 0
    fetched_tokens: int = 0
    ended_early: bool = False
    note: str = ""


class ExplainedPeer(msgspec.Struct, frozen=True):
    """What is known of the link to a connected peer.

    Attributes:
        peer: its id.
        rtt_s: seconds of a round trip; None when not measured.
        bytes_s: what it delivered lately; None when not measured.
        verdict: whether fetching from it pays, in words.
        name: what it is called; "" when it is no member.
    """

    peer: str
    rtt_s: float | None
    bytes_s: float | None
    verdict: str
    name: str = ""


class ExplainedLink(msgspec.Struct, frozen=True):
    """From which link rate on fetching pays for this machine and model, and what the links do.

    Attributes:
        basis: what is known of this machine.
        position: the place in the prompt that verdicts are for.
        break_even: the rate needed, by position and codec.
        peers: the connected peers.
        note: why there is nothing else to tell; "" otherwise.
    """

    basis: str = ""
    position: int = 0
    break_even: list[BreakEven] = []
    peers: list[ExplainedPeer] = []
    note: str = ""


class ExplainResult(Result, frozen=True, tag="explain"):
    """One request, explained. Nothing of it is kept anywhere.

    Attributes:
        request: its id.
        time_s: when it came, in seconds since 1970.
        path, model: of the endpoint, and as the client wrote it.
        state: "answered", "failed", "cancelled" or "running".
        failure: what the client was told when it failed; "" otherwise.
        ttft_s, total_s: seconds to the first token and to the end; 0 when unknown.
        sections: by name; each an object of its own form.
    """

    request: str
    time_s: float
    path: str
    model: str
    state: str
    failure: str
    ttft_s: float
    total_s: float
    sections: dict[str, dict[str, Any]]
