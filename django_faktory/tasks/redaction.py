"""Redact the arguments of jobs for display, with the project's function `FAKTORY["REDACT"]`. Off by default.

Every output of arguments (admin, API, command line, logs, reprs) passes through this module; workers and Faktory
clients receive them unchanged. If the project's function fails, nothing is shown. Source:
`docs/private-arguments.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.utils.module_loading import import_string

from .. import conf
from ..core.json import jsontext
from ..core.logs import get_logger
from ..core.queries import Query, parse_query
from ..errors import FaktoryError, InvalidQuery

logger = get_logger(__name__)

HIDDEN = "[hidden]"
"""Placeholder for arguments if the project's function fails."""

_failed: set[str] = set()
"""Paths of functions with a logged failure: logged once, because the function is called for every displayed job."""


def is_on() -> bool:
    """Return True if the project redacts arguments."""
    return bool(conf.get("REDACT"))


def redact_arguments(jobtype: str, arguments: Any) -> Any:
    """Return the visible part of arguments, in JSON types: of a list of positional or a dict of keyword arguments."""
    # Through JSON, so that the project's function receives the same types from every caller.
    return jsontext.decode(_redact(jobtype, jsontext.encode(arguments))) if is_on() else arguments


def redact_job(jobtype: str, text: str) -> str:
    """Return a job's JSON with redacted arguments. Text that is not a valid job is hidden whole."""
    if not is_on():
        return text
    try:
        members = jsontext.last_members(text)
        if "args" in members:
            members["args"] = _redact(jobtype, members["args"])
        if members.get("custom", "").startswith("{"):
            custom = jsontext.last_members(members["custom"])
            if "kwargs" in custom:
                custom["kwargs"] = _redact(jobtype, custom["kwargs"])
                members["custom"] = jsontext.join(custom.items())
        return jsontext.join(members.items())
    except FaktoryError:  # a row that was edited manually
        return jsontext.encode(HIDDEN)


def shows_log() -> bool:
    """Return True if users may see log lines: all of them, or what `REDACT_LOG` returns."""
    # A line may quote any argument, and `REDACT` knows arguments only.
    return bool(conf.get("REDACT_LOG")) or not is_on()


def redact_log(jobtype: str, lines: Sequence[str]) -> list[str]:
    if not lines or not shows_log():
        return []
    if not conf.get("REDACT_LOG"):
        return list(lines)
    redacted = jsontext.decode(_call("REDACT_LOG", jobtype, jsontext.encode(lines)))
    is_valid = isinstance(redacted, list) and all(isinstance(line, str) for line in redacted)
    return redacted if is_valid else [HIDDEN]


def redact_history(jobtype: str, text: str) -> str:
    """Return the JSON of a job's attempts with the visible log lines. Text that is not valid is hidden whole."""
    if '"log"' not in text or not (conf.get("REDACT_LOG") or is_on()):
        return text
    try:
        attempts = jsontext.decode(text)
        for attempt in attempts:
            if "log" in attempt:
                attempt["log"] = redact_log(jobtype, attempt["log"])
        return jsontext.encode(attempts)
    except (FaktoryError, AttributeError, TypeError):  # a row that was edited manually
        return jsontext.encode(HIDDEN)


def is_redacted(jobtype: str, text: str) -> bool:
    """Return True if a part of this job is redacted: then a page must not offer the job for editing."""
    if not is_on():
        return False
    try:
        return bool(jsontext.decode(redact_job(jobtype, text)) != jsontext.decode(text))
    except FaktoryError:
        # Fail closed: an edit would otherwise write the placeholder back as an argument.
        return True


def query_of(text: str) -> Query:
    """Parse a user's query. Raises InvalidQuery, also for a query that would reveal redacted arguments."""
    query = parse_query(text)
    refuse_to_reveal(query)
    return query


def refuse_to_reveal(query: Query) -> None:
    """Raise InvalidQuery for a query that would reveal redacted arguments."""
    # Matches of guessed texts would reveal an argument letter by letter.
    if query.searches_arguments and is_on():
        raise InvalidQuery(
            "args, text, word: expected a query that looks into no arguments: FAKTORY['REDACT'] hides them"
        )


def describe_value(value: object) -> str:
    """Return an argument's value for an error message."""
    return HIDDEN if is_on() else f"{value!r:.80}"


def _redact(jobtype: str, text: str) -> str:
    return _call("REDACT", jobtype, text)


def _call(setting: str, jobtype: str, text: str) -> str:
    """Return the JSON that the function of this setting returns for this JSON."""
    path = conf.get(setting)
    try:
        hook = import_string(path) if isinstance(path, str) else path
        redacted = jsontext.encode(hook(jobtype, jsontext.decode(text)))
        # The result is the project's: deeper JSON would fail later, where the page is rendered.
        jsontext.check_depth(redacted)
    except Exception as error:  # noqa: BLE001  (project code; its message may quote the arguments)
        if str(path) not in _failed:
            _failed.add(str(path))
            logger.error(  # noqa: TRY400
                "%s failed, values are hidden path=%s jobtype=%s error=%s", setting, path, jobtype, type(error)
            )
        return jsontext.encode(HIDDEN)
    return redacted
