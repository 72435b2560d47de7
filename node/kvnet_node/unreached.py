"""Why an inviter was not reached: what trying its addresses came to, and what the guest does next. Pure."""

from collections.abc import Sequence

from kvnet.errors import PeerUnreachableError, elsewhere
from kvnet.network.places import LOOPBACK, host_of, port_of
from kvnet_node.network_findings import PRIVACY_PATH, privacy_blocks
from kvnet_node.operations.requests import Reach

STILL_GOOD = "the invitation is not used up by this"

_WORDS = {"refused": "nothing listens there", "timeout": "no answer", "no_route": "no way there"}


def unreached(reaches: Sequence[Reach], *, online: bool, platform: str) -> PeerUnreachableError:
    """The error for a guest whose inviter answers at none of its addresses.

    Args:
        reaches: what came of each address; at least one.
        online: this machine has an address beyond loopback.
        platform: as `sys.platform`.
    """
    tried = "; ".join(
        f"{host_of(each.address)} port {port_of(each.address)}: {_WORDS.get(each.outcome, each.detail)}"
        for each in reaches
    )
    message = f"expected the inviter at an address of the invitation, found nobody ({tried})"
    return PeerUnreachableError(message, hint=f"{_next_step(reaches, online=online, platform=platform)}; {STILL_GOOD}")


def _next_step(reaches: Sequence[Reach], *, online: bool, platform: str) -> str:
    if all(host_of(each.address).startswith(LOOPBACK) for each in reaches):
        return (
            f"the inviter listens on its own machine alone: start it there with {elsewhere('kvnet node start')}, "
            "without --listen, and have it invite again"
        )
    if not online:
        return "this machine is in no network: connect it, and join again"
    if any(privacy_blocks(platform, each) for each in reaches):
        return (
            f"macOS keeps this program off the local network: allow the terminal under {PRIVACY_PATH}, and join again"
        )
    if any(each.outcome == "refused" for each in reaches):
        return (
            f"the machine is there and no node runs at that port: {elsewhere('kvnet node start')} on it, and join "
            f"again, or have it invite again if its {elsewhere('kvnet node status')} shows another port"
        )
    if any(each.near for each in reaches):
        return (
            "both are in one network: is the other machine awake, has it another address now "
            f"({elsewhere('kvnet node status')} there), does a firewall drop TCP 5864 there? "
            f"{elsewhere('kvnet doctor --network')} on it says more"
        )
    return (
        "none of these is in this machine's networks: join from the network the other machine is in, or put both in "
        "a private one, such as Tailscale, and have it invite again"
    )
