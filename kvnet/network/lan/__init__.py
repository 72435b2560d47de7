"""Neighbours on a local network, by mDNS. The only importer of zeroconf and ifaddr."""
