"""Who said so: publisher keys, signed envelopes, trust policies and namespaces. Pure."""
