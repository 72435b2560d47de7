"""What peers say to each other, one module a conversation: strict values and their bytes, no state.

A message is one CBOR map in the strict profile of the format, with its name under ``type``. Unknown messages, unknown
fields and values outside the stated bounds are protocol violations: the protocol grows by versions and capabilities,
not by what a peer happens to ignore. `control` has the one union of the control stream, `chunks` those of the chunk
streams and bulk connections. See ``docs/protocol.md`` for the same in CDDL.
"""
