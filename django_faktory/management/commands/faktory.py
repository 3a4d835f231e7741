"""`manage.py faktory …`: parse, run the subcommand, and report errors in one line. `cli` has the subcommands."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser, no_translations
from django.db import Error as DatabaseError

from ...errors import BrokerUnavailable, FaktoryError
from ...store.database_errors import first_line
from ...tasks.compat import InvalidTask
from ..cli.screen import Screen, clean
from ..cli.subcommand import EXIT_CODES, UNAVAILABLE, WRONG, Invocation
from ..cli.subcommands import subcommands
from ..usage import Parser, report

_USAGE = 2
"""Exit code of argparse for a wrong usage. A subcommand exits with the same code if nothing matched (`NOTHING`)."""


class Command(BaseCommand):
    """Manage the jobs of this project: see docs/reference/commands.md."""

    help = "Manage jobs, queues, workers, batches and cron entries."
    requires_system_checks = ()
    is_parsed = False

    def add_arguments(self, parser: CommandParser) -> None:
        common = _django_options()
        parser.error = partial(report, parser)  # type: ignore[method-assign]  # Django creates the parser
        parser.epilog = "Exit codes: " + " ".join(f"{code}: {text}" for code, text in EXIT_CODES.items())
        subparsers = parser.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND", parser_class=Parser)
        # `parents`: without it, Django's own options are accepted only before the subcommand.
        for subcommand in subcommands().values():
            subparser = subparsers.add_parser(
                subcommand.name, help=subcommand.help, description=subcommand.help, parents=[common]
            )
            subparser.add_argument("--json", action="store_true", help="Print one JSON document.")
            for argument in subcommand.arguments:
                subparser.add_argument(*argument.names, **argument.options)

    def run_from_argv(self, argv: list[str]) -> None:
        """Run as Django does, but exit on wrong usage as on wrong configuration (`WRONG`)."""
        try:
            super().run_from_argv(argv)
            sys.stdout.flush()
        except BrokenPipeError:
            # The reader, such as `head`, has ended. Without the null device Python would raise again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except SystemExit as stop:
            # After parsing, the same code is the result of a subcommand.
            if stop.code == _USAGE and not self.is_parsed:
                sys.exit(WRONG)
            raise

    # Only alarms are translated, and scripts search the output for English words.
    @no_translations
    def handle(self, **options: Any) -> None:
        """Run the subcommand; exit with its code, or raise CommandError with a code for the kind of error."""
        self.is_parsed = True
        subcommand = subcommands()[options["subcommand"]]
        screen = Screen(self.stdout, self.stderr, is_json=options["json"])
        # Django writes all of stderr in red, but notes and questions go there too.
        self.stderr.style_func = None
        try:
            code = subcommand.run(Invocation(subcommand.name, options, screen))
        except BrokerUnavailable as error:
            raise CommandError(clean(error), returncode=UNAVAILABLE) from error
        except (FaktoryError, ImproperlyConfigured, InvalidTask) as error:
            raise CommandError(clean(error), returncode=WRONG) from error
        except DatabaseError as error:
            message = f"the database cannot be used: {first_line(error)}; see DATABASES, or run manage.py migrate"
            raise CommandError(clean(message), returncode=UNAVAILABLE) from error
        if code:
            sys.exit(code)


def _django_options() -> Parser:
    """Return a parser with the options of every Django command, accepted after the subcommand too.

    Its defaults are suppressed, so that they do not override options given before the subcommand.
    """
    common = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    group = common.add_argument_group("Django options")
    group.add_argument("--settings", help="The Python path of the settings module.")
    group.add_argument("--pythonpath", help="A folder to add to the Python path.")
    group.add_argument("--traceback", action="store_true", help="Show the traceback of an error.")
    group.add_argument("--no-color", action="store_true", help="Disable colors.")
    return common
