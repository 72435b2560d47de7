"""``kvnet key``: own and trusted publisher keys. Secrets stay in their files."""

from kvnet_node.invocation import Context
from kvnet_node.operations.requests import (
    KeyListResult,
    KeyRequest,
    KeyResult,
    RotateResult,
    TrustRequest,
    TrustResult,
)
from kvnet_node.output import columns, escape, format_counted


def new(*, context: Context) -> None:
    """Make a new signing key; artifacts signed by the old ones stay yours."""
    result = context.run("key new", KeyRequest(), KeyResult)
    context.output.result(result, lambda key: key.publisher)
    context.output.message(
        "new artifacts are signed with it; tell the people who trust you: kvnet key trust " + result.publisher
    )


def rotate(*, context: Context) -> None:
    """Make a new signing key that is believed wherever the old one was; what the old one signed stays good."""
    result = context.run("key rotate", KeyRequest(), RotateResult)
    context.output.result(result, lambda key: key.publisher)
    told = f"; {format_counted(result.told, 'connected member')} told" if result.told else ""
    context.output.message(
        f"new artifacts are signed with it, and members follow by themselves{told}\n"
        f"if others may have the old key: kvnet revoke {result.old}"
    )


def show(*, context: Context) -> None:
    """Show the public key that signs what this node adds; the first use makes it."""
    context.output.result(context.run("key show", KeyRequest(), KeyResult), lambda key: key.publisher)


def list_keys(*, context: Context) -> None:
    """List own and trusted keys."""

    def render(result: KeyListResult) -> str:
        return columns(
            [(key.publisher, key.role, key.state, key.label, key.since) for key in result.keys],
            ("PUBLISHER", "ROLE", "STATE", "LABEL", "SINCE"),
        )

    context.output.result(context.run("key list", KeyRequest(), KeyListResult), render)


def trust(publisher: str, /, *, label: str = "", context: Context) -> None:
    """Use artifacts signed by this publisher.

    Args:
        publisher: the text that kvnet key show prints on their machine.
        label: a name for lists.
    """
    result = context.run("key trust", TrustRequest(publisher, label), TrustResult)
    context.output.result(result, lambda _: "")
    named = f" ({escape(label)})" if label else ""
    context.output.message(
        f"trusted: {result.publisher}{named}" if result.changed else f"already trusted: {result.publisher}"
    )


def untrust(publisher: str, /, *, context: Context) -> None:
    """Stop using artifacts signed by this publisher, and anything derived from them.

    Args:
        publisher: publisher text, or the label it was given.
    """
    result = context.run("key untrust", TrustRequest(publisher), TrustResult)
    context.output.result(result, lambda _: "")
    context.output.message(f"no longer trusted: {result.publisher}")
