"""A worker of PyPI's faktory, as in its documentation: `python faktory_worker.py URL`."""

import sys

from faktory import Worker


def add(x, y):
    return x + y


def fails(text):
    raise ValueError(text)


if __name__ == "__main__":
    worker = Worker(faktory=sys.argv[1], queues=["default"], concurrency=2, use_threads=True, disconnect_wait=5)
    worker.send_heartbeat_every = 2
    worker.register("add", add)
    worker.register("fails", fails)
    worker.run()
