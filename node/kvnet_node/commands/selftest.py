"""``kvnet selftest``: what the owner of a new machine runs first."""

from kvnet_node.invocation import Context, chosen_model
from kvnet_node.operations.requests import SelftestRequest, SelftestResult
from kvnet_node.output import format_count, format_seconds, pairs


def selftest(*, model: str | None = None, report: bool = False, context: Context) -> int:
    """Prove export and restore of one model on this machine: prefill, export, new process, restore, decode.

    Args:
        model: name or folder of the model; by default model.default, else the only shareable one.
        report: print every case.
    """
    result = context.run("selftest", SelftestRequest(chosen_model(context, model)), SelftestResult)

    def render(done: SelftestResult) -> str:
        items = [
            ("model", done.model),
            ("result", f"{'passed' if done.passed else 'FAILED'}: {done.report.get('finding', '')}"),
            ("same text", "yes" if done.equal_text else "NO"),
            ("largest logit difference", f"{done.max_logit_difference:.3g}"),
            ("prefix", f"{format_count(done.prefix_tokens)} tokens"),
            ("first token, cold", format_seconds(done.cold_ttft_s)),
            ("first token, restored", format_seconds(done.restored_ttft_s)),
        ]
        if report:
            items += [(name, str(value)) for name, value in done.report.items()]
        return pairs(items)

    context.output.result(result, render)
    return 0 if result.passed else 80
