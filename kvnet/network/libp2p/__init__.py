"""The libp2p network: TCP, Noise and Yamux, identity by Ed25519, a Kademlia DHT. The only user of py-libp2p.

py-libp2p is pinned to one version because some of what follows leans on how that version behaves inside; each place
says so. Tests in ``tests/loopback`` hold every behaviour in place.
"""
