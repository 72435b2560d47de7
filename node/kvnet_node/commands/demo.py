"""``kvnet demo``: two nodes on this machine, one document, three answers."""

from pathlib import Path

from kvnet.errors import UsageError
from kvnet_node.demonstration import DEMO_QUESTION, DemoPlan, DemoResult
from kvnet_node.invocation import Context, Invocation
from kvnet_node.output import escape, format_bytes, format_count, format_seconds, pairs

MAX_DOCUMENT_BYTES = 1_000_000


def demo(
    *,
    document: Path | None = None,
    question: str | None = None,
    quick: bool = False,
    context: Context,
) -> int:
    """Show it all with two nodes on this machine: cold, from the other node, and from the own disk.

    Args:
        document: a text file of your own instead of the one that comes with the demo; needs --question.
        question: what to ask about it; needs --document.
        quick: use about 256 tokens.
    """
    from kvnet_node import demonstration

    plan = _plan(context, document, question, quick=quick)
    if plan.note:
        context.output.message(plan.note)
    result = demonstration.run_demo(plan, context.output.message, context.output.event)
    context.output.result(result, _render)
    context.output.message(f"try the model on your own files: kvnet add PATH --name NAME --model {plan.model.name}")
    missing = demonstration.failures(result)
    for failure in missing:
        context.output.warning(failure)
    return 1 if missing else 0


def _plan(context: Invocation, document: Path | None, question: str | None, *, quick: bool) -> DemoPlan:
    from kvnet_node import demonstration

    if (document is None) != (question is None):
        raise UsageError("kvnet demo expects --document and --question together, or neither")
    text = _read(document) if document else demonstration.demo_document()
    note = ""
    if quick:
        text = demonstration.cut(text, demonstration.QUICK_TOKENS)
    elif not demonstration.has_fast_blas():
        text = demonstration.cut(text, demonstration.SLOW_TOKENS)
        note = (
            f"without OpenBLAS prefill is slow here: about {demonstration.SLOW_TOKENS} tokens are used; "
            "on Debian: sudo apt-get install libopenblas0-pthread"
        )
    model = demonstration.demo_model(context.output.event)
    return DemoPlan(model, text, question or DEMO_QUESTION, note)


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--document expects a UTF-8 text file: {path}: {error}") from error
    if not text.strip() or len(data) > MAX_DOCUMENT_BYTES:
        raise UsageError(f"--document expects 1 to {MAX_DOCUMENT_BYTES:,} bytes of text, found {len(data):,} in {path}")
    return text


def _render(result: DemoResult) -> str:
    fetched = f"{format_count(result.fetched_tokens)} of {format_count(result.prefix_tokens)} tokens"
    answer = escape(result.text_cold.strip(), keep_newlines=True)
    items = [
        ("artifact", result.artifact),
        ("signed by", result.signer),
        ("fetched from A", f"{fetched}, {format_bytes(result.fetched_bytes)}"),
        ("first token, cold", format_seconds(result.cold_ttft_s)),
        ("first token, from A", f"{format_seconds(result.peer_ttft_s)}  {result.ttft_ratio:.1f} times sooner"),
        ("first token, from disk", f"{format_seconds(result.disk_ttft_s)}  {result.disk_ratio:.1f} times sooner"),
        ("texts", "all three equal" if result.same_text else "DIFFERENT"),
    ]
    return f"{answer}\n\n{pairs(items)}"
