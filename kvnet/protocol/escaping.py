"""Text from peers, made safe to show."""


def escape_text(text: str) -> str:
    """Text from a peer, safe to show: backslashes and what cannot be printed become escape sequences."""
    return "".join(
        char if char.isprintable() and char != "\\" else char.encode("unicode_escape").decode("ascii") for char in text
    )
