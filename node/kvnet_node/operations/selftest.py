"""The self test as an operation: run it, and remember that it passed on this machine."""

import datetime as dt

import msgspec

from kvnet_node.operations.context import OperationContext
from kvnet_node.operations.requests import SelftestRequest, SelftestResult
from kvnet_node.paths import write_private


async def selftest(context: OperationContext, request: SelftestRequest) -> SelftestResult:
    """Prove export and restore of one model on this machine."""
    from kvnet.engine.selftest import run_selftest

    services = context.services
    model = await services.engines.choose(request.model)
    work_dir = services.engines.prepare_work_dir()
    report = await run_selftest(model.path, work_dir, digest_cache=services.engines.digest_cache, progress=context.note)
    services.speeds.note(model.path, report.n_tokens, report.cold_ttft_s)
    if report.passed:
        _remember(context, model.name)
    return SelftestResult(
        model=model.name,
        passed=report.passed,
        equal_text=report.same_text,
        max_logit_difference=report.max_logit_difference,
        cold_ttft_s=report.cold_ttft_s,
        restored_ttft_s=report.restored_ttft_s,
        prefix_tokens=report.n_tokens,
        report={
            "finding": report.finding,
            "exact": report.exact,
            "export_s": report.export_s,
            "size_bytes": report.size_bytes,
            "ttft_ratio": report.cold_ttft_s / report.restored_ttft_s if report.restored_ttft_s else 0.0,
            "runtime": report.model.producer.runtime,
            "versions": report.model.producer.versions,
            "device": report.model.producer.device,
            "system": report.model.producer.system,
            "prefill_step": report.model.producer.prefill_step,
            "kv_bytes_per_token": report.model.kv_bytes_per_token,
        },
    )


def _remember(context: OperationContext, model: str) -> None:
    file = context.services.paths.verified_file
    try:
        verified = msgspec.json.decode(file.read_bytes(), type=dict[str, str])
    except (FileNotFoundError, msgspec.DecodeError):
        verified = {}
    verified[model] = dt.datetime.now(tz=dt.UTC).date().isoformat()
    write_private(file, msgspec.json.encode(verified))
