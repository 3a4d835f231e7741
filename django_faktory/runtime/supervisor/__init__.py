"""Start, watch and replace worker processes. Its parent process runs without Django (ADR 0012)."""
