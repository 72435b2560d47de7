"""``kvnet invite``, ``join``, ``leave`` and ``kvnet swarm``: who belongs to whom."""

import datetime as dt
import re
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Annotated

from cyclopts import Parameter

from kvnet.errors import UsageError, elsewhere
from kvnet.network.places import LOOPBACK, host_of
from kvnet.trust.invitation import MAX_TEXT_CHARACTERS, TEXT_PREFIX, parse_invitation_text
from kvnet.trust.keys import publisher_text
from kvnet_node.commands.revoking import let_in_text
from kvnet_node.confirming import confirm, require_terminal
from kvnet_node.invocation import Context, Invocation, positive
from kvnet_node.operations.requests import (
    InviteRequest,
    InviteResult,
    JoinRequest,
    JoinResult,
    LeaveRequest,
    LeaveResult,
    MemberEntry,
    SwarmListResult,
    SwarmMembersResult,
    SwarmRemoveRequest,
    SwarmRemoveResult,
    SwarmRequest,
)
from kvnet_node.output import Output, columns, escape, format_counted, format_seconds
from kvnet_node.pasting import read_invitation
from kvnet_node.removed_text import removed_text

_LIFETIME = re.compile(r"(\d{1,6})\s*([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def invite(
    *,
    device: bool = False,
    colleague: bool = False,
    swarm: str = "",
    expires: str = "24h",
    uses: int = 1,
    name: str = "",
    no_qr: bool = False,
    context: Context,
) -> None:
    """Print an invitation: another machine of yours, or a colleague's, joins with it.

    Args:
        device: for another machine of yours: it shares everything in mine, conversations too.
        colleague: for somebody else: it shares what is shared with the swarm by name, and nothing of mine.
        swarm: which swarm, with --colleague; it is made at its first invitation.
        expires: how long it can be used: a number and s, m, h or d; at most 30d.
        uses: how many may join with it.
        name: what to call the guest in lists; by default what it calls itself.
        no_qr: print no QR code.
    """
    _check_whom(device, colleague, swarm)
    request = InviteRequest(swarm or "mine", _lifetime_s(expires), positive("--uses", uses), name, machine_label())
    result = context.run("invite", request, InviteResult)
    output = context.output
    output.result(result, lambda invited: invited.invitation)
    if not no_qr and not output.json and sys.stdout.isatty():
        _print_qr(output, result.invitation)
    until = dt.datetime.fromtimestamp(result.expires, tz=dt.UTC).astimezone().strftime("%Y-%m-%d %H:%M")
    what = "joins your machines" if device else f"joins {result.swarm}"
    if all(host_of(address).startswith(LOOPBACK) for address in result.addresses):
        output.warning(
            "this node listens on this machine alone: nobody elsewhere can join with this line. Start it without "
            "--listen (network.listen), and invite again"
        )
    output.message(
        f"who has this line {what}: hand it over by a way you trust; it works until {until}, for "
        f"{format_counted(result.uses, 'guest')}\n"
        f"on the other machine: {elsewhere('kvnet join -')}, then paste the line"
        + ("\nthe swarm is new; you are its founder and alone can remove members" if result.made else "")
    )


def _check_whom(device: bool, colleague: bool, swarm: str) -> None:
    if device == colleague:
        raise UsageError(
            "expected --device or --colleague, found both or neither",
            hint="a device shares everything that is yours; a colleague shares one swarm",
        )
    if device and swarm:
        raise UsageError(
            "expected no --swarm with --device, which is for mine", hint="kvnet invite --colleague --swarm NAME"
        )
    if colleague and not swarm:
        raise UsageError("expected --swarm NAME with --colleague", hint="kvnet invite --colleague --swarm team")
    if colleague and swarm == "mine":
        # Whoever joins mine is a device and reads every conversation: nothing said with --colleague may lead there.
        raise UsageError(
            "expected the name of a swarm with --colleague, found mine, which your own machines share",
            hint="kvnet invite --colleague --swarm team; for a machine of yours, kvnet invite --device",
        )


def _print_qr(output: Output, invitation: str) -> None:
    import segno

    # Upper-case letters and digits alone take a third less room.
    code = segno.make(invitation.upper(), error="l", micro=False)
    width = code.symbol_size(border=2)[0]
    if width > shutil.get_terminal_size().columns:
        output.message(f"no QR code: it needs a terminal of {width} columns")
        return
    code.terminal(sys.stdout, compact=True, border=2)


def _lifetime_s(text: str) -> float:
    match = _LIFETIME.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"expected a time such as 30m, 24h or 7d for --expires, found {text[:40]!r}")
    return float(match[1]) * _UNITS[match[2]]


def machine_label() -> str:
    """What this machine calls itself: the first part of its host name."""
    name = socket.gethostname().split(".")[0]
    return "".join(char for char in name if char.isprintable())[:64]


def join(
    invitation: Annotated[str, Parameter(allow_leading_hyphen=True)],
    /,
    *,
    as_: Annotated[str, Parameter(name="--as")] = "",
    name: str = "",
    keep_old: bool = False,
    yes: bool = False,
    context: Context,
) -> None:
    """Join with an invitation, for good: both sides believe each other from then on, after restarts too.

    Args:
        invitation: the line that kvnet invite printed; - reads it from standard input, out of the shell's history.
        as_: what to call the swarm on this machine.
        name: what the others call this machine; by default the first part of its host name.
        keep_old: keep the namespace that was mine, for the artifacts in it.
        yes: do not ask whether this machine is to share everything, as one of the inviter's own does.
    """
    if invitation == "-":
        invitation = _pasted(context) if sys.stdin.isatty() else read_invitation(_piped())
    signed, body = parse_invitation_text(invitation)
    if not yes and sys.stdin.isatty() and body.role == "device":
        _confirm_device(context, publisher_text(signed.signer))
    request = JoinRequest(invitation, as_, name or machine_label(), keep_old)
    result = context.run("join", request, JoinResult)
    context.output.result(result, lambda _: "")
    context.output.message(_joined_text(result))


def _confirm_device(context: Invocation, inviter: str) -> None:
    """All invitations look alike: nobody is to share every conversation by taking one for that of a swarm."""
    context.output.question(
        f"this invitation makes this machine one of those of {inviter}: they share everything in "
        "mine from then on, conversations too. Are they all yours? Type yes:"
    )
    if sys.stdin.readline().strip() != "yes":
        raise UsageError("not joined: the answer was not yes", hint="for a swarm, ask for an invitation of --colleague")


def _piped() -> Iterator[str]:
    return iter(partial(sys.stdin.readline, MAX_TEXT_CHARACTERS), "")


def _pasted(context: Invocation) -> str:
    """Lines from the terminal, whose own buffer ends at 1,024 characters on macOS; that of readline does not."""
    with suppress(ImportError):
        import readline  # noqa: F401 - its presence is what `input` looks for

    def typed() -> Iterator[str]:
        with suppress(EOFError):
            while True:
                yield input()

    def more(begun: bool) -> None:
        context.output.question(
            "that is not all of it; paste the rest, or press Return to give up:"
            if begun
            else f"this is no invitation; one begins with {TEXT_PREFIX}: paste it, or press Return to give up:"
        )

    context.output.question("paste the invitation and press Return:")
    return read_invitation(typed(), more, at_terminal=True)


def _joined_text(result: JoinResult) -> str:
    who = result.inviter_label or result.inviter or "its founder"
    if not result.changed:
        lines = [f"this machine is in {result.swarm} already"]
    elif result.role == "device":
        others = ", ".join(result.members) or who
        lines = [f"this machine shares everything in mine with {others}; invited by {who}"]
    else:
        lines = [f"joined the swarm {result.swarm}, invited by {who}; other members: {', '.join(result.members)}"]
    if result.kept:
        lines.append(f"the namespace that was mine is kept, as {result.kept[:16]}")
    if not result.running:
        lines.append("next: kvnet node start")
    elif result.swarm == "mine":
        lines.append("next: kvnet list --peers")
    else:
        lines.append(f"next: kvnet share NAME --to {result.swarm}")
    return "\n".join(lines)


def leave(swarm: str, /, *, yes: bool = False, context: Context) -> None:
    """Leave a swarm: its secrets are forgotten here. Its members are not told. Asks first.

    Args:
        swarm: its name, as kvnet swarm list shows it.
        yes: do not ask.
    """
    if not yes:
        seen = context.run("leave", LeaveRequest(swarm, dry_run=True), LeaveResult)
        require_terminal("that this machine leaves a swarm", f"kvnet leave {shlex.quote(swarm)} --yes")
        confirm(context, f"{leaving_text(seen)} Leave it?", "not left")
    result = context.run("leave", LeaveRequest(swarm), LeaveResult)
    context.output.result(result, lambda _: "")
    context.output.message(left_text(result))


def leaving_text(seen: LeaveResult) -> str:
    """What leaving a swarm will mean."""
    if seen.role == "removed":
        return f"this machine was removed from {seen.swarm}; it forgets what it has of its secrets."
    back = "coming back takes a new invitation."
    if seen.role == "founder" and seen.others:
        back = (
            f"it is the founder: afterwards nobody can remove any of the {format_counted(seen.others, 'other member')}."
        )
    return f"this machine forgets the secrets of {seen.swarm}; {back}"


def left_text(result: LeaveResult) -> str:
    """What leaving a swarm has meant, and what others still see."""
    held = format_counted(result.artifacts, "artifact")
    more = f"; {held} of it here may be evicted now" if result.artifacts else ""
    if result.role == "removed":
        after = "its members had removed this machine before"
    elif not result.others:
        after = "nobody else was in it"
    elif not result.founder:
        after = "its other members still list this machine, its founder, and nobody can remove members any more"
    else:
        after = (
            f"until its founder, {escape(result.founder)}, runs {elsewhere('kvnet swarm remove')}, "
            "others still list this machine"
        )
    return f"left {result.swarm}{more}\n{after}"


def list_swarms(*, context: Context) -> None:
    """List mine and the swarms this machine is in."""

    def render(result: SwarmListResult) -> str:
        rows = [
            (each.name, each.role, str(each.members), str(each.artifacts), str(each.invitations), each.id[:16])
            for each in result.swarms
        ]
        return columns(rows, ("NAME", "ROLE", "MEMBERS", "ARTIFACTS", "OPEN INVITATIONS", "ID"))

    found = context.run("swarm list", SwarmRequest(), SwarmListResult)
    context.output.result(found, render)
    gone = [each.name for each in found.swarms if each.role == "removed"]
    if gone:
        context.output.message(removed_text(gone))


def members(swarm: str = "mine", /, *, context: Context) -> None:
    """List the members of a swarm, who let them in, and when they were last connected.

    Args:
        swarm: its name; your own machines by default.
    """

    def render(result: SwarmMembersResult) -> str:
        rows = [
            (each.name or "-", each.role, each.invited_by or "-", _seen(each), each.publisher)
            for each in result.members
        ]
        return columns(rows, ("NAME", "ROLE", "INVITED BY", "SEEN", "PUBLISHER"))

    context.output.result(context.run("swarm members", SwarmRequest(swarm), SwarmMembersResult), render)


def _seen(member: MemberEntry) -> str:
    if member.own:
        return "this machine"
    if member.connected:
        return "connected"
    return f"{format_seconds(max(0.0, time.time() - member.seen))} ago" if member.seen else "never"


def remove(member: str, /, *, swarm: str = "mine", guests: bool = False, yes: bool = False, context: Context) -> None:
    """Remove a member: what it has it keeps, what comes later it can neither find nor read. Asks first.

    Args:
        member: its name, publisher id or peer id, as kvnet swarm members shows them, or the end of an id.
        swarm: from which swarm; your own machines by default.
        guests: remove whom it has let in as well, and whom those have.
        yes: do not ask.
    """
    if not yes:
        _confirm_removal(context, member, swarm, guests=guests)
    result = context.run("swarm remove", SwarmRemoveRequest(swarm, member, guests), SwarmRemoveResult)
    context.output.result(result, lambda _: "")
    asleep = f"\nasleep, and follow when they wake: {', '.join(result.asleep)}" if result.asleep else ""
    revoke = "\n".join(f"  kvnet revoke {publisher}" for publisher in result.removed)
    context.output.message(
        f"removed {escape(result.label or member)} from {result.swarm}, which has a new lookup secret now{asleep}\n"
        f"what it fetched before it keeps; what it signed before its removal stays in use, until its key is revoked:\n"
        f"{revoke}" + ("\n" + let_in_text(result.let_in) if result.let_in else "")
    )


def _confirm_removal(context: Invocation, member: str, swarm: str, *, guests: bool) -> None:
    """Names who is meant by a label or the end of an id, so that nobody is removed by mistake."""
    seen = context.run("swarm remove", SwarmRemoveRequest(swarm, member, guests, dry_run=True), SwarmRemoveResult)
    flags = f"{'' if swarm == 'mine' else f' --swarm {swarm}'}{' --guests' if guests else ''} --yes"
    require_terminal("who is removed", f"kvnet swarm remove {shlex.quote(member)}{flags}")
    guests_text = f"\nIt has let in {len(seen.let_in)}, who stay without --guests: {', '.join(seen.let_in)}."
    more = guests_text if seen.let_in else ""
    confirm(
        context,
        f"{escape(seen.label or member)} is removed from {seen.swarm}: {', '.join(seen.removed)}.{more}\n"
        f"{staying_text(seen.stays)}, with a new lookup secret; it comes back by an invitation alone. Remove it?",
        "not removed",
    )


def staying_text(members: int) -> str:
    """How many members stay."""
    return f"{format_counted(members, 'member')} {'stays' if members == 1 else 'stay'}"
