"""Whether the link is metered.

On Linux NetworkManager knows, and systemd's bus tool asks it. macOS has Low Data Mode, which programs learn of from
Apple's Network framework alone; no tool prints it, so its owner says it: ``guest.metered = "yes"``.
"""

import shutil
import sys

from kvnet_node.guest.power import run_tool

_NETWORK_MANAGER = "org.freedesktop.NetworkManager"
_ANSWERS = {"v u 1": True, "v u 3": True, "v u 2": False, "v u 4": False}
"""NetworkManager's NMMetered: yes, guessed yes, no, guessed no; 0 is unknown."""


def metered(setting: str) -> bool | None:
    """Whether the link is metered; None when nobody can say. Runs a tool: not for the loop.

    Args:
        setting: ``auto``, ``yes`` or ``no``.
    """
    if setting != "auto":
        return setting == "yes"
    if sys.platform == "darwin" or (tool := shutil.which("busctl")) is None:
        return None
    path = "/" + _NETWORK_MANAGER.replace(".", "/")
    # A call and not `get-property`, which would start a NetworkManager that its owner does not use.
    call = [tool, "--auto-start=no", "call", _NETWORK_MANAGER, path, "org.freedesktop.DBus.Properties", "Get", "ss"]
    return parse_busctl(run_tool([*call, _NETWORK_MANAGER, "Metered"]))


def parse_busctl(text: str) -> bool | None:
    """What NetworkManager says of the main connection."""
    return _ANSWERS.get(text.strip())
