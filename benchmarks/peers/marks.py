"""Record the start of each job as a mark: its number and the time. Workers write marks, the harness reads them.

A mark is 16 bytes in a memory-mapped file: it needs no system call and no lock, and none is lost if the worker is
killed. Each process has its own file, so that a job that two processes run appears twice.
"""

import itertools
import mmap
import os
import struct
import threading
import time
from pathlib import Path

FOLDER = "BENCH_MARKS"
_MARK = struct.Struct("<dq")
_NUMBER = struct.Struct("<q")  # written last and read first: a mark that has it is complete
_MOST = 1_000_000
_own = []
_opening = [threading.Lock()]


def leave(number):
    """Record that the job with this number starts in this process now."""
    file, places = _own[0] if _own else _open()
    _MARK.pack_into(file, next(places) * _MARK.size, time.time(), number + 1)


def _open():
    with _opening[0]:
        if not _own:  # otherwise another thread was faster
            path = Path(os.environ[FOLDER]) / f"{os.getpid()}.marks"
            with open(path, "x+b") as file:
                file.truncate(_MOST * _MARK.size)
                _own.append((mmap.mmap(file.fileno(), _MOST * _MARK.size), itertools.count()))
        return _own[0]


def _forget():
    """Reset the state of a forked process.

    It needs its own file, and must not inherit a lock that a thread of its parent held.
    """
    _own.clear()
    _opening[0] = threading.Lock()


os.register_at_fork(after_in_child=_forget)


class Marks:
    """All marks in a folder; each call of `look` reads the new ones."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.found = []
        self._files = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob("*.marks"):
            path.unlink()

    def look(self):
        """Return the marks so far, as (number, time)."""
        for path in self.folder.glob("*.marks"):
            if path not in self._files:
                if path.stat().st_size < _MOST * _MARK.size:
                    continue  # it is still being created
                with open(path, "rb") as file:
                    self._files[path] = [mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), 0]
            self._read(self._files[path])
        return self.found

    def _read(self, file):
        content, place = file
        while place < _MOST:
            [is_whole] = _NUMBER.unpack_from(content, place * _MARK.size + _MARK.size - _NUMBER.size)
            if not is_whole:
                break
            at, number = _MARK.unpack_from(content, place * _MARK.size)
            self.found.append((number - 1, at))
            place += 1
        file[1] = place
