"""``kvnet revoke``: have an artifact, or a key with all it signed, used and served no more."""

from kvnet_node.confirming import confirm, require_terminal
from kvnet_node.invocation import Context, Invocation
from kvnet_node.operations.requests import RevokeRequest, RevokeResult
from kvnet_node.output import format_counted


def revoke(target: str, /, *, reason: str = "", guests: bool = False, yes: bool = False, context: Context) -> None:
    """Have an artifact or a key used and served no more, by all who believe you. Asks first: there is no way back.

    Artifacts: those you have signed, and what was derived from them. Keys: older ones of yours, those of your other
    machines, of members of swarms you have made, and for your own machines those of anybody you trust. A machine whose
    key is revoked is removed from mine and from swarms you have made: it fetches nothing more from their members.

    Args:
        target: NAME, NAME@VERSION, a full or short hash; or a publisher, as kvnet key list shows it.
        reason: in a few words; members read it.
        guests: of a key: remove whom its machine has let in as well, and whom those have.
        yes: do not ask.
    """
    if not yes:
        _confirm(context, target, reason, guests=guests)
    result = context.run("revoke", RevokeRequest(target, reason, guests=guests), RevokeResult)
    context.output.result(result, lambda revoked: "\n".join(revoked.targets))
    told = f"told {format_counted(result.told, 'connected member')}; " if result.told else ""
    context.output.message(
        f"revoked: it counts for {result.whom}\n"
        f"{format_counted(result.held, 'artifact')} here used and served no more, and kept: kvnet rm removes them\n"
        f"{told}members of {', '.join(result.scopes)} hear of it when they next connect to one who knows"
        f"{_seats_text(result)}"
    )


def _seats_text(result: RevokeResult) -> str:
    """Where the key's machine was a member, and where it is one still."""
    lines = []
    if result.removed_from:
        asleep = f"; asleep, and follow when they wake: {', '.join(result.asleep)}" if result.asleep else ""
        lines.append(
            f"removed from {' and '.join(result.removed_from)}: it can find and fetch nothing there any more{asleep}"
        )
    if result.let_in:
        lines.append(let_in_text(result.let_in))
    lines += [f"STILL A MEMBER of {each}" for each in result.still_in]
    return "".join(f"\n{line}" for line in lines)


def let_in_text(guests: list[str]) -> str:
    """Whom somebody who was removed has let in: a thief's own key may be among them."""
    return "whom it had let in stays; remove those you do not know, with kvnet swarm remove PUBLISHER:\n" + "\n".join(
        f"  {each}" for each in guests
    )


def _confirm(context: Invocation, target: str, reason: str, *, guests: bool) -> None:
    seen = context.run("revoke", RevokeRequest(target, reason, dry_run=True, guests=guests), RevokeResult)
    require_terminal("what is revoked for good", f"kvnet revoke {target} --yes")
    what = "the key and all it signed" if seen.kind == "publisher" else ", ".join(seen.names or seen.targets)
    question = (
        f"{what}, and what was derived from it, will be used and served no more.\n"
        f"It counts for {seen.whom}, and is told to members of {', '.join(seen.scopes)}. "
        f"{format_counted(seen.held, 'artifact')} here are concerned.\n"
        f"{_expected(seen)}"
        "There is no way back. Revoke it?"
    )
    confirm(context, question, "not revoked")


def _expected(seen: RevokeResult) -> str:
    removed = f"Its machine is removed from {' and '.join(seen.removed_from)}.\n" if seen.removed_from else ""
    if seen.let_in:
        removed += f"It has let in {len(seen.let_in)}, who stay without --guests: {', '.join(seen.let_in)}.\n"
    return removed + "".join(f"It stays a member of {each}.\n" for each in seen.still_in)
