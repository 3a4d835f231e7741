"""This project beside its peers, in one run: `python -m benchmarks.peers` (see ../README.md)."""
