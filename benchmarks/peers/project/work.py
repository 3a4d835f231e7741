"""Functions that the tasks of every system call."""

from benchmarks.peers import marks


def noop(number, text):
    marks.leave(number)


def insert(number, text):
    from benchmarks.peers.project.models import Row

    marks.leave(number)
    Row.objects.create(number=number, text=text)
