"""The requests and results of every operation: plain values that travel as JSON.

The JSON names are the attribute names; a result's ``type`` is the operation's name. Paths are absolute, because the
process that works may have another working directory. Secrets are in none of them.
"""

from typing import Any

import msgspec


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all requests."""


class Result(msgspec.Struct, frozen=True, tag_field="type"):
    """Base of all results."""


# --- Named contexts and generation ---------------------------------------------------------------------------------


class AddRequest(Request, frozen=True):
    """Compute the K/V of files as a named context and keep it.

    Attributes:
        paths: absolute paths of files, directories or git repositories.
        name: the context's name.
        model: name or folder of the model; None for ``model.default`` or the only shareable one.
        codec: "raw", "shuffle+zstd-1" or "q8"; or several with commas between them, each an artifact of its own.
        dry_run: only say what would be done.
    """

    paths: list[str]
    name: str
    model: str | None = None
    codec: str = "raw"
    dry_run: bool = False


class SkippedFile(msgspec.Struct, frozen=True):
    """A file left out of a context, and why."""

    path: str
    reason: str


class AddResult(Result, frozen=True, tag="add"):
    """What ``add`` made.

    Attributes:
        artifact: the artifact hash as text; "" after a dry run.
        name, version: the named context.
        tokens: tokens in the artifact.
        bytes: K/V bytes stored for it, as encoded.
        new_bytes: those of them that were not held before.
        reused_tokens: tokens whose K/V was restored instead of computed.
        prefilled_tokens: tokens computed now.
        prefill_s: seconds of prefill (an estimate after a dry run).
        prefill_known: False when no prefill of this model has been measured, so that there is no estimate.
        files: files in the layout.
        skipped: files left out.
        model: the model's name.
        codec: how chunks are stored.
        dry_run: nothing was computed or kept.
        ticket: what another device of the namespace fetches it with, addresses of the running node included.
        others: the same state stored with the other codecs asked for: artifact hash text by codec.
    """

    artifact: str
    name: str
    version: int
    tokens: int
    bytes: int
    new_bytes: int
    reused_tokens: int
    prefilled_tokens: int
    prefill_s: float
    files: int
    skipped: list[SkippedFile] = []
    model: str = ""
    codec: str = "raw"
    dry_run: bool = False
    ticket: str = ""
    prefill_known: bool = True
    others: dict[str, str] = {}


class AskRequest(Request, frozen=True):
    """Answer a question over a named context.

    Attributes:
        name: the context, NAME or NAME@VERSION.
        question: what to ask.
        max_tokens: at most this many new tokens.
        no_reuse: look nothing up, store nothing.
        model: name or folder of the model; None for the one the context was added with.
    """

    name: str
    question: str
    max_tokens: int = 256
    no_reuse: bool = False
    model: str | None = None


class GenerateRequest(Request, frozen=True):
    """Generate from a prompt or a chat; exactly one of ``prompt`` and ``messages`` is given.

    Attributes:
        model: name or folder of the model; None for the default.
        prompt: the text of one user message.
        messages: OpenAI chat messages.
        max_tokens: at most this many new tokens.
        no_reuse: look nothing up, store nothing.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int = 256
    no_reuse: bool = False


class Source(msgspec.Struct, frozen=True):
    """Where reused tokens came from.

    Attributes:
        source: "ram", "disk" or "peer".
        tokens: tokens reused.
        bytes: encoded K/V bytes read or fetched.
        seconds: time until they were here and verified.
        peer: peer id text, "" when no peer was asked.
        signer: publisher text of who signed them.
        artifact: artifact hash text.
    """

    source: str
    tokens: int
    bytes: int
    seconds: float
    peer: str = ""
    signer: str = ""
    artifact: str = ""


class GenerateResult(Result, frozen=True, tag="generate"):
    """A finished generation.

    Attributes:
        text: the whole text.
        prompt_tokens: tokens of the rendered prompt.
        reused_tokens: those of them not prefilled here.
        sources: where the reused ones came from.
        ttft_s: from request accepted to first token, in seconds.
        prefill_s: seconds of prefill.
        decode_s: seconds from the first to the last token.
        finish_reason: "stop" or "length".
        policy: the trust policy in force.
        verdict: "EXACT" or "TOLERANT"; EXACT when nothing was reused.
        generated_tokens: new tokens.
        model: the model's name.
        reasons: why nothing, or not more, was reused; each a few words, with the next step where there is one.
        saved_s: how much sooner the first token came than by prefilling everything, from the prefill speed measured
            before, in seconds; below 0 when reuse took longer; 0 when nothing was reused or no speed is known.
        max_tokens: how many new tokens were asked for at most.
    """

    text: str
    prompt_tokens: int
    reused_tokens: int
    sources: list[Source]
    ttft_s: float
    prefill_s: float
    decode_s: float
    finish_reason: str
    policy: str
    verdict: str
    generated_tokens: int = 0
    model: str = ""
    reasons: list[str] = []
    saved_s: float = 0.0
    max_tokens: int = 0


class AskResult(GenerateResult, frozen=True, tag="ask"):
    """A finished answer; the fields of ``GenerateResult``."""


class FetchRequest(Request, frozen=True):
    """Fetch an artifact.

    Attributes:
        target: artifact hash or ticket.
        addresses: multiaddress texts of peers to ask first (``--from``).
        name: make it a named context of this name.
    """

    target: str
    addresses: list[str] = []
    name: str | None = None


class Provided(msgspec.Struct, frozen=True):
    """One provider's part of a fetch.

    Attributes:
        peer: its peer id.
        address: one it is connected by, or "".
        bytes: verified bytes that it delivered.
        chunks: in so many chunks.
        seconds: from the first request to it until its last chunk.
        rate_bytes_s: bytes a second in that time; 0 when it delivered nothing.
        path: "bulk" or "stream"; "" when it could not be asked.
        dropped: why it was left before everything was there, such as "bad_chunk" or "slow"; "" when it was not.
    """

    peer: str
    address: str
    bytes: int
    chunks: int
    seconds: float = 0.0
    rate_bytes_s: float = 0.0
    path: str = ""
    dropped: str = ""


class FetchResult(Result, frozen=True, tag="fetch"):
    """What ``fetch`` brought.

    Attributes:
        artifact: artifact hash text.
        bytes: encoded bytes of the artifact.
        chunks: chunks of the artifact.
        fetched_chunks: chunks that came over the network now.
        seconds: from start to published.
        providers: who delivered what.
        signer: publisher text of the signer.
        name: the named context it became, or "".
        complete: every chunk is held.
        tokens: tokens of the artifact.
        fetched_bytes: bytes that came over the network now.
        resumed_chunks: chunks that were here before, from an earlier fetch or another artifact; 0 when there was
            nothing to fetch.
    """

    artifact: str
    bytes: int
    chunks: int
    fetched_chunks: int
    seconds: float
    providers: list[Provided]
    signer: str
    name: str
    complete: bool
    tokens: int = 0
    fetched_bytes: int = 0
    resumed_chunks: int = 0


# --- Artifacts in the store ----------------------------------------------------------------------------------------


class ArtifactSummary(msgspec.Struct, frozen=True):
    """One artifact in a list."""

    artifact: str
    names: list[str]
    tokens: int
    bytes: int
    codec: str
    complete: bool
    pinned: bool
    signer: str
    own: bool
    created: int
    model: str = ""
    lossy: bool = False


class ListRequest(Request, frozen=True):
    """List the artifacts of this store."""


class ListResult(Result, frozen=True, tag="list"):
    """All artifacts held, newest first."""

    artifacts: list[ArtifactSummary]


class ArtifactRequest(Request, frozen=True):
    """Something about one artifact: a full or short hash, ``NAME`` or ``NAME@3``."""

    target: str


class ShowResult(Result, frozen=True, tag="show"):
    """Everything a manifest says, and what is held of it.

    Attributes:
        verdict: whose rules accept it: "accepted" or the reason of the refusal.
        held_chunks: chunks held, of ``chunks``.
        fingerprint: named parts of the fingerprint, digests in hex.
        derived_from: artifact hash text and signer text of every source.
        ticket: what another device of the namespace fetches it with, addresses of the running node included.
    """

    artifact: str
    names: list[str]
    tokens: int
    blocks: int
    chunks: int
    held_chunks: int
    bytes: int
    codec: str
    complete: bool
    pinned: bool
    signer: str
    own: bool
    policy: str
    verdict: str
    namespace: str
    created: int
    producer: dict[str, str]
    fingerprint: dict[str, str]
    derived_from: list[dict[str, str]]
    context_bytes: int = 0
    ticket: str = ""
    lossy: bool = False


class VerifyRequest(Request, frozen=True):
    """Re-hash what is held; every artifact when ``target`` is empty."""

    target: str = ""


class VerifyResult(Result, frozen=True, tag="verify"):
    """What verification found.

    Attributes:
        artifacts, chunks, bytes: what was read and matched.
        bad_chunks: "artifact hash text/chunk index" of everything that did not match; quarantined.
        missing_chunks: chunks not held.
        incomplete: hash text of each artifact that lacks chunks, bad ones included.
        incomplete_pinned: those of them that are pinned, and so once were whole.
    """

    artifacts: int
    chunks: int
    bytes: int
    bad_chunks: list[str]
    missing_chunks: int = 0
    incomplete: list[str] = []
    incomplete_pinned: list[str] = []


class PinResult(Result, frozen=True, tag="pin"):
    """An artifact is pinned, or no longer."""

    artifact: str
    pinned: bool


class RemoveResult(Result, frozen=True, tag="rm"):
    """What ``rm`` removed.

    Attributes:
        artifact: artifact hash text of what was named.
        names: each NAME@VERSION that is gone.
        freed_bytes: bytes freed in the store.
        removed: the artifact itself is gone; False while another name means it.
        kept_by: each NAME@VERSION that still means the artifact.
        remaining: other versions of the same name, each NAME@VERSION, the oldest first.
    """

    artifact: str
    names: list[str]
    freed_bytes: int
    removed: bool = True
    kept_by: list[str] = []
    remaining: list[str] = []


class CollectRequest(Request, frozen=True):
    """Remove what is not pinned until quota and free space are kept.

    Attributes:
        all: remove everything that is not pinned.
    """

    all: bool = False


class CollectResult(Result, frozen=True, tag="gc"):
    """What garbage collection removed."""

    removed: list[str]
    freed_bytes: int
    held_bytes: int
    quota_bytes: int


class ExportRequest(Request, frozen=True):
    """Write an artifact to a container file; ``path`` is absolute and must not exist."""

    target: str
    path: str


class ExportResult(Result, frozen=True, tag="export"):
    """The container that was written."""

    artifact: str
    path: str
    bytes: int


class ImportRequest(Request, frozen=True):
    """Take an artifact from a container file; ``name`` makes it a named context."""

    path: str
    name: str | None = None


class ImportResult(Result, frozen=True, tag="import"):
    """The artifact that was taken in."""

    artifact: str
    bytes: int
    tokens: int
    signer: str
    complete: bool
    name: str = ""


class RebuildRequest(Request, frozen=True):
    """Make the index anew from the packs."""


class RebuildResult(Result, frozen=True, tag="store rebuild"):
    """What the new index holds."""

    artifacts: int
    chunks: int
    seconds: float
    refused: list[str] = []


class ScrubRequest(Request, frozen=True):
    """Read and hash everything that is held, and fetch again what went bad."""


class ScrubResult(Result, frozen=True, tag="store scrub"):
    """What a scrub found.

    Attributes:
        artifacts, chunks, bytes: what was looked at and matched.
        bad_chunks: chunks that did not match; they are not used any more.
        repaired: hash text of each artifact that peers made whole again.
        damaged: hash text of each artifact that stays damaged.
    """

    artifacts: int
    chunks: int
    bytes: int
    bad_chunks: int
    repaired: list[str]
    damaged: list[str]
    seconds: float


# --- Identity ------------------------------------------------------------------------------------------------------


class KeyRequest(Request, frozen=True):
    """Make, show or list publisher keys."""


class KeyResult(Result, frozen=True, tag="key"):
    """One publisher key of this node; the secret never leaves its file."""

    publisher: str
    peer: str
    current: bool = True


class TrustRequest(Request, frozen=True):
    """Trust a publisher, or no longer.

    Attributes:
        publisher: publisher text.
        label: a name for the person reading lists.
    """

    publisher: str
    label: str = ""


class TrustResult(Result, frozen=True, tag="trust"):
    """Whether a publisher is trusted now, and whether that changed."""

    publisher: str
    trusted: bool
    changed: bool
    label: str = ""


class KeyEntry(msgspec.Struct, frozen=True):
    """One key in a list.

    Attributes:
        role: "signing" (the one new artifacts are signed with), "own" or "trusted".
    """

    publisher: str
    role: str
    label: str = ""
    since: str = ""


class KeyListResult(Result, frozen=True, tag="key list"):
    """Own and trusted publisher keys."""

    keys: list[KeyEntry]
    policy: str


class NamespaceEntry(msgspec.Struct, frozen=True):
    """One namespace of this node: its public id and how many artifacts it holds, no secrets."""

    name: str
    id: str
    artifacts: int
    current: bool


class NamespaceListRequest(Request, frozen=True):
    """List namespaces."""


class NamespaceListResult(Result, frozen=True, tag="namespace list"):
    """All namespaces of this node."""

    namespaces: list[NamespaceEntry]


class NamespaceFileRequest(Request, frozen=True):
    """Export ``mine`` to, or import it from, a file.

    Attributes:
        path: absolute.
        keep_old: on import, keep the namespace it replaces for what is held already.
    """

    path: str
    keep_old: bool = False


class NamespaceResult(Result, frozen=True, tag="namespace"):
    """The namespace that was exported or imported; an import of what is ``mine`` already changed nothing."""

    id: str
    path: str
    kept: str = ""
    changed: bool = True


# --- Prompts -------------------------------------------------------------------------------------------------------


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
    """From which link rate fetching a token at ``position`` is sooner than computing it; None when from none."""

    position: int
    codec: str
    bytes_s: float | None


class ExplainedStep(msgspec.Struct, frozen=True):
    """One step of a plan.

    Attributes:
        kind: "restore", "fetch" or "compute".
        first_token, end_token: which tokens of the prompt.
        expected_s: seconds it was expected to take.
        took_s: seconds it took; None when that is not known, or it was not done.
        bytes: stored bytes to fetch; 0 for other kinds.
        peer: whom from; "" for other kinds.
    """

    kind: str
    first_token: int
    end_token: int
    expected_s: float
    took_s: float | None = None
    bytes: int = 0
    peer: str = ""


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
    """

    peer: str
    rtt_s: float | None
    bytes_s: float | None
    verdict: str


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


# --- The node itself -----------------------------------------------------------------------------------------------


class StatusRequest(Request, frozen=True):
    """How the node is."""


class WritesEntry(msgspec.Struct, frozen=True):
    """What the node may write to its disk, and has written today (UTC).

    Attributes:
        day_bytes: what it may write in a day without being asked for by name.
        left_bytes: what is left of that.
        kept_bytes: written today of its own accord,
        fetched_bytes: for prompts,
        named_bytes: and for `add` and `fetch` by name, which is not limited.
    """

    day_bytes: int
    left_bytes: int
    kept_bytes: int
    fetched_bytes: int
    named_bytes: int


class LiveEntry(msgspec.Struct, frozen=True):
    """Conversations a loaded model keeps in memory: how many, their bytes, and how many bytes there may be."""

    model: str
    n_caches: int
    size_bytes: int
    cap_bytes: int


class StatusResult(Result, frozen=True, tag="status"):
    """How the node is.

    Attributes:
        live: what the loaded models keep in memory between requests; a model too busy to say is left out.
        running: a node process serves this data directory.
        store_away: why the store cannot be used at the moment; "" while it can.
        ram_only: the store is in RAM and ends with the node.
        writes: what may be written to its disk, and was written today.
        model: the model of requests that name none.
        no_model: why there is none.
        endpoint: URLs of the HTTP endpoint, each before ``/v1``.
        bulk: where bulk connections are taken, and whether they are encrypted.
        reuse_verified: models that passed ``kvnet selftest`` on this machine.
    """

    running: bool
    data_dir: str
    version: str
    publisher: str
    peer: str
    policy: str
    artifacts: int
    held_bytes: int
    quota_bytes: int
    pid: int = 0
    uptime_s: float = 0.0
    addresses: list[str] = []
    endpoint: list[str] = []
    bulk: str = ""
    peers: int = 0
    model: str = ""
    no_model: str = ""
    engines: list[str] = []
    reuse_verified: list[str] = []
    counters: dict[str, int] = {}
    store_away: str = ""
    ram_only: bool = False
    writes: WritesEntry | None = None
    live: list[LiveEntry] = []


class StopRequest(Request, frozen=True):
    """End the running node."""


class StopResult(Result, frozen=True, tag="node stop"):
    """The node was asked to end; ``pid`` is the process that goes."""

    pid: int


class PeersRequest(Request, frozen=True):
    """List connected peers, after connecting to the given addresses."""

    connect: list[str] = []


class PeerEntry(msgspec.Struct, frozen=True):
    """One connected peer.

    Attributes:
        member: it proved to share a namespace with this node.
        chunks: how chunks come from it: ``bulk``, or ``stream`` and why; "" when none have been fetched.
    """

    peer: str
    addresses: list[str]
    member: bool = False
    chunks: str = ""


class PeersResult(Result, frozen=True, tag="peers"):
    """Connected peers."""

    peers: list[PeerEntry]
    own_addresses: list[str] = []


class SelftestRequest(Request, frozen=True):
    """Prove export and restore of one model on this machine."""

    model: str | None = None


class SelftestResult(Result, frozen=True, tag="selftest"):
    """What the self test measured; ``report`` holds every single case."""

    model: str
    passed: bool
    equal_text: bool
    max_logit_difference: float
    cold_ttft_s: float
    restored_ttft_s: float
    prefix_tokens: int
    report: dict[str, Any] = {}


class CalibrateRequest(Request, frozen=True):
    """Measure what this machine does with one model."""

    model: str | None = None


class PrefillPoint(msgspec.Struct, frozen=True):
    """At ``position`` tokens, prefill runs at ``tokens_s`` tokens a second."""

    position: int
    tokens_s: float


class CodecSpeed(msgspec.Struct, frozen=True):
    """One codec here: stored bytes by raw bytes, and raw bytes decoded per second; None when it needs no decoding."""

    codec: str
    stored_share: float
    decode_bytes_s: float | None


class CalibrateResult(Result, frozen=True, tag="bench calibrate"):
    """What was measured, and what it says of links.

    Attributes:
        model: its name.
        device, versions: of what computed.
        measured: seconds since 1970.
        prefill: speed by position.
        restore_bytes_s, restore_fixed_s: raw K/V bytes restored per second, and seconds of any restore.
        codecs: each codec.
        kv_bytes_per_token: raw bytes.
        break_even: the link rate needed, by position and codec.
        seconds: the measuring took.
    """

    model: str
    device: str
    versions: str
    measured: int
    prefill: list[PrefillPoint]
    restore_bytes_s: float
    restore_fixed_s: float
    codecs: list[CodecSpeed]
    kv_bytes_per_token: int
    break_even: list[BreakEven]
    seconds: float


# --- Other programs ------------------------------------------------------------------------------------------------


class ConnectRequest(Request, frozen=True):
    """Say what another program needs to know of this node's HTTP endpoint.

    Attributes:
        model: ``MODEL`` or ``MODEL#NAME`` to use; None for the node's own choice.
    """

    model: str | None = None


class ConnectModel(msgspec.Struct, frozen=True):
    """A model of ``/v1/models``; ``window_tokens`` is None when its config does not say."""

    id: str
    window_tokens: int | None = None


class ConnectResult(Result, frozen=True, tag="connect"):
    """What another program needs to know. The token is in no result: whoever asks reads the settings for it.

    Attributes:
        url: of the endpoint, without a path.
        running: it answers now; otherwise once the node is started.
        wants_token: requests need the token.
        model: the one to use.
        models: all there are.
    """

    url: str
    running: bool
    wants_token: bool
    model: ConnectModel
    models: list[ConnectModel]


# --- What reuse has spared -----------------------------------------------------------------------------------------


class SavingsRequest(Request, frozen=True):
    """What reuse has spared."""


class SavingsSource(msgspec.Struct, frozen=True):
    """Reuse from one source: uses, tokens not computed, seconds saved net, stored bytes read or fetched."""

    uses: int
    tokens: int
    saved_s: float
    bytes: int


class SavingsEntry(msgspec.Struct, frozen=True):
    """One artifact's account; it stays when the artifact is removed.

    Attributes:
        artifact: artifact hash text; "" for caches that were still in memory, "older" for rows added up.
        name: the name it was given, or "".
        model: the model's name, or "".
        origin: "add", "conversation", "fetch", "peer" or "ram".
        tokens: tokens of the artifact; 0 when not known.
        paid_s: seconds of prefill and fetching paid ahead of its first use.
        uses: answers that continued from it.
        saved_tokens: prompt tokens not computed.
        saved_s: seconds saved, what reuse took subtracted.
        break_even_uses: after how many uses what was paid ahead is won back; None when not known.
        sources: the same by source.
        last_used: seconds since 1970, or 0.
    """

    artifact: str
    name: str
    model: str
    origin: str
    tokens: int
    paid_s: float
    uses: int
    saved_tokens: int
    saved_s: float
    break_even_uses: int | None
    sources: dict[str, SavingsSource]
    last_used: int


class SavingsResult(Result, frozen=True, tag="savings"):
    """What reuse has spared.

    Attributes:
        artifacts: the one that saved most time first.
        sources: by source.
        requests: answers noted.
        reused_requests: those that reused anything.
        prompt_tokens: tokens of all their prompts.
        saved_tokens: of these, not computed.
        saved_s: seconds saved, what reuse took subtracted.
        prefilled_tokens, prefill_s: what was still computed for answers.
        paid_s: seconds paid ahead.
        since: seconds since 1970 of the first note, or 0.
    """

    artifacts: list[SavingsEntry]
    sources: dict[str, SavingsSource]
    requests: int
    reused_requests: int
    prompt_tokens: int
    saved_tokens: int
    saved_s: float
    prefilled_tokens: int
    prefill_s: float
    paid_s: float
    since: int
