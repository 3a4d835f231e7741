"""Report a wrong option or name on the command line in one line, with the one that was probably meant."""

from __future__ import annotations

import re
from typing import Any, NoReturn

from django.core.management.base import CommandError, CommandParser

from ..core.suggestions import suggest

_choice = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)", re.DOTALL)
_option = re.compile(r"--[A-Za-z][\w-]*")


class Parser(CommandParser):
    """A parser of a subcommand that reports its errors as `report` does."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments, and refuse unknown ones here: the parser of the command does not know these options."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        report(self, message)


def report(parser: CommandParser, message: str) -> NoReturn:
    """Exit with one line; below `call_command`, raise CommandError as Django's parser does."""
    line = f"{_add_suggestion(parser, message)}; see {parser.prog} --help"
    if parser.called_from_command_line:
        parser.exit(2, f"{parser.prog}: error: {line}\n")
    raise CommandError(f"Error: {line}")


def _add_suggestion(parser: CommandParser, message: str) -> str:
    if match := _choice.search(message):
        # The texts of argparse differ between versions of Python: in some, each name is in quotes.
        hint = suggest(match[1], re.findall(r"[^\s,']+", match[2]))
        # With a suggestion the list of all names is left out.
        return f"{message[: match.start()]}invalid choice: {match[1]}{hint}" if hint else message
    if message.startswith("unrecognized arguments: ") and (unknown := _option.search(message)):
        return f"{message}{suggest(unknown[0], _option.findall(parser.format_usage()))}"
    return message
