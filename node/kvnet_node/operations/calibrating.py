"""Calibrating as an operation: measure a model, remember it, and say from which link on fetching pays."""

import math
import time
from collections.abc import Iterable, Mapping

import structlog

from kvnet.protocol.cost import break_even_bytes_s
from kvnet.protocol.speeds import Machine
from kvnet_node.calibrating import PREFILL_S, finite
from kvnet_node.calibrating import calibrate as measure
from kvnet_node.operations import requests as r
from kvnet_node.operations.context import OperationContext
from kvnet_node.speeds import Calibration

POSITIONS = (0, 1024, 4096, 16_384, 65_536)
"""Where break-even rates are given; beyond the window there are none."""

_log = structlog.get_logger(__name__)


async def calibrate(ctx: OperationContext, request: r.CalibrateRequest) -> r.CalibrateResult:
    """Measure one model on this machine, and keep what was found for plans to come."""
    services = ctx.services
    began_s = time.monotonic()

    def say(stage: str, done: int, total: int) -> None:
        if stage == "prefill":
            # It ends with the time, not with the tokens: a share of them, and how long the rest takes, mean nothing.
            ctx.progress(stage, done, unit="tokens", text=f"as far as {PREFILL_S:.0f} s suffice, two steps at least")
        else:
            ctx.progress(stage, done, total, unit="tokens")

    async with services.engines.use(request.model, ctx.loading) as engine:
        found = await measure(engine, services.engines.prepare_work_dir(), now_s=int(time.time()), say=say)
        window_tokens = engine.info.window_tokens
    services.speeds.calibrated(found)
    _log.info("calibrated", model=found.model)
    return result(found, window_tokens, time.monotonic() - began_s)


def result(found: Calibration, window_tokens: int, seconds: float) -> r.CalibrateResult:
    """A calibration as a result."""
    return r.CalibrateResult(
        model=found.model,
        device=found.device,
        versions=found.versions,
        measured=found.measured,
        prefill=[r.PrefillPoint(point.position, point.tokens_s) for point in found.prefill],
        restore_bytes_s=found.restore_bytes_s,
        restore_fixed_s=found.restore_fixed_s,
        codecs=[
            r.CodecSpeed(codec, share, found.decode_bytes_s.get(codec)) for codec, share in found.stored_shares.items()
        ],
        kv_bytes_per_token=found.kv_bytes_per_token,
        break_even=break_even(
            found.machine(), found.kv_bytes_per_token, found.stored_shares, positions_in(window_tokens)
        ),
        seconds=seconds,
    )


def break_even(
    machine: Machine, kv_bytes_per_token: int, shares: Mapping[str, float], positions: Iterable[int]
) -> list[r.BreakEven]:
    """The link rate that each position and codec takes.

    Args:
        machine: what it can do.
        kv_bytes_per_token: raw bytes.
        shares: stored bytes by raw bytes, by codec.
        positions: in the prompt.
    """
    last = machine.prefill.last_position
    decode_bytes_s = {codec.value: rate for codec, rate in machine.decode_bytes_s.items()}
    return [
        r.BreakEven(
            position,
            codec,
            finite(
                break_even_bytes_s(
                    machine,
                    kv_bytes_per_token * share,
                    position,
                    raw_bytes_per_token=kv_bytes_per_token,
                    decode_bytes_s=decode_bytes_s.get(codec, math.inf),
                )
            ),
            last if position > last else 0,
        )
        for codec, share in shares.items()
        for position in positions
    ]


def positions_in(window_tokens: int) -> list[int]:
    """Those of ``POSITIONS`` that a model's window reaches; all when it is unknown."""
    return [position for position in POSITIONS if position < (window_tokens or math.inf)]
