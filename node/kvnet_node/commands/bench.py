"""``kvnet bench``: time to first token, each way beside mlx-lm alone; and what fetching is weighed against."""

import datetime as dt
import sys
from pathlib import Path
from typing import Any

from kvnet.errors import UsageError
from kvnet_node.benchmarking import FAST_LENGTHS, ROUNDS, ROWS, SLOW_LENGTHS, Measured
from kvnet_node.invocation import Context, Invocation, chosen_model, positive
from kvnet_node.operations.requests import CalibrateRequest, CalibrateResult
from kvnet_node.output import columns, format_bytes, format_count, format_counted, format_seconds, pairs
from kvnet_node.rates_text import needed_rate

MIN_PREFIX_TOKENS = 256
"""Peers are asked for whole blocks."""
MAX_PREFIX_TOKENS = 200_000


def ttft(
    *,
    prefix_tokens: list[int] | None = None,
    model: str | None = None,
    rounds: int = ROUNDS,
    context: Context,
) -> int:
    """Measure the time to first token over a shared prefix: cold, mlx-lm alone, from disk, from a peer, from nobody.

    Two nodes are started on this machine and end with the command; your own node and its files are left alone.

    Args:
        prefix_tokens: lengths of the shared prefix, about; may repeat. By default what suits this machine.
        model: name or folder of the model; by default the demo's.
        rounds: how often each is measured; medians are shown.
    """
    from kvnet_node.benchmarking import measure_ttft

    lengths = tuple(prefix_tokens or _lengths())
    for length in lengths:
        if not MIN_PREFIX_TOKENS <= length <= MAX_PREFIX_TOKENS:
            expected = f"{MIN_PREFIX_TOKENS:,} to {MAX_PREFIX_TOKENS:,}"
            raise UsageError(f"--prefix-tokens expects {expected}, found {length:,}")
    folder = _model(context, model)
    same = True
    for measured in measure_ttft(folder, lengths, positive("--rounds", rounds), context.output.message):
        same = same and measured.same_text
        _show(context, measured, folder.name)
    if not same:
        context.output.warning("the greedy texts differ between rows")
    return 0 if same else 1


def _show(context: Invocation, measured: Measured, model: str) -> None:
    def render_it(_: dict[str, Any]) -> str:
        return render(measured)

    context.output.result(measured.record(model), render_it)


def _lengths() -> tuple[int, ...]:
    from kvnet_node.demonstration import has_fast_blas

    return FAST_LENGTHS if sys.platform == "darwin" or has_fast_blas() else SLOW_LENGTHS


def _model(context: Invocation, model: str | None) -> Path:
    """The model's folder: the temporary nodes know no other names."""
    if model is None:
        from kvnet_node.demonstration import demo_model

        return demo_model(context.output.event)
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve()
    from kvnet_node.models import models_here

    for entry in models_here(context.config(), context.data_dir):
        if model in {entry.name, entry.name.rpartition("/")[2]}:
            return entry.path
    raise UsageError(f"expected a model, found none called {model!r}", hint="kvnet model list shows names")


def render(measured: Measured) -> str:
    """The rows of one length, each beside mlx-lm alone."""
    plain = measured.median_s("plain_mlx_lm_s")
    rows = []
    for row in ROWS:
        if row.key not in measured.times_s:
            continue
        times, median = measured.times_s[row.key], measured.median_s(row.key)
        spread = f"{min(times):.3f} to {max(times):.3f} s"
        rows.append((row.title, format_seconds(median), spread, f"{plain / median:.2f}"))
    peer, disk = measured.median_s("peer_s"), measured.median_s("local_store_s")
    empty_ms = 1000 * (measured.median_s("empty_network_s") - plain)
    of = f"{format_count(measured.prefix_tokens)} of {format_counted(measured.prompt_tokens, 'token')} shared"
    ratios = f"a peer is {measured.median_s('cold_s') / peer:.1f} times as soon as cold"
    ratios += f" and takes {peer / disk:.2f} times as long as disk"
    lines = [
        f"{of}, median of {format_counted(len(measured.times_s['cold_s']), 'round')}",
        columns(rows, ("FIRST TOKEN", "MEDIAN", "RANGE", "TIMES AS SOON AS MLX-LM ALONE")),
        f"{ratios}; a peer with nothing costs {empty_ms:+.0f} ms beside mlx-lm alone",
        "texts: " + ("all the same" if measured.same_text else "DIFFERENT"),
    ]
    return "\n".join(lines)


def calibrate(*, model: str | None = None, context: Context) -> None:
    """Measure what fetching is weighed against: prefill speed by position, restoring, and decoding of each codec.

    It takes some seconds, in which the model should have nothing else to do. What is found is kept in the data
    directory; from then on requests for this model fetch only what comes sooner than it is computed.

    Args:
        model: name or folder of the model; by default model.default, else the only shareable one.
    """
    result = context.run("bench calibrate", CalibrateRequest(chosen_model(context, model)), CalibrateResult)
    context.output.result(result, render_calibration)


def render_calibration(found: CalibrateResult) -> str:
    """What was measured, and the link rate that each position takes."""
    from kvnet_node.calibrating import MAX_TOKENS, PREFILL_S

    date = dt.datetime.fromtimestamp(found.measured).astimezone().isoformat(sep=" ", timespec="minutes")
    most = f"for about {PREFILL_S:.0f} s, two steps at least, {format_count(MAX_TOKENS)} tokens at most"
    last = max(point.position for point in found.prefill)
    head = pairs(
        [
            ("model", f"{found.model}, {format_bytes(found.kv_bytes_per_token)} of K/V a token"),
            ("device", f"{found.device} ({found.versions})"),
            ("measured", f"{date}, in {format_seconds(found.seconds)}"),
            ("prefill", f"measured {most}; here up to token {format_count(last)}"),
            ("restore", f"{_rate(found.restore_bytes_s)}, and {found.restore_fixed_s * 1000:,.1f} ms each time"),
        ]
    )
    prefill = columns(
        [(format_count(point.position), f"{point.tokens_s:,.0f}") for point in found.prefill],
        ("AT TOKEN", "PREFILL TOKENS/S"),
    )
    codecs = columns(
        [
            (
                each.codec,
                f"{each.stored_share:.2f}",
                _rate(each.decode_bytes_s) if each.decode_bytes_s else "nothing to do",
            )
            for each in found.codecs
        ],
        ("CODEC", "STORED/RAW", "DECODES"),
    )
    needed = columns(
        [
            (format_count(each.position), each.codec, needed_rate(each, "none is fast enough"))
            for each in found.break_even
        ],
        ("AT TOKEN", "CODEC", "FETCHING PAYS FROM"),
    )
    return f"{head}\n\n{prefill}\n\n{codecs}\n\n{needed}"


def _rate(bytes_s: float) -> str:
    return f"{format_bytes(int(bytes_s))}/s"
