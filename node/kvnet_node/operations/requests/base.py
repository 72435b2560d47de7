"""What every request and every result is."""

import msgspec


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all requests."""


class Result(msgspec.Struct, frozen=True, tag_field="type"):
    """Base of all results."""
