def announce(alias, queues):
    return None
