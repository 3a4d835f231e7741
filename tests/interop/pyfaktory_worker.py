"""A worker of PyPI's pyfaktory, as in its documentation: `python pyfaktory_worker.py URL`."""

import sys

from pyfaktory import Client, Consumer


def add(x, y):
    return x + y


def fails(text):
    raise ValueError(text)


if __name__ == "__main__":
    with Client(faktory_url=sys.argv[1], role="consumer", beat_period=5) as client:
        consumer = Consumer(client=client, queues=["default"], concurrency=2, grace_period=5)
        consumer.register("add", add)
        consumer.register("fails", fails)
        consumer.run()
