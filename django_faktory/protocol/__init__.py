"""The Faktory Work Protocol without I/O: bytes in, commands and replies out, for both sides of a connection.

Knows no socket, event loop, clock or broker. Rules: the protocol specification; W1 to W9.
"""
