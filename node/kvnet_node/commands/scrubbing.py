"""``kvnet store scrub``."""

from kvnet.errors import IntegrityError
from kvnet_node.invocation import Context
from kvnet_node.operations.requests import ScrubRequest, ScrubResult
from kvnet_node.output import format_bytes, format_count, format_counted, format_seconds


def scrub(*, context: Context) -> int:
    """Re-hash what is held, and fetch again what went bad; exits with 20 when something stays damaged.

    A running node does this by itself once a week (settings store.scrub_interval_s and store.scrub_bytes_s).
    """

    def render(result: ScrubResult) -> str:
        lines = [f"repaired from peers: {artifact}" for artifact in result.repaired]
        lines += [f"damaged: {artifact}" for artifact in result.damaged]
        lines.append(
            f"{format_counted(result.artifacts, 'artifact')}, {format_counted(result.chunks, 'chunk')}, "
            f"{format_bytes(result.bytes)} in {format_seconds(result.seconds)}: {format_count(result.bad_chunks)} bad"
        )
        return "\n".join(lines)

    result = context.run("store scrub", ScrubRequest(), ScrubResult)
    context.output.result(result, render)
    for artifact in result.damaged:
        context.output.message(
            f"no peer here has {artifact} whole; kvnet add of the same files computes it again, kvnet rm lets it go"
        )
    return IntegrityError.exit_code if result.damaged else 0
