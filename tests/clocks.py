"""A fake clock, set by tests."""


class Clock:
    """Replace the module `time` in a module under test: a test sets `now`, and each reading adds `step_s`."""

    def __init__(self, *, step_s=0.0):
        self.now, self.step_s = 1000.0, step_s

    def monotonic(self):
        self.now += self.step_s
        return self.now
