"""Run `manage.py faktory` in this process, and return its exit code, stdout and stderr."""

import io
import json
from types import SimpleNamespace

import pytest
from django.core.management import CommandError, call_command


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def faktory():
    """Return a function that runs a subcommand; with `is_terminal`, its output streams claim to be a terminal."""

    def run(*words, is_terminal=False):
        out, err = (Terminal(), Terminal()) if is_terminal else (io.StringIO(), io.StringIO())
        code = 0
        try:
            call_command("faktory", *map(str, words), stdout=out, stderr=err)
        except CommandError as error:
            code, message = error.returncode, str(error)
            err.write(message)
        except SystemExit as stop:
            code = stop.code
        return SimpleNamespace(code=code, out=out.getvalue(), err=err.getvalue())

    return run


@pytest.fixture
def asked(faktory):
    """Return a function that returns a subcommand's JSON answer; it must be one line of ASCII."""

    def run(*words, code=0):
        answer = faktory(*words, "--json")
        assert answer.code == code, answer
        assert answer.out.isascii()
        [line] = answer.out.splitlines()
        return json.loads(line)

    return run
