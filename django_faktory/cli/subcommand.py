"""What a subcommand is, and what it is given. Exit codes: docs/cli.md."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..brokers import Broker, get_broker
from ..errors import FaktoryError
from ..queries import Query
from ..redaction import query_of
from .screen import Screen

OK, WRONG, NOTHING, UNAVAILABLE, PARTLY, INTERRUPTED = 0, 1, 2, 3, 4, 130


class Unsupported(FaktoryError):
    """What was asked for cannot be done where the jobs are, or not without more being said."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a subcommand."""

    name: str
    options: dict[str, Any]
    screen: Screen

    @property
    def broker(self) -> Broker:
        """Where the jobs are."""
        return get_broker()

    @property
    def alias(self) -> str | None:
        """The database the jobs are in; None where they are on a server elsewhere."""
        found: str | None = getattr(self.broker, "alias", None)
        return found

    def database(self) -> str:
        """The database the jobs are in. Raises Unsupported where they are elsewhere."""
        if self.alias is None:
            raise Unsupported(
                f"{self.name}: needs the jobs in this project's database (FAKTORY['BROKER'] = 'orm'): the protocol has "
                "no command for it"
            )
        return self.alias

    def query(self) -> Query:
        """What was asked for, of the words of the command line."""
        return query_of(" ".join(self.options["query"]))


@dataclass(frozen=True, slots=True)
class Subcommand:
    """A word after `manage.py faktory`."""

    name: str
    help: str
    run: Callable[[Call], int]
    """Returns the exit code."""
    arguments: Callable[[argparse.ArgumentParser], None] = lambda _: None


def duration(text: str) -> float:
    """An option that is a number of seconds above 0."""
    seconds = float(text)
    if not 0 < seconds <= 86_400:
        raise ValueError
    return seconds


def whole(text: str) -> int:
    """An option that is a whole number above 0."""
    number = int(text)
    if not 0 < number <= 1_000_000:
        raise ValueError
    return number
