"""Every way in which a stream of bytes may arrive: whole, byte by byte, and in two pieces cut at each position."""


def every_split(stream):
    yield [stream]
    yield [stream[at : at + 1] for at in range(len(stream))]
    for at in range(1, len(stream)):
        yield [stream[:at], stream[at:]]
