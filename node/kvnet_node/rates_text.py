"""What is said of a link rate that fetching takes."""

from kvnet_node.operations.requests import BreakEven
from kvnet_node.output import format_bytes, format_count


def needed_rate(needed: BreakEven, none: str) -> str:
    """The rate in words, and whether it rests on a prefill that was not measured so far into a prompt.

    Args:
        needed: the rate.
        none: what is said when no rate is enough.
    """
    rate = f"{format_bytes(int(needed.bytes_s))}/s" if needed.bytes_s else none
    beyond = f" (prefill not measured beyond {format_count(needed.measured_to)})" if needed.measured_to else ""
    return rate + beyond
