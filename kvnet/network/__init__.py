"""How bytes move between peers: one interface, a simulated network and the libp2p one."""
