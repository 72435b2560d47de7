"""``kvnet share`` and ``kvnet publish``: let others read what is yours, by name."""

from kvnet.errors import UsageError, elsewhere
from kvnet_node.confirming import confirm, require_terminal
from kvnet_node.invocation import Context, Invocation
from kvnet_node.operations.requests import ShareRequest, ShareResult
from kvnet_node.output import format_bytes, format_count, format_counted


def share(artifact: str, /, *, to: str, context: Context) -> None:
    """Let the members of a swarm find and read an artifact; what is in mine stays there too.

    Args:
        artifact: NAME, NAME@VERSION, or a full or short hash.
        to: the swarm.
    """
    if to == "public":
        # The same operation, without its question.
        raise UsageError(
            "expected the name of a swarm, found public, which is everybody",
            hint=f"kvnet publish {artifact} asks before it does that",
        )
    result = context.run("share", ShareRequest(artifact, to), ShareResult)
    context.output.result(result, lambda shared: "\n".join(shared.artifacts))
    state = "was shared with" if result.existed else "is shared with"
    context.output.message(
        f"{artifact} {state} {result.swarm}: {_readers(result)} can read {_what(result)}\n"
        f"a member fetches it with: {elsewhere('kvnet fetch')} {_how(result)}\n"
        f"kvnet rm {result.artifacts[0]} offers it no longer; what members have fetched they keep"
    )
    if result.strangers:
        context.output.warning(
            f"members of {result.swarm} do not know {', '.join(result.strangers)}, who computed some of it, and will "
            "not use it: share it from that machine, or invite that machine too"
        )


def _how(result: ShareResult) -> str:
    """What a member types: the name it was told, else the ticket."""
    unnamed = f"{result.ticket or result.artifacts[0]} --name NAME"
    return f"{result.name}, which its {elsewhere('kvnet list --peers')} shows; or {unnamed}" if result.name else unnamed


def _readers(result: ShareResult) -> str:
    others = format_counted(result.members, "other member")
    if result.members:
        return others
    return f"whoever joins it (nobody has yet; kvnet invite --colleague --swarm {result.swarm} lets somebody in)"


def publish(artifact: str, /, *, yes: bool = False, context: Context) -> None:
    """Let everybody find and read an artifact. Asks first; it cannot be taken back.

    Args:
        artifact: NAME, NAME@VERSION, or a full or short hash.
        yes: do not ask.
    """
    if not yes:
        _confirm(context, artifact)
    result = context.run("share", ShareRequest(artifact, "public"), ShareResult)
    context.output.result(result, lambda shared: "\n".join(shared.artifacts))
    state = "was public before" if result.existed else "is public now"
    context.output.message(
        f"{artifact} {state}: anybody who connects to this node can read {_what(result)}\n"
        f"whoever trusts your key uses it; fetched with: "
        f"{elsewhere('kvnet fetch')} {result.ticket or result.artifacts[0]}"
    )


def _confirm(context: Invocation, artifact: str) -> None:
    require_terminal("what becomes public", f"kvnet publish {artifact} --yes")
    seen = context.run("share", ShareRequest(artifact, "public", dry_run=True), ShareResult)
    question = (
        f"{artifact} becomes readable by everybody: {_what(seen)}.\n"
        "That is the text itself: K/V can be turned back into it. Who has fetched it keeps it; nothing takes it back.\n"
        "Publish it?"
    )
    confirm(context, question, "not published")


def _what(result: ShareResult) -> str:
    messages = ", its files or messages as text," if result.has_context else ""
    return f"its {format_count(result.tokens)} tokens{messages} and their K/V ({format_bytes(result.bytes)})"
