"""Runs programs that nobody has read: `host.examine` says which pass their tests, whatever else they try."""
