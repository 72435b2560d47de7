"""What this machine does with each model: what estimates, lookup deadlines and plans are made from.

Ordinary requests measure one prefill speed. ``kvnet bench calibrate`` measures more: prefill by position, restoring and
decoding. Neither says anything about prompts.
"""

from pathlib import Path
from typing import TypeVar

import msgspec

from kvnet.engine.interface import ModelInfo
from kvnet.format.codecs import Codec
from kvnet.protocol.speeds import Machine, PrefillSpeed, SpeedPoint
from kvnet_node.paths import keep_private, note_private

T = TypeVar("T")

MIN_TOKENS = 64
"""Shorter prefills say more about overhead than about speed."""

NEWEST_SHARE = 0.5
"""Weight of the newest measurement against what was known before."""

ASSUMED_RESTORE_BYTES_S = 1e9
"""Raw K/V restored per second until it was measured: less than any machine was found to do from memory."""


class Point(msgspec.Struct, frozen=True):
    """At ``position`` tokens, prefill runs at ``tokens_s``."""

    position: int
    tokens_s: float


class Calibration(msgspec.Struct, frozen=True):
    """What ``kvnet bench calibrate`` measured for one model on this machine.

    Attributes:
        model: the model's name; a label.
        fingerprint: hex of the fingerprint's hash.
        device: the producer's device; on another one it does not count.
        versions: the producer's versions.
        measured: seconds since 1970.
        prefill: speed by position, ascending.
        restore_bytes_s: raw K/V bytes restored per second.
        restore_fixed_s: seconds of any restore.
        decode_bytes_s: raw bytes decoded per second, by codec; a codec that needs no decoding is not in it.
        kv_bytes_per_token: raw bytes.
        stored_shares: stored bytes by raw bytes, by codec.
    """

    model: str
    fingerprint: str
    device: str
    versions: str
    measured: int
    prefill: list[Point]
    restore_bytes_s: float
    restore_fixed_s: float
    decode_bytes_s: dict[str, float]
    kv_bytes_per_token: int
    stored_shares: dict[str, float] = {}

    def machine(self) -> Machine:
        """The same for planning.

        Raises:
            ValueError: figures that nothing measured.
        """
        if self.restore_bytes_s <= 0:
            raise ValueError("expected a restore rate above 0")
        known = {codec.value: codec for codec in Codec}
        return Machine(
            PrefillSpeed(SpeedPoint(point.position, point.tokens_s) for point in self.prefill),
            self.restore_bytes_s,
            self.restore_fixed_s,
            {known[name]: rate for name, rate in self.decode_bytes_s.items() if name in known and rate > 0},
        )


class Speeds:
    """What was measured, by model.

    Args:
        file: where prefill speeds of ordinary requests are kept, by model folder; a missing or broken one is empty.
        calibrations_file: where calibrations are kept, by fingerprint; the same.
    """

    def __init__(self, file: Path, calibrations_file: Path) -> None:
        self._file = file
        self._calibrations_file = calibrations_file
        self._known = _read(file, dict[str, float])
        self._calibrations = read_calibrations(calibrations_file)

    def prefill_tokens_s(self, model: Path) -> float:
        """The speed known for a model; 0 when it was never measured."""
        return self._known.get(str(model), 0.0)

    def note(self, model: Path, n_tokens: int, seconds: float) -> None:
        """A prefill of ``n_tokens`` took ``seconds``."""
        if n_tokens < MIN_TOKENS or seconds <= 0:
            return
        speed = n_tokens / seconds
        before = self._known.get(str(model), speed)
        self._known[str(model)] = NEWEST_SHARE * speed + (1 - NEWEST_SHARE) * before
        note_private(self._file, msgspec.json.encode(self._known))

    def calibration(self, info: ModelInfo) -> Calibration | None:
        """The calibration of a model on this device; ``None`` when there is none."""
        if info.fingerprint is None:
            return None
        found = self._calibrations.get(info.fingerprint.hash.hex())
        return found if found is not None and found.device == info.producer.device else None

    def calibrated(self, calibration: Calibration) -> None:
        """Keep a calibration; it takes the place of the model's last one."""
        self._calibrations[calibration.fingerprint] = calibration
        keep_private(self._calibrations_file, msgspec.json.format(msgspec.json.encode(self._calibrations)))

    def machine(self, info: ModelInfo) -> Machine | None:
        """What this machine does with a model: calibrated, else from ordinary requests, else ``None``."""
        calibration = self.calibration(info)
        if calibration is not None:
            try:
                return calibration.machine()
            except ValueError:
                pass
        tokens_s = self.prefill_tokens_s(info.path)
        if not tokens_s or info.fingerprint is None:
            return None
        return Machine(PrefillSpeed([SpeedPoint(0, tokens_s)]), ASSUMED_RESTORE_BYTES_S, calibrated=False)


def read_calibrations(file: Path) -> dict[str, Calibration]:
    """The calibrations kept in a file, by fingerprint; a missing or broken one is empty."""
    return _read(file, dict[str, Calibration])


def _read(file: Path, kind: type[dict[str, T]]) -> dict[str, T]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (FileNotFoundError, msgspec.DecodeError):
        return {}
