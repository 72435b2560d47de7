"""Who may use the endpoint: checked before a request is read.

A web page can make a browser send requests to this machine. Two things give it away: the name it was loaded from, in
``Origin``; and, when its owner lets that name point at 127.0.0.1 to be of the same origin, the name in ``Host``. Both
must be ones that the owner of the node knows. Beyond this machine a token is needed besides.
"""

import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvnet_node.api.failures import ApiFailure

CONTAINER_HOSTS = frozenset({"host.docker.internal", "host.containers.internal"})
"""What containers call the machine they run on. Nobody can make these names point elsewhere: ``internal`` is reserved
for private use."""

ALLOWED_METHODS = "GET, POST, OPTIONS"
PREFLIGHT_AGE_S = 600


@dataclass(frozen=True, slots=True)
class GuardRules:
    """What is let in.

    Attributes:
        token: what clients must show; "" asks for nothing.
        hosts: further names of this endpoint, without ports.
        origins: values of ``Origin``; ``*`` for all, ``http://localhost:*`` for every port, ``app://*`` for a scheme.
    """

    token: str = ""
    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()


def host_name(host: str) -> str:
    """The name in a ``Host`` header, without the port, in lower case; "" when it is malformed."""
    text = host.strip().lower()
    if text.startswith("["):
        name, bracket, rest = text[1:].partition("]")
        return name if bracket and (not rest or _is_port(rest)) else ""
    name, colon, port = text.partition(":")
    return name.rstrip(".") if not colon or _is_port(colon + port) else ""


def _is_port(text: str) -> bool:
    return text.startswith(":") and len(text) <= 6 and text[1:].isascii() and text[1:].isdigit()


def is_loopback(name: str) -> bool:
    """Whether a host name means this machine, wherever it is resolved."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def host_allowed(host: str, rules: GuardRules, local_address: str) -> bool:
    """Whether the endpoint answers to a ``Host`` header.

    Args:
        host: the header.
        rules: what is let in.
        local_address: the address the connection came in at; a client may use it as the name.
    """
    name = host_name(host)
    if not name:
        return False
    own = {each.lower() for each in rules.hosts}
    return is_loopback(name) or name in CONTAINER_HOSTS or name in own or name == local_address.lower()


def origin_allowed(origin: str, host: str, rules: GuardRules) -> bool:
    """Whether a web page may use the endpoint; ``host`` is a ``Host`` header that was let in already."""
    text = origin.strip().lower()
    scheme, separator, rest = text.partition("://")
    if separator and scheme in {"http", "https"} and rest == host.strip().lower():
        return True
    return any(_matches(text, rule.strip().lower()) for rule in rules.origins)


def _matches(origin: str, rule: str) -> bool:
    if rule in {"*", origin}:
        return True
    if rule.endswith("://*"):
        return origin.startswith(rule[:-1])
    if rule.endswith(":*"):
        return origin.startswith(rule[:-1]) and _is_port(origin[len(rule) - 2 :])
    return False


def token_of(headers: Mapping[str, str]) -> str:
    """What a client shows: ``Authorization: Bearer``, or ``x-api-key`` as Anthropic clients have it."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key", "").strip()


def refusal(headers: Mapping[str, str], rules: GuardRules, local_address: str) -> ApiFailure | None:
    """Why a request is not let in, by where it comes from; None when it is. The token is another matter."""
    host = headers.get("host", "")
    if not host_allowed(host, rules, local_address):
        found = f"found {host[:100]!r}" if host else "found none"
        return ApiFailure(
            403,
            "permission_error",
            f"expected a Host header that means this machine, {found} (a name of your own goes into api.allowed_hosts)",
            "host_not_allowed",
        )
    origin = headers.get("origin")
    if origin is not None and not origin_allowed(origin, host, rules):
        return ApiFailure(
            403,
            "permission_error",
            f"web pages from {origin[:100]!r} may not use this endpoint (those that may are in api.allowed_origins)",
            "origin_not_allowed",
        )
    return None


def token_refusal(headers: Mapping[str, str], rules: GuardRules) -> ApiFailure | None:
    """Why a request may not be answered; None when it may. Takes the same time however much of a token is right."""
    if not rules.token:
        return None
    shown = token_of(headers)
    if hmac.compare_digest(shown.encode("utf-8", "surrogateescape"), rules.token.encode()):
        return None
    message = "wrong token" if shown else "expected Authorization: Bearer TOKEN or x-api-key: TOKEN, found neither"
    return ApiFailure(
        401, "authentication_error", f"{message} (the token is api.token of this node)", "invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )  # fmt: skip


def cors_headers(origin: str) -> dict[str, str]:
    """What a browser needs to hand an answer to a page that is let in."""
    return {
        "access-control-allow-origin": origin,
        "access-control-expose-headers": "*",
        "vary": "Origin",
    }


def preflight_headers(origin: str, wanted: str) -> dict[str, str]:
    """The answer to a browser that asks before it sends; ``wanted`` are the headers it wants to send."""
    return {
        "access-control-allow-origin": origin,
        "access-control-allow-methods": ALLOWED_METHODS,
        "access-control-allow-headers": wanted or "*",
        "access-control-allow-private-network": "true",
        "access-control-max-age": str(PREFLIGHT_AGE_S),
        "vary": "Origin, Access-Control-Request-Headers",
    }
