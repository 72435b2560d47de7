"""What only the system knows of the network: its firewall, and whether the router answers. macOS; elsewhere nothing."""

import platform
import re
import subprocess

LIMIT_S = 3.0

FIREWALL = ("/usr/libexec/ApplicationFirewall/socketfilterfw", "--getglobalstate")
_STATE = re.compile(r"State = (\d)")
_GATEWAY = re.compile(r"^\s*gateway: (\d+\.\d+\.\d+\.\d+)$", re.MULTILINE)


def firewall_state() -> str:
    """Whether the application firewall of macOS is ``on`` or ``off``; "" when that is not known."""
    return parse_firewall(_output(FIREWALL)) if platform.system() == "Darwin" else ""


def parse_firewall(text: str) -> str:
    """``on`` or ``off`` from what ``socketfilterfw --getglobalstate`` prints; "" from anything else."""
    found = _STATE.search(text)
    return "" if found is None else "off" if found[1] == "0" else "on"


def gateway_answers() -> bool | None:
    """Whether the router answers a ping of the system's own program, which Local Network Privacy does not concern."""
    if platform.system() != "Darwin":
        return None
    gateway = parse_gateway(_output(("route", "-n", "get", "default")))
    return None if gateway is None else "1 packets received" in _output(("ping", "-c", "1", "-t", "1", gateway))


def parse_gateway(text: str) -> str | None:
    """The router's IPv4 address from what ``route -n get default`` prints."""
    found = _GATEWAY.search(text)
    return found[1] if found else None


def _output(command: tuple[str, ...]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
