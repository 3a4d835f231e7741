"""What was done, written outside the system under test by whoever did it, and read when all is over.

A line is written before the next thing is done, and the kernel has it: who is killed has said all. Knows no Django.
"""

import os
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple


class Note(NamedTuple):
    at: float
    """By the machine's monotonic clock, which all its processes share."""
    who: str
    rest: tuple[str, ...]


class Scribe:
    """One writer's file. Safe in threads: a line is one write."""

    def __init__(self, folder, name):
        path = Path(folder) / f"{name}.history"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, word, *rest):
        os.write(self._file, " ".join([f"{time.monotonic():.6f}", word, *rest, "\n"]).encode())


class History:
    """All that was noted in a folder, by word: `history["ok"]` are the notes of accepted jobs."""

    def __init__(self, folder):
        self._notes = defaultdict(list)
        for path in sorted(Path(folder).glob("*.history")):
            for line in path.read_text().splitlines():
                at, word, *rest = line.split()
                self._notes[word].append(Note(float(at), path.stem, tuple(rest)))

    def __getitem__(self, word):
        return self._notes[word]

    def jids(self, word):
        """Those a word was said of."""
        return {note.rest[0] for note in self._notes[word]}


class Tally:
    """How often words were noted in a folder so far; each look reads only what is new."""

    def __init__(self, folder):
        self._folder = Path(folder)
        self._read = Counter()
        self._noted = Counter()

    def look(self):
        for path in self._folder.glob("*.history"):
            with path.open("rb") as file:
                file.seek(self._read[path])
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._read[path] += len(whole) + 1
                self._noted.update(line.split()[1].decode() for line in whole.splitlines())
        return self._noted
