"""The data plane: chunk bytes over sockets of their own, beside the control transport and as fast as TLS allows.

trio outside, one blocking thread per connection inside. Two peers agree on a session over their control session
(`kvnet.protocol.messages.bulk.OpenBulk`): a name and a certificate each. Whoever dials sends the name as SNI; each side
accepts exactly the other's certificate.
"""
