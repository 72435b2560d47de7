"""Request headers that steer reuse, and response headers that say what came of it."""

from collections.abc import Mapping, Sequence

from kvnet.exchange.answers import Reuse
from kvnet.format.hashes import artifact_text
from kvnet.protocol.ids import peer_text
from kvnet.trust.keys import publisher_text
from kvnet_node.api.failures import invalid
from kvnet_node.prompts.normalise import Removed, describe_removed

MAX_TEXT = 400

_ON = frozenset({"1", "true", "yes", "on"})
_OFF = frozenset({"0", "false", "no", "off"})


def is_private(headers: Mapping[str, str]) -> bool:
    """Whether ``x-kvnet-private`` asks for a private request."""
    return _switch(headers, "x-kvnet-private", default=False)


def may_be_private(headers: Mapping[str, str]) -> bool:
    """Whether ``x-kvnet-private`` asks for it, or means to and cannot be read."""
    return headers.get("x-kvnet-private", "").strip().lower() not in _OFF | {""}


def wants_reuse(headers: Mapping[str, str]) -> bool:
    """Whether prefixes are to be looked up: unless ``x-kvnet-reuse: off``."""
    return _switch(headers, "x-kvnet-reuse", default=True)


def _switch(headers: Mapping[str, str], name: str, *, default: bool) -> bool:
    value = headers.get(name, "").strip().lower()
    if value and value not in _ON | _OFF:
        raise invalid(f"expected the header {name} to be on or off, found {value[:40]!r}", param=name)
    return value in _ON if value else default


def reuse_headers(request_id: str, model: str, reuse: Reuse, removed: Sequence[Removed]) -> dict[str, str]:
    """What a client is told about its answer beside the answer."""
    headers = {
        "x-kvnet-request": request_id,
        "x-kvnet-model": header_text(model),
        "x-kvnet-source": reuse.source,
        "x-kvnet-reused-tokens": str(reuse.reused_tokens),
        "x-kvnet-prompt-tokens": str(reuse.prompt_tokens),
        "x-kvnet-saved-s": f"{reuse.saved_s:.3f}",
    }
    if reuse.sources:
        source = reuse.sources[0]
        headers["x-kvnet-signer"] = publisher_text(source.signer)
        headers["x-kvnet-artifact"] = artifact_text(source.artifact)
        if source.peer:
            headers["x-kvnet-peer"] = peer_text(source.peer)
    if not reuse.reused_tokens and reuse.reasons:
        headers["x-kvnet-reason"] = header_text("; ".join(reuse.reasons))
    return headers | removed_headers(removed)


def removed_headers(removed: Sequence[Removed]) -> dict[str, str]:
    """What was taken out of the request, when something was."""
    return {"x-kvnet-removed": header_text(describe_removed(removed))} if removed else {}


def header_text(text: str) -> str:
    """A text as one bounded header value: some of it may come from peers."""
    return text.encode("ascii", "backslashreplace").decode().replace("\r", " ").replace("\n", " ")[:MAX_TEXT]
