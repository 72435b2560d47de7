"""Simulations of swarm cache reuse: what would a swarm of given machines, links and work save?

Requests (``workload``) meet a world of nodes, links and engines (``world``), which asks kvnet's own decision code what
to look up, fetch, compute, keep and announce, under one of several ``policies``.
"""
