"""Compare this project with its peers in one run: `python -m benchmarks.peers` (see ../README.md)."""
