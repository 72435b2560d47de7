"""Bytes and identity: what a thing is called and how it is written down. Pure; ``docs/format.md`` is normative."""
