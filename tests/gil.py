"""Hold Python's global interpreter lock, as a faulty C extension does."""

import ctypes


def hold_gil():
    """Wait for a mutex that this thread has locked, with the GIL held.

    A loop would take a CPU from the other tests, and a signal would end a sleep.
    """
    libc = ctypes.PyDLL(None)  # unlike CDLL it calls functions with the GIL held
    mutex = ctypes.create_string_buffer(128)
    libc.pthread_mutex_init(mutex, None)
    for _ in range(2):
        libc.pthread_mutex_lock(mutex)
