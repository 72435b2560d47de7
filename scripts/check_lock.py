"""Check that the lock holds: pinned, hashed, naming no registry, and installable from wheels where it must be.

Two parts:

1. What the files say (needs no network): every line is ``name==version ; marker`` with SHA-256 hashes and nothing
   else; the two dependency files agree; every requirement of ``pyproject.toml`` is met by what is pinned.
2. What a resolver says: uv plans an installation for every supported platform and Python from the pinned hashes.
   Only the packages in ``SOURCES`` may come without a wheel. It asks uv's cache first and the registry if need be.

Run ``python scripts/check_lock.py`` for both, ``--static`` for the first part alone.
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.markers import Marker, default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
RUNTIME, DEV, BUILD, MODEL = "runtime.txt", "dev.txt", "build.txt", "demo-model.txt"
PYTHONS = ("3.11", "3.12")
PIN = re.compile(
    r"(?P<name>[a-z0-9][a-z0-9.-]*)==(?P<version>[0-9][0-9a-z.!+]*)(?P<marker> ; [^\\]+?)?"
    r"(?P<hashes>(?: --hash=sha256:[0-9a-f]{64})+)"
)


@dataclass(frozen=True, slots=True)
class Platform:
    """One platform that the lock must install on, and the packages that may come as source there."""

    name: str
    uv_platform: str
    sys_platform: str
    machine: str
    sources: tuple[str, ...]
    environment: Mapping[str, str]


# varint and python-baseconv are pure Python and were never published as wheels; fastecdsa has wheels for macOS only.
SOURCES = ("varint", "python-baseconv")
PLATFORMS = (
    Platform(
        "macOS 14 arm64", "aarch64-apple-darwin", "darwin", "arm64", SOURCES, {"MACOSX_DEPLOYMENT_TARGET": "14.0"}
    ),
    Platform("Linux x86_64", "x86_64-manylinux_2_36", "linux", "x86_64", (*SOURCES, "fastecdsa"), {}),
    Platform("Linux aarch64", "aarch64-manylinux_2_36", "linux", "aarch64", (*SOURCES, "fastecdsa"), {}),
)


@dataclass(frozen=True, slots=True)
class Pin:
    """One line of a lock file."""

    name: str
    version: str
    marker: str

    def applies(self, environment: Mapping[str, str]) -> bool:
        """Whether this line counts in an environment (PEP 508 marker variables)."""
        return not self.marker or Marker(self.marker).evaluate(dict(environment))


def logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (number of its first line, text) of each line, continuations joined and comment lines left out."""
    parts: list[str] = []
    start = 0
    for number, line in enumerate(text.splitlines(), 1):
        if not parts:
            start = number
        stripped = line.strip()
        if not parts and (not stripped or stripped.startswith("#")):
            continue
        parts.append(stripped.removesuffix("\\").strip())
        if not stripped.endswith("\\"):
            yield start, " ".join(parts)
            parts = []
    if parts:
        yield start, " ".join(parts)


def parse_lock(text: str, name: str) -> tuple[list[Pin], list[str]]:
    """Return the pins of one lock file and what is wrong with its lines."""
    pins, problems = [], []
    for number, line in logical_lines(text):
        match = PIN.fullmatch(line)
        if match is None:
            problems.append(f"{name}:{number}: expected name==version with hashes only, found: {line[:80]}")
        else:
            pins.append(Pin(match["name"], match["version"], (match["marker"] or "").removeprefix(" ; ")))
    return pins, problems


def marker_environments() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (label, PEP 508 environment) for every supported platform and Python."""
    for platform in PLATFORMS:
        for python in PYTHONS:
            environment = {key: str(value) for key, value in default_environment().items()}
            environment |= {
                "sys_platform": platform.sys_platform,
                "platform_system": "Darwin" if platform.sys_platform == "darwin" else "Linux",
                "platform_machine": platform.machine,
                "os_name": "posix",
                "python_version": python,
                "python_full_version": f"{python}.9",
                "implementation_name": "cpython",
                "platform_python_implementation": "CPython",
                "extra": "",
            }
            yield f"{platform.name}, Python {python}", environment


def unmet(wanted: list[str], pins: list[Pin], name: str) -> list[str]:
    """Say which requirements (PEP 508 text) the pins do not meet, or meet more than once, on some platform."""
    problems = []
    for text in wanted:
        requirement = Requirement(text)
        for label, environment in marker_environments():
            if requirement.marker and not requirement.marker.evaluate(environment):
                continue
            found = [
                pin.version
                for pin in pins
                if pin.name == canonicalize_name(requirement.name) and pin.applies(environment)
            ]
            if len(found) != 1 or not requirement.specifier.contains(found[0], prereleases=True):
                problems.append(f"{name}: expected one pin for {text} on {label}, found {found or 'none'}")
    return problems


def disagreements(runtime: list[Pin], dev: list[Pin]) -> list[str]:
    """Say which runtime pins the development lock does not repeat exactly."""
    known = set(dev)
    return [f"{DEV}: expected {pin.name}=={pin.version} as in {RUNTIME}" for pin in runtime if pin not in known]


def group(project: Mapping[str, Any], name: str) -> list[str]:
    """Return the requirements of a dependency group, included groups left out."""
    return [entry for entry in project["dependency-groups"][name] if isinstance(entry, str)]


def check_files(root: Path) -> list[str]:
    """Check what the lock files say; needs no network."""
    project = tomllib.loads((root / "pyproject.toml").read_text())
    pins: dict[str, list[Pin]] = {}
    problems: list[str] = []
    for name in (RUNTIME, DEV, BUILD, MODEL):
        pins[name], wrong = parse_lock((root / "requirements" / name).read_text(), name)
        problems += wrong
    runtime = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["cpu"]
    problems += unmet(runtime, pins[RUNTIME], RUNTIME)
    problems += unmet([*group(project, "test"), *group(project, "lint")], pins[DEV], DEV)
    problems += unmet([*group(project, "build"), *project["build-system"]["requires"]], pins[BUILD], BUILD)
    problems += unmet((root / "requirements/demo-model.in").read_text().split(), pins[MODEL], MODEL)
    problems += disagreements(pins[RUNTIME], pins[DEV])
    return problems


def plan(lock: Path, platform: Platform, python: str, *, offline: bool) -> str:
    """Let uv plan an installation; return what it found wrong, or nothing."""
    uv = Path(sys.executable).with_name("uv")
    command = [str(uv), "pip", "install", "--dry-run", "--no-config", "--quiet", "--require-hashes", "--no-deps"]
    command += ["--python-platform", platform.uv_platform, "--python-version", python, "--only-binary", ":all:"]
    for source in platform.sources:
        command += ["--no-binary", source]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("UV_")}
    with tempfile.TemporaryDirectory() as target:
        command += ["--target", target, "--requirements", str(lock), *(["--offline"] if offline else [])]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment | dict(platform.environment)
        )
    return "" if done.returncode == 0 else done.stderr.strip()


def check_plans(root: Path) -> list[str]:
    """Check that every supported platform and Python can install the lock."""
    problems = []
    for platform in PLATFORMS:
        for python in PYTHONS:
            lock = root / "requirements" / DEV
            wrong = plan(lock, platform, python, offline=True) and plan(lock, platform, python, offline=False)
            print(f"check_lock: {platform.name}, Python {python}: {'no' if wrong else 'yes'}")
            if wrong:
                problems.append(f"{DEV}: does not install on {platform.name} with Python {python}:\n{wrong}")
    return problems


def main(arguments: list[str]) -> int:
    """Run the checks and print what is wrong."""
    problems = check_files(ROOT)
    if not problems and "--static" not in arguments:
        problems = check_plans(ROOT)
    for problem in problems:
        print(f"check_lock: {problem}", file=sys.stderr)
    if problems:
        print("check_lock: next: make lock, then look at what changed", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
