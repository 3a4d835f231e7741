"""Write the events of a run outside the system under test, and read them at the end.

Each event is one write to the kernel before the next step, so a killed process loses none. Uses no Django.
"""

import os
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple


class Note(NamedTuple):
    at: float
    """Time of the machine's monotonic clock, which all its processes share."""
    writer: str
    rest: tuple[str, ...]


class Scribe:
    """Write one writer's file. Thread-safe, because a line is one write."""

    def __init__(self, folder, name):
        path = Path(folder) / f"{name}.history"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, word, *rest):
        os.write(self._file, " ".join([f"{time.monotonic():.6f}", word, *rest, "\n"]).encode())


class History:
    """Read all notes of a folder, by word: `history["ok"]` lists the notes of accepted jobs."""

    def __init__(self, folder):
        self._notes = defaultdict(list)
        for path in sorted(Path(folder).glob("*.history")):
            for line in path.read_text().splitlines():
                at, word, *rest = line.split()
                self._notes[word].append(Note(float(at), path.stem, tuple(rest)))

    def __getitem__(self, word):
        return self._notes[word]

    def jids(self, word):
        """Return the jids that were noted with this word."""
        return {note.rest[0] for note in self._notes[word]}


class Tally:
    """Count the notes of a folder by word; each `look` reads only the new ones."""

    def __init__(self, folder):
        self._folder = Path(folder)
        self._read = Counter()
        self._noted = Counter()

    def look(self):
        for path in self._folder.glob("*.history"):
            with path.open("rb") as file:
                file.seek(self._read[path])
                # The last line may be half written: read up to the last line break.
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._read[path] += len(whole) + 1
                self._noted.update(line.split()[1].decode() for line in whole.splitlines())
        return self._noted
