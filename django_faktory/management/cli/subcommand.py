"""Define subcommands of `manage.py faktory`, check the names in their arguments (docs/reference/commands.md)."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...backend import registered_queues
from ...brokers import Broker, get_broker
from ...core.lifecycle import State
from ...core.queries import Query
from ...core.suggestions import suggest
from ...errors import FaktoryError
from ...operations import searches, task_names
from ...tasks.base import import_tasks
from ...tasks.redaction import query_of
from .screen import Screen

# 130 is what shells report for a command ended by SIGINT (128 + 2).
OK, WRONG, NOTHING, UNAVAILABLE, PARTLY, INTERRUPTED = 0, 1, 2, 3, 4, 130
EXIT_CODES = {
    OK: "Done. An empty list is also a success.",
    WRONG: "Wrong usage or configuration, or no confirmation: nothing was changed. One line says what to do.",
    NOTHING: "Nothing to change, or no job, batch or worker with this id.",
    UNAVAILABLE: "The database, the Faktory server or its Redis is unavailable.",
    PARTLY: "Partly done: the output names and counts what is left. doctor: an alarm is critical.",
    INTERRUPTED: "Stopped by Ctrl-C; changes made so far stay.",
}


class Unsupported(FaktoryError):
    """A subcommand cannot run as requested: wrong arguments, no confirmation, or no support by the broker."""


Run = Callable[["Invocation"], int]


@dataclass(frozen=True, slots=True)
class Invocation:
    """Options and output of one call of a subcommand."""

    name: str
    options: dict[str, Any]
    screen: Screen

    @property
    def broker(self) -> Broker:
        return get_broker()

    @property
    def alias(self) -> str | None:
        """Alias of the database of the jobs, or None if they are on a Faktory server."""
        # A project's own broker need not have the attribute.
        alias: str | None = getattr(self.broker, "alias", None)
        return alias

    def require_alias(self) -> str:
        """Return `alias`. Raises Unsupported if it is None."""
        if self.alias is None:
            raise Unsupported(
                f"{self.name}: needs the jobs in this project's database (FAKTORY['BROKER'] = 'orm'): the protocol has "
                "no command for it"
            )
        return self.alias

    def require_confirmation(self, question: str) -> None:
        """Ask a question, unless the option --yes is given. Raises Unsupported if the answer is no."""
        if not self.options["yes"] and not self.screen.confirm(question):
            raise Unsupported(f"{self.name}: aborted; add --yes to skip the question")

    def parse_search(self) -> Query:
        """Parse a query whose words without a key may be any part of a job. Raises InvalidQuery, Unsupported."""
        import_tasks()
        return searches.parse_search(self._query_text, using=self.require_alias())

    @property
    def _query_text(self) -> str:
        # The shell has split an unquoted query into several arguments.
        return " ".join(self.options["query"])

    def parse_query(self) -> Query:
        """Parse the query of the command line. Raises InvalidQuery."""
        query = query_of(self._query_text)
        if query.tasks:
            import_tasks()
        return query if self.alias is None else task_names.expand_short_names(query, using=self.alias)

    def require_known(self, kind: str, names: Iterable[str], known: Iterable[str]) -> None:
        """Reject unknown names, unless the option --new is given. Raises Unsupported for the first one."""
        known = set(known)
        unknown = [name for name in names if name not in known]
        if not unknown or self.options.get("new"):
            return
        remedy = " or add --new for a name not used yet" if "new" in self.options else ""
        hint = suggest(unknown[0], known) or ("; see the list of names," if remedy else "")
        raise Unsupported(f"{self.name}: there is no {kind} {unknown[0]}{hint}{remedy}")

    def note_unknown_names(self, query: Query) -> None:
        """Print the unknown names of a query that found no job, to stderr."""
        for word in (*query.jids, *query.words):
            if hint := suggest(word, State):
                self.screen.note(f"no job has the {'ID' if word in query.jids else 'text'} {word}{hint}")
        queues = [pattern.text for pattern in query.queues if not pattern.is_prefix]
        tasks = [pattern.text for pattern in query.tasks if not pattern.is_prefix]
        if queues:
            known_queues = self.known_queue_names()
            for name in queues:
                if name not in known_queues:
                    self.screen.note(f"there is no queue {name}{suggest(name, known_queues)}")
        if tasks and self.alias is not None:
            known_tasks = task_names.known_tasks(using=self.alias)
            for name in tasks:
                if name not in known_tasks:
                    similar = task_names.find_similar(name, using=self.alias)
                    self.screen.note(f"there is no task {name}{f'; did you mean {similar[0]}?' if similar else ''}")

    def known_queue_names(self) -> set[str]:
        """Return the queues of all jobs so far and of the project's tasks."""
        import_tasks()
        return {*self.broker.info().get("queues", {}), *registered_queues()}


def operator() -> str:
    """Return the user and the host of this command, to record next to what it does."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user without an entry
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


class Argument:
    """An argument of a subcommand, with the parameters of argparse's `add_argument`."""

    def __init__(self, *names: str, **options: Any) -> None:
        self.names, self.options = names, options


@dataclass(frozen=True, slots=True)
class Subcommand:
    """A subcommand of `manage.py faktory`."""

    name: str
    help: str
    run: Run
    arguments: Sequence[Argument]


def subcommand(name: str, text: str, *arguments: Argument) -> Callable[[Run], Run]:
    """Return a decorator for a function that executes a subcommand and returns the exit code."""

    def decorate(function: Run) -> Run:
        # A list: one function may serve several subcommands.
        one = Subcommand(name, text, function, arguments)
        function.__dict__["subcommands"] = [one, *getattr(function, "subcommands", ())]
        return function

    return decorate


# argparse shows the name of the function in its error: `invalid duration value: 'x'`.
def duration(text: str) -> float:
    """Parse a number of seconds above 0, at most one day. Raises ValueError."""
    seconds = float(text)
    if not 0 < seconds <= 86_400:
        raise ValueError
    return seconds


def whole(text: str) -> int:
    """Parse a whole number from 1 to 1,000,000. Raises ValueError."""
    number = int(text)
    if not 0 < number <= 1_000_000:
        raise ValueError
    return number


def flag(name: str, text: str) -> Argument:
    return Argument(name, action="store_true", help=text)


def limit(noun: str, default: int = 50) -> Argument:
    """Return the option that bounds a list."""
    return Argument(
        "--limit", type=whole, default=default, metavar="N", help=f"Maximum number of {noun}; default: {default}."
    )


def verbs(*words: str) -> Argument:
    """Return the argument that says what to do; `list` if it is left out."""
    return Argument("verb", nargs="?", choices=words, default="list", help="What to do; default: list.")


YES = flag("--yes", "Do not ask for confirmation; required without a terminal.")
REASON = Argument(
    "--reason", default="", metavar="TEXT", help="Why it is paused; pages and alarms show it, and this user and host."
)
