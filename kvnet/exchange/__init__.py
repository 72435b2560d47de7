"""Use cases over the interfaces: add, look up, fetch, serve, announce, generate."""
