"""The pure core: rules, parsers and formats without Django, clock, sockets or threads."""
