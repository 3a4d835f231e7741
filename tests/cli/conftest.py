"""`manage.py faktory` in this process: its exit code, what it said, and what it said beside that."""

import io
import json
from types import SimpleNamespace

import pytest
from django.core.management import CommandError, call_command


class Terminal(io.StringIO):
    """A stream somebody looks at."""

    def isatty(self):
        return True


@pytest.fixture
def faktory():
    """Run a subcommand; `is_terminal`: as if a person looked."""

    def run(*words, is_terminal=False):
        out, err = (Terminal(), Terminal()) if is_terminal else (io.StringIO(), io.StringIO())
        code = 0
        try:
            call_command("faktory", *map(str, words), stdout=out, stderr=err)
        except CommandError as error:
            code, said = error.returncode, str(error)
            err.write(said)
        except SystemExit as stop:
            code = stop.code
        return SimpleNamespace(code=code, out=out.getvalue(), err=err.getvalue())

    return run


@pytest.fixture
def asked(faktory):
    """The JSON a subcommand answers with; it must be one line of ASCII."""

    def run(*words, code=0):
        answer = faktory(*words, "--json")
        assert answer.code == code, answer
        assert answer.out.isascii()
        [line] = answer.out.splitlines()
        return json.loads(line)

    return run
