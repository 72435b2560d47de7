"""Named contexts, generation and fetching: requests and results."""

from typing import Any

import msgspec

from kvnet_node.operations.requests.base import Request, Result


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
        no_reuse: compute everything: look nothing up, here or at peers.
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
        no_reuse: compute everything: look nothing up, here or at peers.
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
        peer_name: what that peer is called; "" when it is no member.
        signer_name: what the signer is called; "" when that is not known.
    """

    source: str
    tokens: int
    bytes: int
    seconds: float
    peer: str = ""
    signer: str = ""
    artifact: str = ""
    peer_name: str = ""
    signer_name: str = ""

    @property
    def signed_by(self) -> str:
        """The signer's name, else its publisher id."""
        return self.signer_name or self.signer


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
        waited_s: about how long it waited for the engine, which ends the step it is in before it begins another one.
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
    waited_s: float = 0.0


class AskResult(GenerateResult, frozen=True, tag="ask"):
    """A finished answer; the fields of ``GenerateResult``."""


class FetchRequest(Request, frozen=True):
    """Fetch an artifact.

    Attributes:
        target: artifact hash or ticket, or what a member calls it: NAME, or NAME@3.
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
        name: what the machine is called; "" when it is no member.
    """

    peer: str
    address: str
    bytes: int
    chunks: int
    seconds: float = 0.0
    rate_bytes_s: float = 0.0
    path: str = ""
    dropped: str = ""
    name: str = ""


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
        resumed_chunks: chunks that an earlier fetch of it had brought; this and the next two are 0 when there was
            nothing to fetch.
        shared_chunks: chunks that were here as part of other artifacts.
        meanwhile_chunks: chunks that came for prompts while it was under way.
        model: what the model it was computed with is called, by this node or a peer; "" when nobody says.
        model_here: "yes", "no", or, while models are here that were never loaded, "likely" when one of them is called
            as the needed one, else "perhaps".
        signer_name: what the signer is called; "" when that is not known.
        suggested: where it has no name here and can have one, what its signer calls it, else "NAME"; otherwise "".
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
    shared_chunks: int = 0
    meanwhile_chunks: int = 0
    model: str = ""
    model_here: str = "yes"
    signer_name: str = ""
    suggested: str = ""
