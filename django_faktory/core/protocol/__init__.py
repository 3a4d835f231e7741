"""Faktory Work Protocol without I/O: turns bytes into commands and replies, for both sides of a connection.

Uses no socket, event loop, clock or broker. Rules: the protocol specification; W1 to W9.
"""
