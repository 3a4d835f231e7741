"""A worker of this package as a process to kill or stop: `python -m tests.contrib.gearmonkey.program URL LEASE FOLDER`.

Serves `f`: an input is a command. `nap S` sleeps S seconds and answers; `hold` writes its pid to FOLDER/pid and waits
for FOLDER/go; anything else is answered in capitals.
"""

import os
import sys
import time
from pathlib import Path

import django

from django_faktory.contrib.gearmonkey import Worker


class Program(Worker):
    folder = Path()

    def work(self, input):
        word, _, rest = input.decode().partition(" ")
        with (self.folder / "runs").open("a") as file:
            file.write(f"{self.job[1]}\n")
        if word == "nap":
            time.sleep(float(rest))
        if word == "hold":
            path = self.folder / f"{os.getpid()}.new"
            path.write_text(str(os.getpid()))
            path.rename(self.folder / "pid")
            while not (self.folder / "go").exists():
                time.sleep(0.01)
        return f"{input.decode().upper()} by {os.getpid()}"


def main(url, lease, folder):
    django.setup()
    Program.folder = Path(folder)
    worker = Program(url, lease_s=float(lease), sweep_every_s=0.2)
    worker.accept("f")
    print("working", flush=True)  # noqa: T201
    worker.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
