"""Requests in, steps out, tokens back, text out. Pure Python: imports no torch, no msgspec, no zmq."""
